#include "server/http/fair_budget.h"

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::server {
namespace {

// A holder that has at most this part of a budget may take a large amount.
constexpr int64_t kSmallPart = 64;

// A holder that has its share may come again after this time, and later with
// much, because it costs more to send again.
constexpr int64_t kRetryMillis = 200;
constexpr int64_t kBytesPerMilli = 64 << 10;

// Returns how much of `left` may be taken at once.
int64_t Large(int64_t left) { return left - left / 8; }

}  // namespace

absl::StatusOr<std::shared_ptr<void>> FairBudget::Reserve(
    const std::string& holder, int64_t amount, Term term) {
  if (amount == 0) return std::shared_ptr<void>();
  MutexLock lock(&mu_);
  const int64_t own = HeldBy(holder);
  const int64_t others = taken_ - own;
  const bool is_long = term == Term::kLong;
  const int64_t limit = is_long ? Large(most_ / 2) : most_;
  if (amount > limit) return TooLarge(amount, limit);
  const int64_t share = (most_ - others) / 2;
  if (own + amount <= (is_long ? Large(share) : share)) {
    return Take(holder, amount);
  }
  if (term == Term::kShort && own <= most_ / kSmallPart) {
    // Whoever takes much leaves a part of the rest, so that nobody is shut out.
    const int64_t left = taken_ == 0 ? most_ : Large(most_ - taken_);
    if (amount <= left) return Take(holder, amount);
    return WithReason(
        absl::UnavailableError(
            "there is no room for the request now: send it again later"),
        {.name = "CALL_MEMORY_FULL", .values = {}});
  }
  return InUse(own, amount, /*ahead=*/0);
}

absl::StatusOr<std::shared_ptr<void>> FairBudget::ReserveRequest(
    const std::string& holder, int64_t amount, int64_t beside, uint64_t ahead) {
  const int64_t quarter = most_ / 4;
  if (amount + beside > quarter) return TooLarge(amount + beside, quarter);
  if (ahead == 0 || amount == 0) return Reserve(holder, amount, Term::kLong);
  MutexLock lock(&mu_);
  const int64_t own = HeldBy(holder);
  const int64_t room = (quarter - (taken_ - own)) / 2 - own - amount;
  if (room >= 0 && ahead <= static_cast<uint64_t>(room / (amount + beside))) {
    return Take(holder, amount);
  }
  return InUse(own, amount, ahead);
}

int64_t FairBudget::HeldBy(const std::string& holder) const {
  const auto entry = holders_.find(holder);
  return entry == holders_.end() ? 0 : entry->second;
}

absl::Status FairBudget::InUse(int64_t own, int64_t amount,
                               uint64_t ahead) const {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "your requests under way hold ", own, " ", unit_, ", and ", amount,
          " more would exceed your share of the ", most_,
          " that this server has for all: ",
          ahead > 0
              ? absl::StrCat("send the ", ahead, " steps below this one first")
          : own > 0 ? "wait until some end"
                    : "send it again when others have ended")),
      {.name = "SHARE_IN_USE",
       .values = {{"limit", absl::StrCat(most_ / 2)},
                  {"held", absl::StrCat(own)},
                  {"asked", absl::StrCat(amount)},
                  {"retry_ms",
                   absl::StrCat(kRetryMillis + amount / kBytesPerMilli)}}});
}

absl::Status FairBudget::TooLarge(int64_t amount, int64_t limit) const {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the request takes ", amount, " ", unit_, ", more than the ", limit,
          " that it may take on this server",
          flag_.empty() ? ""
                        : absl::StrCat(", a part of its ", flag_, " ", most_),
          ": send less at a time")),
      {.name = "TOO_LARGE", .values = {{"limit", absl::StrCat(limit)}}});
}

std::shared_ptr<void> FairBudget::Take(const std::string& holder,
                                       int64_t amount) {
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

}  // namespace weft::server
