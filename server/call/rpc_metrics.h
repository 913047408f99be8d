// Counters and latencies of the RPCs, and the server's own metrics. The RPC
// metrics have the names of go-grpc-prometheus, so that standard dashboards and
// alerts work.
#ifndef WEFT_SERVER_CALL_RPC_METRICS_H_
#define WEFT_SERVER_CALL_RPC_METRICS_H_

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/call/rpc_policy.h"
#include "src/base/observe/metrics.h"

namespace weft::server {

// Why a call was refused. kInvalid means INVALID_ARGUMENT. kTooLarge means the
// Reason TOO_LARGE. Messages above --max-message-bytes are not counted, because
// gRPC itself refuses them. kQuota means too many calls, tokens per second,
// bytes of requests or bytes of imports. kAdapterRoom means too many adapters,
// too many bytes of adapters, or no place for a checkpoint to sample from.
// kDiskFull means that the disk of --state-dir or of the checkpoints is full,
// and kStoreUnreachable that the store of --state does not answer. kNoRoom
// means any other RESOURCE_EXHAUSTED. kOrder means a step number out of order,
// or a name that exists already.
enum class RejectReason : uint8_t {
  kInvalid,
  kTooLarge,
  kQuota,
  kAdapterRoom,
  kDiskFull,
  kStoreUnreachable,
  kNoRoom,
  kStarting,
  kDraining,
  kOrder,
  kCount,
};

// Returns the reason under which `status` is counted, or kCount if `status` is
// not a refusal. UNAVAILABLE without a Reason of its own here counts as
// kDraining, which CallRecord changes to kStarting while there is no engine.
RejectReason ReasonOf(const absl::Status& status);

enum class StartupPhase : uint8_t {
  kListening,
  kLoading,
  kStandby,
  kServing,
  kDraining
};

// Threads: any. The registry outlives the metrics.
class RpcMetrics {
 public:
  explicit RpcMetrics(prometheus::Registry* registry);

  void Started(Rpc rpc);
  void Handled(Rpc rpc, const absl::Status& status, absl::Duration elapsed);
  // Counts a request message that was read.
  void Received(Rpc rpc);
  // Counts a response message that was handed to gRPC.
  void Sent(Rpc rpc);
  void Rejected(RejectReason reason);
  void Replayed(Rpc rpc);
  void SetPhase(StartupPhase phase);

 private:
  struct Method {
    prometheus::Counter* started;
    prometheus::Histogram* seconds;
    prometheus::Counter* received;
    prometheus::Counter* sent;
    prometheus::Counter* replayed;
    std::array<prometheus::Counter*, 17> handled;  // By status code.
  };

  std::vector<Method> methods_;
  LabelledCounters rejected_;
  LabelledGauges phase_;
  prometheus::Gauge& inflight_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_RPC_METRICS_H_
