#include "server/call/tenant_quota.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::server {

absl::Status TenantQuota::Begin(const std::string& tenant, absl::Time now) {
  MutexLock lock(&mu_);
  Account& account = accounts_[tenant];
  const double gone =
      kBegunPerSecond * absl::ToDoubleSeconds(now - account.begun_at);
  account.begun = std::max(0.0, account.begun - std::max(0.0, gone));
  account.begun_at = now;
  if (account.begun + 1 > kMaxBegun) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "tenant '", tenant, "' has begun ", kMaxBegun,
            " calls whose requests have not come: send them, or wait")),
        {.name = "CALLS_UNDER_WAY",
         .values = {{"limit", absl::StrCat(kMaxBegun)}, {"tenant", tenant}}});
  }
  account.begun += 1;
  return absl::OkStatus();
}

void TenantQuota::Arrive(const std::string& tenant) {
  MutexLock lock(&mu_);
  double& begun = accounts_[tenant].begun;
  begun = std::max(0.0, begun - 1);
}

absl::Status TenantQuota::Enter(const std::string& tenant) {
  MutexLock lock(&mu_);
  const int calls = ++accounts_[tenant].calls;
  if (max_calls_ == 0 || calls <= max_calls_) return absl::OkStatus();
  return TooManyCalls(tenant);
}

absl::Status TenantQuota::CheckSpare(const std::string& tenant) {
  MutexLock lock(&mu_);
  if (max_calls_ == 0 || accounts_[tenant].calls < max_calls_) {
    return absl::OkStatus();
  }
  return TooManyCalls(tenant);
}

absl::Status TenantQuota::TooManyCalls(const std::string& tenant) const {
  return WithReason(
      absl::ResourceExhaustedError(
          absl::StrCat("tenant '", tenant, "' has ", max_calls_,
                       " calls under way, as many as --max-calls-per-tenant")),
      {.name = "CALLS_UNDER_WAY",
       .values = {{"limit", absl::StrCat(max_calls_)}, {"tenant", tenant}}});
}

void TenantQuota::Leave(const std::string& tenant) {
  MutexLock lock(&mu_);
  --accounts_[tenant].calls;
}

absl::Status TenantQuota::Spend(const std::string& tenant, int64_t tokens,
                                absl::Time now) {
  if (tokens_per_second_ == 0) return absl::OkStatus();
  const auto rate = static_cast<double>(tokens_per_second_);
  const double most = rate * absl::ToDoubleSeconds(kBurst);
  MutexLock lock(&mu_);
  Account& account = accounts_[tenant];
  if (!account.has_spent) {
    account.has_spent = true;
    account.credit = most;
    account.updated = now;
  }
  const double grown = rate * absl::ToDoubleSeconds(now - account.updated);
  account.credit = std::min(most, account.credit + std::max(0.0, grown));
  account.updated = now;
  if (account.credit <= 0) {
    const absl::Duration wait = absl::Ceil(
        absl::Seconds(-account.credit / rate), absl::Milliseconds(100));
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "tenant '", tenant, "' has had more than its ", tokens_per_second_,
            " tokens per second (--max-tokens-per-second-per-tenant); in "
            "credit again in ",
            absl::FormatDuration(wait))),
        {.name = "TOKEN_RATE",
         .values = {
             {"limit", absl::StrCat(tokens_per_second_)},
             {"tenant", tenant},
             {"retry_ms", absl::StrCat(absl::ToInt64Milliseconds(wait))}}});
  }
  account.credit -= static_cast<double>(tokens);
  return absl::OkStatus();
}

void TenantQuota::Refund(const std::string& tenant, int64_t tokens) {
  MutexLock lock(&mu_);
  accounts_[tenant].credit += static_cast<double>(tokens);
}

}  // namespace weft::server
