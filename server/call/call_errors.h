// Keeps the latest failed calls, for people who watch the server. Stores the
// adapter's name, but nothing else of a request, and no status messages.
#ifndef WEFT_SERVER_CALL_CALL_ERRORS_H_
#define WEFT_SERVER_CALL_CALL_ERRORS_H_

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
#include "server/call/caller.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

struct CallError {
  std::string rpc;  // For example "ForwardBackward".
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string reason;      // Reason::name of the error; empty if it has none.
  std::string adapter_id;  // Empty if no valid name was read.
  std::string tenant;      // The caller's tenant.
  absl::Time at;           // When the latest of the `count` calls ended.
  // How many failed calls have this rpc, code, reason and adapter_id.
  int64_t count = 1;
};

// Threads: any.
class CallErrors {
 public:
  // The most different errors that are kept for one Owner (below), and the most
  // Owners.
  static constexpr size_t kMaxKept = 32;
  static constexpr size_t kMaxOwners = 256;

  // Adds one failed call. `error` has the engine's name of the adapter. If the
  // Owner has too many different errors, drops its oldest error. If there are
  // too many Owners, drops the errors of the Owner whose last error is oldest.
  void Add(const Caller& caller, CallError error) ABSL_LOCKS_EXCLUDED(mu_);

  // Returns at most `max` errors, newest first, with the caller's names of
  // adapters. A caller that sees all adapters gets all errors. Any other caller
  // gets its tenant's errors, without those of admins.
  std::vector<CallError> Latest(const Caller& caller, size_t max) const
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A tenant, and whether the caller was an admin. A tenant does not see the
  // errors of its admins, because their calls may name other tenants' adapters.
  using Owner = std::pair<std::string, bool>;

  mutable Mutex mu_;
  // The errors of each Owner, the newest last.
  std::map<Owner, std::deque<CallError>> errors_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_CALL_ERRORS_H_
