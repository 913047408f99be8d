// The latest calls that failed, for people who watch the server. No message and
// no payload is kept, so nothing of what a client sent but its adapter's name.
#ifndef WEFT_SERVER_CALL_ERRORS_H_
#define WEFT_SERVER_CALL_ERRORS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/caller.h"
#include "src/base/mutex.h"

namespace weft {

struct CallError {
  std::string rpc;  // "ForwardBackward".
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string reason;      // The name of its Reason; empty if it has none.
  std::string adapter_id;  // Empty if the call named none that is valid.
  std::string tenant;      // The caller's.
  absl::Time at;           // When the latest of them ended.
  int64_t count = 1;       // Calls that failed in this way.
};

// Threads: any.
class CallErrors {
 public:
  // The kinds of errors that are kept of one tenant, and the tenants.
  static constexpr size_t kMaxKept = 32;
  static constexpr size_t kMaxOwners = 256;

  // Counts an error. `error` has the engine's name of the adapter. If the
  // caller has too many kinds, the oldest is forgotten.
  void Add(const Caller& caller, CallError error) ABSL_LOCKS_EXCLUDED(mu_);

  // Returns the errors that the caller may see, with its names, newest first:
  // those of its tenant, or all.
  [[nodiscard]] std::vector<CallError> Latest(const Caller& caller,
                                              size_t max) const
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A tenant, and whether the caller was an admin. A tenant does not see the
  // errors of its admins, who name other tenants' adapters.
  using Owner = std::pair<std::string, bool>;

  mutable Mutex mu_;
  // Each owner's errors, the newest last.
  std::map<Owner, std::deque<CallError>> errors_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_SERVER_CALL_ERRORS_H_
