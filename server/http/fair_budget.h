// Limits what the calls of all clients take together: bytes of memory, or
// connections.
#ifndef WEFT_SERVER_HTTP_FAIR_BUDGET_H_
#define WEFT_SERVER_HTTP_FAIR_BUDGET_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// A budget that holders share. A holder may take half of what the others leave,
// so that there is room for one more in any case. A holder that has little may
// take a large amount, most of what is left.
// Threads: any.
class FairBudget : public std::enable_shared_from_this<FairBudget> {
 public:
  // `unit` names in errors what the budget counts, for example "connections",
  // and `flag` the flag that sets `most`, if there is one.
  FairBudget(int64_t most, std::string unit, std::string flag = "")
      : most_(most), unit_(std::move(unit)), flag_(std::move(flag)) {}

  int64_t most() const { return most_; }

  // How long something is held: while a request is read, or for minutes.
  enum class Term : uint8_t { kShort, kLong };

  // Reserves `amount` until the last copy of the result is destroyed. Errors:
  // RESOURCE_EXHAUSTED with reason SHARE_IN_USE if the holder has its share;
  // UNAVAILABLE with reason CALL_MEMORY_FULL if it has little, and the others
  // leave too little; RESOURCE_EXHAUSTED with reason TOO_LARGE if there is
  // never room for `amount`. They tell what the holder itself has, never what
  // others have. What is held kLong takes no large amount: never more than
  // seven eighths of half of what the others leave, so that the holder's other
  // calls have room, and never CALL_MEMORY_FULL.
  absl::StatusOr<std::shared_ptr<void>> Reserve(const std::string& holder,
                                                int64_t amount,
                                                Term term = Term::kShort)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Reserves `amount` for a request whose call holds `beside`, and which may
  // wait for `ahead` others of its holder that may never come. It leaves room
  // for as many of its size, and all that so wait hold at most a quarter of the
  // budget. Then there is room for one that does not wait, of up to a quarter,
  // once what ends by itself has ended. Errors: SHARE_IN_USE as for kLong;
  // TOO_LARGE if `amount` and `beside` are more than a quarter.
  absl::StatusOr<std::shared_ptr<void>> ReserveRequest(
      const std::string& holder, int64_t amount, int64_t beside, uint64_t ahead)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Status TooLarge(int64_t amount, int64_t limit) const;
  absl::Status InUse(int64_t own, int64_t amount, uint64_t ahead) const;
  int64_t HeldBy(const std::string& holder) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<void> Take(const std::string& holder, int64_t amount)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Release(const std::string& holder, int64_t amount)
      ABSL_LOCKS_EXCLUDED(mu_);

  const int64_t most_;
  const std::string unit_;
  const std::string flag_;
  Mutex mu_;
  int64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  // What each holder has reserved. A holder that has reserved nothing has no
  // entry.
  std::map<std::string, int64_t> holders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_FAIR_BUDGET_H_
