#include "server/tinker/futures.h"

#include <algorithm>
#include <utility>

namespace weft::tinker {
namespace {

// The memory of a future besides its result.
constexpr int64_t kEntryBytes = 512;

int64_t BytesOf(const FutureResult& result) {
  return static_cast<int64_t>(result.body.size()) + kEntryBytes;
}

}  // namespace

FutureResult FutureResult::Of(const Json& json) {
  return {.body = JsonReply(json).body};
}

bool Futures::Open(const std::string& id, const std::string& owner) {
  const auto [entry, opened] = futures_.try_emplace(id);
  if (opened) entry->second.owner = owner;
  return opened;
}

bool Futures::Has(const std::string& id) const { return futures_.contains(id); }

void Futures::Drop(const std::string& id) {
  const auto dropped = futures_.extract(id);
  if (dropped.empty()) return;
  for (const auto& [number, waiter] : dropped.mapped().waiters) {
    waiter.respond(ErrorReply(
        absl::AbortedError("the request was refused: send it again")));
  }
}

void Futures::Finish(const std::string& id, FutureResult result) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.finished) return;
  Future& future = found->second;
  future.finished = true;
  future.result = std::move(result);
  Charge(future, id);
  for (const auto& [number, waiter] : std::exchange(future.waiters, {})) {
    Answer(future, waiter);
  }
  while (bytes_ > max_bytes_ && ForgetOne(id)) {
  }
}

void Futures::Charge(const Future& future, const std::string& id) {
  const int64_t bytes = BytesOf(future.result);
  Account& account = accounts_[future.owner];
  account.finished.push_back(id);
  account.bytes += bytes;
  bytes_ += bytes;
}

bool Futures::ForgetOne(const std::string& newest) {
  const auto most = std::ranges::max_element(
      accounts_, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == accounts_.end()) return false;
  Account& account = most->second;
  if (account.finished.front() == newest) return false;
  const auto oldest = futures_.find(account.finished.front());
  account.finished.pop_front();
  if (oldest != futures_.end() && oldest->second.finished) {
    const int64_t bytes = BytesOf(oldest->second.result);
    account.bytes -= bytes;
    bytes_ -= bytes;
    futures_.erase(oldest);
  }
  if (account.finished.empty()) accounts_.erase(most);
  return true;
}

void Futures::Answer(const Future& future, const Waiter& waiter) {
  const FutureResult& result = future.result;
  if (waiter.allow_metadata && result.body.size() > kAnnouncedBytes) {
    return waiter.respond(
        JsonReply({{"status", "complete_metadata"},
                   {"response_payload_size", result.body.size()}}));
  }
  if (result.to_json == nullptr) return waiter.respond({.body = result.body});
  if (!waiter.protobuf) {
    return waiter.respond({.body = result.to_json(result.body)});
  }
  waiter.respond({.content_type = kProtobufType, .body = result.body});
}

void Futures::Retrieve(const std::string& id, const std::string& owner,
                       bool allow_metadata, bool protobuf, Respond respond) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.owner != owner) {
    return respond(ErrorReply(
        absl::AbortedError("the request is not known, or was forgotten")));
  }
  Waiter waiter{allow_metadata, protobuf, std::move(respond)};
  if (found->second.finished) return Answer(found->second, waiter);
  const uint64_t number = next_waiter_++;
  found->second.waiters.emplace(number, std::move(waiter));
  after_(kLongPoll, [this, id, number] { GiveUp(id, number); });
}

void Futures::GiveUp(const std::string& id, uint64_t waiter) {
  const auto found = futures_.find(id);
  if (found == futures_.end()) return;
  auto node = found->second.waiters.extract(waiter);
  if (node.empty()) return;
  node.mapped().respond(JsonReply(
      {{"type", "try_again"}, {"request_id", id}, {"queue_state", "active"}}));
}

}  // namespace weft::tinker
