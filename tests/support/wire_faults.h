// Injects faults between a server and its clients: lost replies and changed
// retry hints. The faults change what the servers of this process send after a
// handler has run.
#ifndef WEFT_TESTS_SUPPORT_WIRE_FAULTS_H_
#define WEFT_TESTS_SUPPORT_WIRE_FAULTS_H_

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "grpcpp/grpcpp.h"
#include "src/base/threads/mutex.h"

namespace weft {

// Threads: any.
class WireFaults {
 public:
  // Installs the faults and returns the only object of this process. Call it
  // before the server starts.
  static WireFaults& Install();

  // Removes all faults.
  void Reset() ABSL_LOCKS_EXCLUDED(mu_);
  // The next call of this RPC runs, but its caller gets this status instead of
  // the reply. Repeated faults queue, and each affects one call.
  void LoseReply(std::string rpc, grpc::Status instead)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Sets the retry hint of refusals in milliseconds; none: no hint.
  void SetRetryHint(std::optional<int> milliseconds) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the token of the last call.
  std::string authorization() const ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the adapter in the metadata of the last call; empty: none.
  std::string adapter_id() const ABSL_LOCKS_EXCLUDED(mu_);
  std::string checkpoint() const ABSL_LOCKS_EXCLUDED(mu_);

  // The interceptor calls the functions below.
  using Metadata = std::multimap<std::string, std::string>;
  void Received(
      const std::multimap<grpc::string_ref, grpc::string_ref>& metadata)
      ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] grpc::Status Sending(const std::string& rpc,
                                     const grpc::Status& status,
                                     Metadata* trailers)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  WireFaults() = default;

  mutable Mutex mu_;
  std::deque<std::pair<std::string, grpc::Status>> lost_ ABSL_GUARDED_BY(mu_);
  std::optional<int> retry_hint_ ABSL_GUARDED_BY(mu_);
  std::string authorization_ ABSL_GUARDED_BY(mu_);
  std::string adapter_id_ ABSL_GUARDED_BY(mu_);
  std::string checkpoint_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_WIRE_FAULTS_H_
