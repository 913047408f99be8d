#include "src/dispatch/stored_replies.h"

#include <algorithm>

namespace weft::dispatch {

uint64_t StoredReplies::Add(const Reply& reply) {
  Account& account = accounts_[reply.tenant];
  account.by_age.emplace(next_receipt_, reply);
  account.bytes += reply.bytes;
  tenant_of_.emplace(next_receipt_, reply.tenant);
  bytes_ += reply.bytes;
  return next_receipt_++;
}

void StoredReplies::Remove(uint64_t receipt) {
  const auto tenant = tenant_of_.find(receipt);
  if (tenant != tenant_of_.end()) {
    Take(accounts_.find(tenant->second), receipt);
  }
}

std::optional<StoredReplies::Reply> StoredReplies::TakeExcess() {
  if (bytes_ <= max_bytes_) return std::nullopt;
  const auto most = std::ranges::max_element(
      accounts_, {}, [](const auto& entry) { return entry.second.bytes; });
  const uint64_t oldest = most->second.by_age.begin()->first;
  if (oldest == next_receipt_ - 1) return std::nullopt;
  return Take(most, oldest);
}

StoredReplies::Reply StoredReplies::Take(Accounts::iterator account,
                                         uint64_t receipt) {
  Reply reply = account->second.by_age.extract(receipt).mapped();
  account->second.bytes -= reply.bytes;
  bytes_ -= reply.bytes;
  tenant_of_.erase(receipt);
  if (account->second.by_age.empty()) accounts_.erase(account);
  return reply;
}

}  // namespace weft::dispatch
