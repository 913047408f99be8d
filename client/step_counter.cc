#include "client/step_counter.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

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
