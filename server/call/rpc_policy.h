// The table of the RPCs: what each needs, and how the server treats it.
#ifndef WEFT_SERVER_CALL_RPC_POLICY_H_
#define WEFT_SERVER_CALL_RPC_POLICY_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "src/base/tokens.h"

namespace weft::server {

// Every method of weft.v1 and of grpc.health.v1, in the order of kPolicies in
// rpc_policy.cc.
enum class Rpc : uint8_t {
  kForwardBackward,
  kForward,
  kOptimStep,
  kReportMetrics,
  kSample,
  kSampleStream,
  kCreateAdapter,
  kGetAdapter,
  kListAdapters,
  kDeleteAdapter,
  kMoveAdapter,
  kSaveCheckpoint,
  kLoadCheckpoint,
  kListCheckpoints,
  kDeleteCheckpoint,
  kSetCheckpointTtl,
  kDownloadCheckpoint,
  kUploadCheckpoint,
  kPublishSnapshot,
  kReleaseSnapshot,
  kExportAdapter,
  kImportAdapter,
  kGetInfo,
  kGetTokenizer,
  kDrain,
  kUndrain,
  kDrainLog,
  kWriteSnapshot,
  kProfile,
  kHealthCheck,
  kHealthWatch,
  kCount,
};

// The most bytes of a request that carries only names and options.
inline constexpr int64_t kMaxSmallRequestBytes = int64_t{256} << 10;
// The most bytes of a request that carries a prompt.
inline constexpr int64_t kMaxPromptRequestBytes = int64_t{4} << 20;
// The only limit of a request that carries data is --max-message-bytes.
inline constexpr int64_t kNoOwnLimit = INT64_MAX;

inline constexpr unsigned kNoTraits = 0;
// The requests of the method have a step number. The engine may answer a repeat
// of such a request with the stored reply, so its replays are counted.
inline constexpr unsigned kHasStep = 1;
// The method takes adapters as they are: it reads, saves or exports them.
// Operators need these methods before they stop a server.
inline constexpr unsigned kGoesOnInADrain = 2;
// The audit log has every call of the method, whoever calls it.
inline constexpr unsigned kAudited = 4;

struct RpcPolicy {
  const char* path;  // "/package.Service/Method".
  const char* type;  // As go-grpc-prometheus names it.
  Scope scope;
  unsigned traits = kNoTraits;
  int64_t max_request_bytes = kMaxSmallRequestBytes;

  // Returns whether the method needs the scope train or admin.
  bool changes_state() const {
    return scope == Scope::kTrain || scope == Scope::kAdmin;
  }
};

const RpcPolicy& PolicyOf(Rpc rpc);

// Returns the policy of a method, or null if it has none. Nobody may call a
// method without a policy.
const RpcPolicy* FindPolicy(absl::string_view path);

// Returns a path such as "/weft.v1.TrainingService/ForwardBackward".
inline const char* RpcPath(Rpc rpc) { return PolicyOf(rpc).path; }
// Returns the path without its first slash.
inline const char* RpcName(Rpc rpc) { return RpcPath(rpc) + 1; }

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_RPC_POLICY_H_
