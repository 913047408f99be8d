#include "src/journal/replay_table.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace weft {
namespace {

absl::Status OtherPayload(uint64_t step) {
  return absl::AlreadyExistsError(
      absl::StrCat("step ", step, " was sent before with another payload"));
}

}  // namespace

absl::StatusOr<ReplayTable::Answer> ReplayTable::Lookup(
    uint64_t step, const std::string& digest) const {
  if (step == 0) return Answer{};
  if (const auto it = in_flight_.find(step); it != in_flight_.end()) {
    if (it->second != digest) return OtherPayload(step);
    return Answer{.verdict = Verdict::kInFlight, .result = nullptr};
  }
  if (const auto it = done_.find(step); it != done_.end()) {
    if (it->second.digest != digest) return OtherPayload(step);
    return Answer{.verdict = Verdict::kReplay, .result = it->second.result};
  }
  if (step <= forgotten_) {
    return absl::OutOfRangeError(absl::StrCat(
        "step ", step, " is done and its result is no longer kept: only the ",
        window_, " latest are, from step ", done_.begin()->first));
  }
  return Answer{};
}

void ReplayTable::Begin(uint64_t step, const std::string& digest) {
  if (step != 0) in_flight_[step] = digest;
}

void ReplayTable::Complete(uint64_t step, Result result) {
  auto node = in_flight_.extract(step);
  if (node.empty()) return;
  Restore(step,
          {.digest = std::move(node.mapped()), .result = std::move(result)});
}

void ReplayTable::Fail(uint64_t step) { in_flight_.erase(step); }

void ReplayTable::Restore(uint64_t step, Done done) {
  done_.insert_or_assign(step, std::move(done));
  while (done_.size() > window_) {
    forgotten_ = std::max(forgotten_, done_.begin()->first);
    done_.erase(done_.begin());
  }
}

}  // namespace weft
