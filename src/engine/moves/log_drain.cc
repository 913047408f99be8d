#include "src/engine/moves/log_drain.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/request/move_unit.h"

namespace weft::engine {
namespace {

// After an error that time may mend.
constexpr absl::Duration kPause = absl::Seconds(1);
// A unit that does not leave in so many tries ends the drain.
constexpr int kMostTries = 10;

}  // namespace

void LogDrain::Start(Callback<bool> done) {
  waiters_.push_back(std::move(done));
  if (phase_ != Phase::kOff) return;
  phase_ = Phase::kMoves;
  parts_.manager().SendNewElsewhere(true);
  Log(LogLevel::kInfo, "the adapters of this log go to others",
      {{"log", parts_.directory().own()}});
}

std::optional<std::string> LogDrain::Next() const {
  const absl::StatusOr<AdapterPage> page =
      parts_.context().dispatcher.adapters().List({.size = 1});
  if (page.ok() && !page->adapters.empty()) {
    return UnitOf(page->adapters.front().adapter_id);
  }
  std::string unit = parts_.context().recorder.UnitWithNotes();
  if (unit.empty()) return std::nullopt;
  return unit;
}

void LogDrain::GoOn() {
  if (phase_ == Phase::kEmpty) return End(true);
  if (phase_ == Phase::kOff || moving_) return;
  if (const std::optional<std::string> unit = Next()) return Move(*unit);
  // One may just arrive.
  if (parts_.open() > 0) return;
  phase_ = Phase::kEmpty;
  Log(LogLevel::kInfo, "this log has no adapters any more",
      {{"log", parts_.directory().own()}});
  End(true);
}

void LogDrain::Move(const std::string& unit) {
  moving_ = true;
  parts_.OnIo(
      "", [this] { return parts_.directory().OtherLogs(); },
      [this, unit](const absl::StatusOr<std::vector<int>>& logs) {
        if (logs.ok() && !logs->empty()) return Send(unit, *logs);
        parts_.After(kPause, [this] { moving_ = false; });
      });
}

void LogDrain::Send(const std::string& unit, const std::vector<int>& logs) {
  departure_.Start(
      unit, logs[num_sent_++ % logs.size()],
      [this, unit](const absl::StatusOr<bool>& moved) {
        if (moved.ok() || absl::IsNotFound(moved.status())) {
          moving_ = false;
          num_failed_ = 0;
          return;
        }
        const bool never = absl::IsFailedPrecondition(moved.status()) ||
                           absl::IsResourceExhausted(moved.status());
        if (!never && ++num_failed_ < kMostTries) {
          return parts_.After(kPause, [this] { moving_ = false; });
        }
        moving_ = false;
        End(absl::FailedPreconditionError(absl::StrCat(
            "'", unit, "' cannot leave this log: ", moved.status().message())));
      });
}

void LogDrain::End(const absl::StatusOr<bool>& result) {
  if (!result.ok() && phase_ == Phase::kMoves) {
    phase_ = Phase::kOff;
    num_failed_ = 0;
    parts_.manager().SendNewElsewhere(false);
  }
  for (const Callback<bool>& done : std::exchange(waiters_, {})) done(result);
}

}  // namespace weft::engine
