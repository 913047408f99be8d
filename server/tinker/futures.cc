#include "server/tinker/futures.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/http/replies.h"
#include "src/base/clock.h"

namespace weft::server::tinker {
namespace {

// The memory of a future besides its result.
constexpr int64_t kFutureBytes = 512;

// After this status the SDK asks again in silence. After a try_again with
// status 200 it prints a warning first.
constexpr int kTryAgain = 408;

// A result above this size is sent in pieces of this size.
constexpr size_t kResultPieceBytes = 256 << 10;

// A result above this size is sent as protobuf only: JSON takes many times the
// memory, and the front's thread makes it.
constexpr size_t kMaxJsonBytes = size_t{4} << 20;

int64_t BytesOf(const std::string& result) {
  return static_cast<int64_t>(result.size()) + kFutureBytes;
}

}  // namespace

FutureResult FutureResult::Of(const Json& json) {
  return {.body = JsonReply(json).body};
}

bool Futures::Open(const std::string& id, const std::string& owner,
                   Scope scope) {
  const auto [entry, opened] = futures_.try_emplace(id);
  if (opened) {
    entry->second.owner = owner;
    entry->second.scope = scope;
  }
  if (entry->second.owner == owner) entry->second.asked = SteadyNow();
  return opened;
}

absl::Time Futures::LastAsked(const std::string& id) const {
  const auto found = futures_.find(id);
  if (found == futures_.end()) return absl::InfinitePast();
  return found->second.waiters.empty() ? found->second.asked
                                       : absl::InfiniteFuture();
}

bool Futures::Has(const std::string& id) const { return futures_.contains(id); }

Scope Futures::ScopeOf(const std::string& id, const std::string& owner) const {
  const auto found = futures_.find(id);
  return found != futures_.end() && found->second.owner == owner
             ? found->second.scope
             : Scope::kRead;
}

void Futures::Drop(const std::string& id) {
  const auto dropped = futures_.extract(id);
  if (dropped.empty()) return;
  for (const auto& [number, waiter] : dropped.mapped().waiters) {
    waiter.respond(ErrorReply(absl::AbortedError(
        "the request was refused or cancelled: send it again")));
  }
}

void Futures::DropOpen(const std::string& prefix) {
  std::vector<std::string> open;
  for (const auto& [id, future] : futures_) {
    if (future.result == nullptr && id.starts_with(prefix)) open.push_back(id);
  }
  for (const std::string& id : open) Drop(id);
}

void Futures::Finish(const std::string& id, FutureResult result) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.result != nullptr) {
    return;
  }
  Future& future = found->second;
  future.result = std::make_shared<const std::string>(std::move(result.body));
  future.to_json = result.to_json;
  finished_.Add(future.owner, id, BytesOf(*future.result));
  for (const auto& [number, waiter] : std::exchange(future.waiters, {})) {
    Answer(future, waiter);
  }
  while (finished_.bytes() > max_bytes_) {
    const auto oldest = finished_.Victim();
    if (oldest.value() == id) break;
    futures_.erase(finished_.Remove(oldest));
  }
}

void Futures::Answer(Future& future, const Waiter& waiter) {
  if (waiter.allow_metadata && future.result->size() > kAnnouncedBytes) {
    return waiter.respond(
        JsonReply({{"status", "complete_metadata"},
                   {"response_payload_size", future.result->size()}}));
  }
  if (future.to_json == nullptr || waiter.protobuf) {
    HttpReply reply = Send(future, future.result, &future.as_it_is);
    const bool is_protobuf = future.to_json != nullptr && reply.status == 200;
    if (is_protobuf) reply.content_type = kProtobufType;
    return waiter.respond(std::move(reply));
  }
  if (future.result->size() > kMaxJsonBytes) {
    return waiter.respond(ErrorReply(absl::InvalidArgumentError(absl::StrCat(
        "the result has ", future.result->size(),
        " bytes, too many for JSON: send Accept: ", kProtobufType))));
  }
  const auto sending = future.as_json.lock();
  waiter.respond(Send(future,
                      sending != nullptr ? sending->bytes
                                         : std::make_shared<const std::string>(
                                               future.to_json(*future.result)),
                      &future.as_json));
}

HttpReply Futures::Send(const Future& future, const Bytes& bytes,
                        std::weak_ptr<const Sending>* last) {
  if (bytes->size() <= kResultPieceBytes) return {.body = *bytes};
  std::shared_ptr<const Sending> sending = last->lock();
  if (sending == nullptr) {
    auto reserved =
        memory_->Reserve(future.owner, static_cast<int64_t>(bytes->size()));
    if (!reserved.ok()) return ErrorReply(reserved.status());
    sending = std::make_shared<const Sending>(
        Sending{.bytes = bytes, .reserved = *std::move(reserved)});
    *last = sending;
  }
  HttpReply reply{.body = ""};
  reply.stream = ReplyStream{
      .size = bytes->size(),
      .next = [sending, sent = std::make_shared<size_t>(0)](
                  const std::function<void(std::string)>& then) {
        std::string piece = sending->bytes->substr(*sent, kResultPieceBytes);
        *sent += piece.size();
        then(std::move(piece));
      }};
  return reply;
}

void Futures::Retrieve(const std::string& id, const std::string& owner,
                       bool allow_metadata, bool protobuf, Respond respond) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.owner != owner) {
    return respond(ErrorReply(
        absl::AbortedError("the request is not known, or was cancelled or "
                           "forgotten")));
  }
  Waiter waiter{allow_metadata, protobuf, std::move(respond)};
  if (found->second.result != nullptr) return Answer(found->second, waiter);
  const uint64_t number = next_waiter_++;
  found->second.waiters.emplace(number, std::move(waiter));
  after_(kLongPoll, [this, id, number] { GiveUp(id, number); });
}

void Futures::GiveUp(const std::string& id, uint64_t waiter) {
  const auto found = futures_.find(id);
  if (found == futures_.end()) return;
  auto node = found->second.waiters.extract(waiter);
  if (node.empty()) return;
  found->second.asked = SteadyNow();
  node.mapped().respond(JsonReply(
      {{"type", "try_again"}, {"request_id", id}, {"queue_state", "active"}},
      kTryAgain));
}

}  // namespace weft::server::tinker
