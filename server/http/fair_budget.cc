#include "server/http/fair_budget.h"

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft {

absl::StatusOr<std::shared_ptr<void>> FairBudget::Reserve(
    const std::string& holder, int64_t amount) {
  if (amount == 0) return std::shared_ptr<void>();
  MutexLock lock(&mu_);
  const auto own = holders_.find(holder);
  if (own != holders_.end() && own->second + amount > most_ / 2) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "your requests under way hold ", own->second, " ", unit_, ", and ",
            amount, " more would exceed ", most_ / 2,
            ", half of what this server has for all: wait until some end")),
        {.name = "SHARE_IN_USE",
         .values = {{"limit", absl::StrCat(most_ / 2)},
                    {"held", absl::StrCat(own->second)},
                    {"asked", absl::StrCat(amount)}}});
  }
  if (taken_ + amount > most_) {
    return absl::UnavailableError(
        "there is no room for the request now: send it again later");
  }
  taken_ += amount;
  holders_[holder] += amount;
  return std::shared_ptr<void>(
      nullptr, [self = shared_from_this(), holder, amount](void* /*none*/) {
        self->Release(holder, amount);
      });
}

void FairBudget::Release(const std::string& holder, int64_t amount) {
  MutexLock lock(&mu_);
  taken_ -= amount;
  const auto own = holders_.find(holder);
  own->second -= amount;
  if (own->second == 0) holders_.erase(own);
}

}  // namespace weft
