// Limits the memory that the requests of all clients take together.
#ifndef WEFT_SERVER_HTTP_BODY_BUDGET_H_
#define WEFT_SERVER_HTTP_BODY_BUDGET_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "src/base/mutex.h"

namespace weft {

// A budget of bytes that holders share. A holder is an owner (owner.h). A
// holder with several reservations may take at most half of the budget, so that
// room is left for other holders. A holder with one reservation may take more.
// Threads: any.
class BodyBudget : public std::enable_shared_from_this<BodyBudget> {
 public:
  explicit BodyBudget(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Reserves `bytes` until the last copy of the result is destroyed. A holder
  // without a reservation may take more than half, up to the whole budget.
  // Errors: RESOURCE_EXHAUSTED if a holder with a reservation would have more
  // than half; UNAVAILABLE if the budget has no room for `bytes`.
  [[nodiscard]] absl::StatusOr<std::shared_ptr<void>> Reserve(
      const std::string& holder, int64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Release(const std::string& holder, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mu_);

  const int64_t max_bytes_;
  Mutex mu_;
  int64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  // The bytes that each holder has reserved. A holder that has reserved none
  // has no entry.
  std::map<std::string, int64_t> holders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_SERVER_HTTP_BODY_BUDGET_H_
