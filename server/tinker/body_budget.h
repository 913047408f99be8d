// Memory for the bodies of requests, over all connections.
#ifndef WEFT_SERVER_TINKER_BODY_BUDGET_H_
#define WEFT_SERVER_TINKER_BODY_BUDGET_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "src/base/mutex.h"

namespace weft::tinker {

// One holder has at most half, so that nobody takes the room of all others.
// Threads: any.
class BodyBudget : public std::enable_shared_from_this<BodyBudget> {
 public:
  explicit BodyBudget(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Takes `bytes` until the last copy of the result is gone. A holder that has
  // nothing may take more than its half, if the whole has it. Errors:
  // RESOURCE_EXHAUSTED (the holder's half), UNAVAILABLE (the whole).
  [[nodiscard]] absl::StatusOr<std::shared_ptr<void>> Reserve(
      const std::string& holder, int64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Release(const std::string& holder, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mu_);

  const int64_t max_bytes_;
  Mutex mu_;
  int64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  // Those with bytes.
  std::map<std::string, int64_t> holders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_BODY_BUDGET_H_
