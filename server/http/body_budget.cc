#include "server/http/body_budget.h"

namespace weft {

absl::StatusOr<std::shared_ptr<void>> BodyBudget::Reserve(
    const std::string& holder, int64_t bytes) {
  if (bytes == 0) return std::shared_ptr<void>();
  MutexLock lock(&mu_);
  const auto own = holders_.find(holder);
  if (own != holders_.end() && own->second + bytes > max_bytes_ / 2) {
    return absl::ResourceExhaustedError(
        "your requests that are under way are too large together");
  }
  if (taken_ + bytes > max_bytes_) {
    return absl::UnavailableError("there is no room for the body now");
  }
  taken_ += bytes;
  holders_[holder] += bytes;
  return std::shared_ptr<void>(
      nullptr, [self = shared_from_this(), holder, bytes](void* /*none*/) {
        self->Release(holder, bytes);
      });
}

void BodyBudget::Release(const std::string& holder, int64_t bytes) {
  MutexLock lock(&mu_);
  taken_ -= bytes;
  const auto own = holders_.find(holder);
  own->second -= bytes;
  if (own->second == 0) holders_.erase(own);
}

}  // namespace weft
