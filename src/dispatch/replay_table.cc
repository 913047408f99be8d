#include "src/dispatch/replay_table.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/reason.h"

namespace weft::dispatch {
namespace {

absl::Status OtherPayload(uint64_t step) {
  return WithReason(absl::AlreadyExistsError(absl::StrCat(
                        "step ", step,
                        " was sent before with another payload: "
                        "another client trains this adapter, or this one has "
                        "counted wrong. Read next_step to go on from there")),
                    {.name = "STEP_HAS_ANOTHER_PAYLOAD",
                     .values = {{"step", absl::StrCat(step)}}});
}

// Returns whether `digest` may be that of the step's payload. The digest of a
// step of version 0.1 tells nothing of it (PayloadDigest). Then the result must
// be that of such a request, whose type is the digest's first byte.
bool MayBeOf(const ReplayTable::Done& done, const std::string& digest) {
  constexpr size_t kEarlierBytes = 32;
  if (done.digest.size() != kEarlierBytes || digest.size() <= kEarlierBytes) {
    return done.digest == digest;
  }
  return done.result == nullptr ||
         std::holds_alternative<StepFailure>(*done.result) ||
         done.result->index() == static_cast<size_t>(digest.front());
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
    if (!MayBeOf(it->second, digest)) return OtherPayload(step);
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

std::optional<uint64_t> ReplayTable::WorkOf(uint64_t step) const {
  const auto it = in_flight_.find(step);
  if (it == in_flight_.end()) return std::nullopt;
  return it->second.work_id;
}

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
  latest_ = {reply.adapter, reply.step};
  places_[latest_] = replies_.Add(reply.tenant, reply, reply.bytes);
}

void StoredReplies::Remove(AdapterKey adapter, uint64_t step) {
  const auto place = places_.extract({adapter, step});
  if (!place.empty()) replies_.Remove(place.mapped());
}

void StoredReplies::RemoveAll(AdapterKey adapter) {
  for (auto place = places_.lower_bound({adapter, 0});
       place != places_.end() && place->first.first == adapter;
       place = places_.erase(place)) {
    replies_.Remove(place->second);
  }
}

std::optional<StoredReplies::Reply> StoredReplies::TakeExcess() {
  if (bytes() <= max_bytes_) return std::nullopt;
  const auto oldest = replies_.Victim();
  const Key key = {oldest.value().adapter, oldest.value().step};
  if (key == latest_) return std::nullopt;
  places_.erase(key);
  return replies_.Remove(oldest);
}

}  // namespace weft::dispatch
