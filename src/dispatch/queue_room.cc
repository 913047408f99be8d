#include "src/dispatch/queue_room.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::dispatch {
namespace {

using Load = QueueRoom::Load;

bool RequestFits(const Load& load, int64_t max_requests) {
  return load.requests < max_requests;
}

bool TokensFit(const Load& load, int64_t tokens, int64_t max_tokens) {
  return load.tokens == 0 || tokens <= max_tokens - load.tokens;
}

absl::Status TooManyRequests(const Load& load, const std::string& whose,
                             const char* limit, int64_t max_requests) {
  return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                        "the queue is full: ", load.requests, " requests",
                        whose, " wait, ", limit, " is ", max_requests)),
                    {.name = "QUEUE_FULL",
                     .values = {{"flag", limit},
                                {"limit", absl::StrCat(max_requests)},
                                {"waiting", absl::StrCat(load.requests)}}});
}

absl::Status TooManyTokens(const Load& load, const std::string& whose,
                           int64_t tokens, const char* limit,
                           int64_t max_tokens) {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the queue is full: ", load.tokens, " tokens", whose, " wait, ",
          tokens, " more would exceed ", limit, " ", max_tokens)),
      {.name = "QUEUE_FULL",
       .values = {{"flag", limit},
                  {"limit", absl::StrCat(max_tokens)},
                  {"waiting", absl::StrCat(load.tokens)},
                  {"asked", absl::StrCat(tokens)}}});
}

}  // namespace

absl::Status QueueRoom::Check(const std::string& tenant, int64_t tokens,
                              const Load& leaving) const {
  const auto without = [&leaving](const Load& load) {
    return Load{.requests = load.requests - leaving.requests,
                .tokens = load.tokens - leaving.tokens};
  };
  const Load own = without(LoadOf(tenant));
  const Load total = without(total_);
  const std::string of_tenant = absl::StrCat(" of tenant \"", tenant, "\"");
  if (limits_.max_requests_per_tenant > 0 &&
      !RequestFits(own, limits_.max_requests_per_tenant)) {
    return TooManyRequests(own, of_tenant, "max_queue_requests_per_tenant",
                           limits_.max_requests_per_tenant);
  }
  if (limits_.max_calls_per_tenant > 1 && !tenant.empty() &&
      !RequestFits(own, limits_.max_calls_per_tenant - 1)) {
    return TooManyRequests(own, of_tenant, "max_calls_per_tenant",
                           limits_.max_calls_per_tenant);
  }
  if (limits_.max_tokens_per_tenant > 0 &&
      !TokensFit(own, tokens, limits_.max_tokens_per_tenant)) {
    return TooManyTokens(own, of_tenant, tokens, "max_queue_tokens_per_tenant",
                         limits_.max_tokens_per_tenant);
  }
  const auto num_waiting = static_cast<int64_t>(tenants_.size()) +
                           (tenants_.contains(tenant) ? 0 : 1);
  if (!RequestFits(total, limits_.max_requests) && own.requests > 0 &&
      !RequestFits(own, limits_.max_requests / num_waiting)) {
    return TooManyRequests(own, of_tenant, "max_queue_requests",
                           limits_.max_requests);
  }
  if (!TokensFit(total, tokens, limits_.max_tokens) &&
      !TokensFit(own, tokens, limits_.max_tokens / num_waiting)) {
    return TooManyTokens(own, of_tenant, tokens, "max_queue_tokens",
                         limits_.max_tokens);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> QueueRoom::MakeRoom(
    const std::string& tenant, int64_t tokens,
    std::vector<StrandedWork> stranded) const {
  std::vector<uint64_t> ids;
  std::ranges::sort(stranded, std::greater<>(), [](const auto& work) {
    return std::pair(work.ahead, work.arrival);
  });
  Load leaving;
  for (const StrandedWork& work : stranded) {
    ids.push_back(work.id);
    ++leaving.requests;
    leaving.tokens += work.tokens;
    if (Check(tenant, tokens, leaving).ok()) return ids;
  }
  return Check(tenant, tokens, /*leaving=*/{});
}

void QueueRoom::Add(const std::string& tenant, int64_t tokens) {
  for (Load* load : {&total_, &tenants_[tenant]}) {
    ++load->requests;
    load->tokens += tokens;
  }
}

void QueueRoom::Remove(const std::string& tenant, int64_t tokens) {
  const auto it = tenants_.find(tenant);
  for (Load* load : {&total_, &it->second}) {
    --load->requests;
    load->tokens -= tokens;
  }
  if (it->second.requests == 0) tenants_.erase(it);
}

Load QueueRoom::LoadOf(const std::string& tenant) const {
  const auto it = tenants_.find(tenant);
  return it == tenants_.end() ? Load{} : it->second;
}

}  // namespace weft::dispatch
