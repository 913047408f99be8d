#include "src/dispatch/replay_table.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::dispatch {
namespace {

absl::Status OtherPayload(uint64_t step) {
  return WithReason(
      absl::AlreadyExistsError(
          absl::StrCat("step ", step, " was sent before with another payload")),
      {.name = "STEP_HAS_ANOTHER_PAYLOAD",
       .values = {{"step", absl::StrCat(step)}}});
}

}  // namespace

absl::StatusOr<ReplayTable::Answer> ReplayTable::Lookup(
    uint64_t step, const std::string& digest) const {
  if (step == 0) return Answer{};
  if (const auto it = in_flight_.find(step); it != in_flight_.end()) {
    if (it->second.digest != digest) return OtherPayload(step);
    return Answer{.verdict = Verdict::kInFlight, .work_id = it->second.work_id};
  }
  if (const auto it = done_.find(step); it != done_.end()) {
    if (it->second.digest != digest) return OtherPayload(step);
    if (it->second.result == nullptr) {
      return absl::OutOfRangeError(
          absl::StrCat("step ", step,
                       " is done and its result is no longer kept: stored "
                       "replies reached --max-stored-reply-bytes"));
    }
    return Answer{.verdict = Verdict::kReplay, .result = it->second.result};
  }
  if (step <= forgotten_) {
    return absl::OutOfRangeError(absl::StrCat(
        "step ", step, " is done and its result is no longer kept: only the ",
        window_, " latest are, from step ", forgotten_ + 1));
  }
  return Answer{};
}

void ReplayTable::Begin(uint64_t step, const std::string& digest,
                        uint64_t work_id) {
  if (step != 0) in_flight_[step] = {.digest = digest, .work_id = work_id};
}

std::vector<uint64_t> ReplayTable::Complete(uint64_t step,
                                            StepResultPtr result) {
  auto node = in_flight_.extract(step);
  if (node.empty()) return {step};
  done_.insert_or_assign(step, Done{.digest = std::move(node.mapped().digest),
                                    .result = std::move(result)});
  std::vector<uint64_t> left;
  while (done_.size() > window_) {
    forgotten_ = std::max(forgotten_, done_.begin()->first);
    left.push_back(done_.begin()->first);
    done_.erase(done_.begin());
  }
  return left;
}

void ReplayTable::Fail(uint64_t step) { in_flight_.erase(step); }

StepResultPtr ReplayTable::ResultOf(uint64_t step) const {
  const auto it = done_.find(step);
  return it == done_.end() ? nullptr : it->second.result;
}

void ReplayTable::DropResult(uint64_t step) {
  const auto it = done_.find(step);
  if (it != done_.end()) it->second.result.reset();
}

void StoredReplies::Add(const Reply& reply) {
  Remove(reply.adapter, reply.step);
  Account& account = accounts_[reply.tenant];
  account.by_age.emplace(++num_added_, reply);
  account.bytes += reply.bytes;
  bytes_ += reply.bytes;
  places_[{reply.adapter, reply.step}] = {reply.tenant, num_added_};
}

void StoredReplies::Remove(AdapterKey adapter, uint64_t step) {
  const auto place = places_.find({adapter, step});
  if (place != places_.end()) Take(place->second);
}

void StoredReplies::RemoveAll(AdapterKey adapter) {
  for (auto place = places_.lower_bound({adapter, 0});
       place != places_.end() && place->first.first == adapter;
       place = places_.lower_bound({adapter, 0})) {
    Take(place->second);
  }
}

std::optional<StoredReplies::Reply> StoredReplies::TakeExcess() {
  if (bytes_ <= max_bytes_) return std::nullopt;
  const auto most = std::ranges::max_element(
      accounts_, {}, [](const auto& entry) { return entry.second.bytes; });
  const uint64_t oldest = most->second.by_age.begin()->first;
  if (oldest == num_added_) return std::nullopt;
  return Take({most->first, oldest});
}

StoredReplies::Reply StoredReplies::Take(const Place& place) {
  const auto account = accounts_.find(place.first);
  Reply reply = account->second.by_age.extract(place.second).mapped();
  account->second.bytes -= reply.bytes;
  bytes_ -= reply.bytes;
  if (account->second.by_age.empty()) accounts_.erase(account);
  places_.erase({reply.adapter, reply.step});
  return reply;
}

}  // namespace weft::dispatch
