#include "client/step_counter.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"

namespace weft::client {

StepOutcome OutcomeOfStep(const absl::Status& status) {
  if (status.GetPayload(kStepDonePayload)) return StepOutcome::kDone;
  if (status.GetPayload(kStaleEpochPayload)) return StepOutcome::kRefused;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return StepOutcome::kDone;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kUnimplemented:
      return StepOutcome::kRefused;
    default:
      return StepOutcome::kUnknown;
  }
}

uint64_t StepCounter::next_step() const {
  absl::MutexLock lock(&mu_);
  return next_;
}

absl::StatusOr<StepNumber> StepCounter::Take() {
  absl::MutexLock lock(&mu_);
  if (!problem_.empty()) return absl::FailedPreconditionError(problem_);
  in_flight_[next_] = InFlight{};
  return StepNumber{.step = next_++, .epoch = epoch_};
}

void StepCounter::SetCancel(uint64_t number, std::function<void()> cancel) {
  {
    absl::MutexLock lock(&mu_);
    const auto found = in_flight_.find(number);
    if (found == in_flight_.end()) return;
    if (!found->second.withdrawn) {
      found->second.cancel = std::move(cancel);
      return;
    }
  }
  // Holds no lock here, because a cancelled call may call Finish at once.
  cancel();
}

void StepCounter::SetWake(uint64_t number, std::function<void()> wake) {
  absl::MutexLock lock(&mu_);
  const auto found = in_flight_.find(number);
  if (found != in_flight_.end()) found->second.wake = std::move(wake);
}

absl::StatusOr<absl::Time> StepCounter::TurnOf(uint64_t number,
                                               absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto found = in_flight_.find(number);
  if (found == in_flight_.end()) return absl::InfinitePast();
  if (!refusal_.ok()) {
    absl::Time turn = retry_at_;
    // Only the lowest step that is not sent may go.
    int place = 0;
    for (auto lower = in_flight_.begin(); lower != found; ++lower) {
      if (++place >= limit_ || !lower->second.sent) {
        turn = absl::InfiniteFuture();
        break;
      }
    }
    const absl::Time now = SteadyNow();
    if (turn > now && deadline <= now) return refusal_;
    if (turn > now) return std::min(turn, deadline);
  }
  found->second.sent = true;
  found->second.answers = answers_;
  return absl::InfinitePast();
}

void StepCounter::HoldBack(uint64_t number, const absl::Status& refusal,
                           absl::Time retry_at) {
  absl::MutexLock lock(&mu_);
  const auto found = in_flight_.find(number);
  if (found == in_flight_.end()) return;
  found->second.sent = false;
  const auto sent =
      std::count_if(in_flight_.begin(), found,
                    [](const auto& lower) { return lower.second.sent; });
  refusal_ = refusal;
  limit_ = std::min(limit_, std::max<double>(1, static_cast<double>(sent)));
  if (found->second.answers == answers_) retry_at_ = retry_at;
}

std::vector<std::function<void()>> StepCounter::NextTurns(StepOutcome outcome) {
  if (in_flight_.empty()) {
    refusal_ = absl::OkStatus();
    limit_ = kNoLimit;
  }
  if (outcome == StepOutcome::kDone) {
    // The step's place at the server is free.
    ++answers_;
    limit_ += 1 / limit_;
    retry_at_ = absl::InfinitePast();
  }
  std::vector<std::function<void()>> wakes;
  int place = 0;
  for (const auto& [number, step] : in_flight_) {
    if (++place > limit_) break;
    if (!step.sent && step.wake) wakes.push_back(step.wake);
  }
  return wakes;
}

absl::Status StepCounter::Finish(uint64_t number, StepOutcome outcome,
                                 const absl::Status& status) {
  std::vector<std::function<void()>> calls;
  const absl::Status result = End(number, outcome, status, &calls);
  // Holds no lock here, because a cancelled call may call Finish at once.
  for (const auto& call : calls) call();
  return result;
}

absl::Status StepCounter::End(uint64_t number, StepOutcome outcome,
                              const absl::Status& status,
                              std::vector<std::function<void()>>* calls) {
  absl::MutexLock lock(&mu_);
  const auto found = in_flight_.find(number);
  bool withdrawn = false;
  if (found != in_flight_.end()) {
    withdrawn = found->second.withdrawn;
    in_flight_.erase(found);
  }
  *calls = NextTurns(outcome);
  if (withdrawn) return absl::FailedPreconditionError(problem_);
  if (outcome == StepOutcome::kDone) return status;
  if (outcome == StepOutcome::kRefused && number == next_ - 1) {
    next_ = number;
    return status;
  }
  const bool refused = outcome == StepOutcome::kRefused;
  problem_ = absl::StrCat(
      "step ", number, refused ? " was refused (" : " may have run (",
      status.message(),
      "); wait for the steps in flight, then call Resync() and go on");
  if (refused) {
    for (auto later = in_flight_.upper_bound(number); later != in_flight_.end();
         ++later) {
      later->second.withdrawn = true;
      if (later->second.cancel) calls->push_back(later->second.cancel);
    }
  }
  return status;
}

absl::Status StepCounter::CheckIdle() const {
  absl::MutexLock lock(&mu_);
  if (in_flight_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(in_flight_.size(), " steps in flight: wait for them first"));
}

void StepCounter::Reset(uint64_t last_step, uint64_t epoch) {
  absl::MutexLock lock(&mu_);
  next_ = last_step + 1;
  epoch_ = epoch;
  problem_.clear();
}

}  // namespace weft::client
