#include "src/dispatch/stored_replies.h"

namespace weft::dispatch {

uint64_t StoredReplies::Add(const Reply& reply) {
  bytes_ += reply.bytes;
  by_age_.emplace(next_receipt_, reply);
  return next_receipt_++;
}

void StoredReplies::Remove(uint64_t receipt) {
  const auto it = by_age_.find(receipt);
  if (it == by_age_.end()) return;
  bytes_ -= it->second.bytes;
  by_age_.erase(it);
}

std::optional<StoredReplies::Reply> StoredReplies::TakeExcess() {
  if (bytes_ <= max_bytes_ || by_age_.size() <= 1) return std::nullopt;
  const auto oldest = by_age_.begin();
  const Reply reply = oldest->second;
  bytes_ -= reply.bytes;
  by_age_.erase(oldest);
  return reply;
}

}  // namespace weft::dispatch
