#include "src/engine/moves/departure.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/state_image.h"

namespace weft::engine {
namespace {

// Samples that run get so long. Steps run to their end, but an adapter with
// work that does not end stays.
constexpr absl::Duration kSampleTime = absl::Seconds(10);
constexpr absl::Duration kWorkTime = absl::Minutes(10);
constexpr absl::Duration kQuietPoll = absl::Milliseconds(5);
// A client sends the steps that an accepted step waits for within so long, or
// is gone.
constexpr absl::Duration kGapTime = absl::Seconds(30);
// The receiver gets so long, and more for a large image. It is asked so often.
constexpr absl::Duration kReceiverPatience = absl::Seconds(30);
constexpr double kCopiedBytesPerSecond = 10e6;
constexpr absl::Duration kJudgeInterval = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> Departure::Check(
    const std::string& unit, int to) const {
  const int logs = parts_.directory().num_logs();
  if (to < 0 || to >= logs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "log: ", to, " is not one of 0 to ", logs - 1, " (--logs=", logs, ")"));
  }
  const EngineContext& context = parts_.context();
  WEFT_RETURN_IF_ERROR(context.dispatcher.CheckOpen());
  WEFT_RETURN_IF_ERROR(context.dispatcher.adapters().CheckReady(unit));
  if (unit.empty()) {
    return absl::InvalidArgumentError("adapter_id: the base model is on all");
  }
  std::map<std::string, std::string> tenants;
  for (const auto& [key, info] :
       context.dispatcher.recovery().AdaptersOf(unit)) {
    if (!context.recorder.Has(key)) {
      return absl::FailedPreconditionError(
          absl::StrCat("adapter_id: '", info.adapter_id,
                       "' has durability memory, so it cannot move: save it, "
                       "and load it elsewhere"));
    }
    tenants.emplace(info.adapter_id, info.tenant);
  }
  if (tenants.empty() && !context.recorder.HasNotes(unit)) {
    return dispatch::NoSuchAdapter(unit);
  }
  return tenants;
}

void Departure::Start(const std::string& unit, int to, Callback<bool> done) {
  const absl::Status status = Check(unit, to).status();
  if (!status.ok()) return done(status);
  // Also for a call that is repeated, and has followed the unit.
  if (to == parts_.directory().own()) return done(true);
  waiting_.push_back({.unit = unit,
                      .leaving = {.unit = unit, .to = to},
                      .waiters = {std::move(done)}});
}

bool Departure::Join(const std::string& unit, int to,
                     const Callback<bool>& done) {
  const auto is_same = [&](const Move& move) {
    return move.unit == unit && move.leaving.to == to;
  };
  if (move_ && is_same(*move_)) {
    move_->waiters.push_back(done);
    return true;
  }
  const auto same = std::ranges::find_if(waiting_, is_same);
  if (same == waiting_.end()) return false;
  same->waiters.push_back(done);
  return true;
}

void Departure::Resume(const log::MoveRecord& record) {
  parts_.Open();
  waiting_.push_front({.unit = record.unit,
                       .leaving = record,
                       .held = true,
                       .reason = absl::AbortedError("the server has restarted"),
                       .resumed = true});
}

void Departure::GoOn() {
  if (move_ || waiting_.empty()) return;
  move_ = std::move(waiting_.front());
  waiting_.pop_front();
  if (!move_->resumed) return Begin();
  SetKeys();
  Judge();
}

void Departure::Close(const absl::Status& status) {
  if (move_) waiting_.push_back(*std::exchange(move_, std::nullopt));
  for (const Move& move : std::exchange(waiting_, {})) {
    for (const Callback<bool>& done : move.waiters) {
      done(status);
    }
  }
}

void Departure::Begin() {
  parts_.Open();
  Hold(SteadyNow());
}

void Departure::Hold(absl::Time begin) {
  const auto tenants = Check(move_->unit, move_->leaving.to);
  // It may be gone by now, perhaps to another log. A repeated call learns that.
  if (absl::IsNotFound(tenants.status())) {
    return End(absl::UnavailableError(tenants.status().message()));
  }
  if (!tenants.ok()) return End(tenants.status());
  const absl::Status held = parts_.Hold(move_->unit, *tenants);
  if (absl::IsUnavailable(held) && SteadyNow() - begin < kGapTime) {
    return parts_.After(kQuietPoll, [this, begin] { Hold(begin); });
  }
  if (!held.ok()) return End(held);
  move_->held = true;
  SetKeys();
  WaitForQuiet(SteadyNow());
}

void Departure::SetKeys() {
  for (const auto& [key, info] :
       parts_.context().dispatcher.recovery().AdaptersOf(move_->unit)) {
    move_->keys.push_back(key);
  }
}

void Departure::WaitForQuiet(absl::Time begin) {
  dispatch::RecoveryDesk& desk = parts_.context().dispatcher.recovery();
  // An adapter with a claim may be made later.
  if (desk.IsQuiet(move_->unit) && !parts_.directory().HasClaim(move_->unit)) {
    return ReadEntry();
  }
  const absl::Duration waited = SteadyNow() - begin;
  if (waited >= kWorkTime) {
    return End(absl::UnavailableError(absl::StrCat(
        "the accepted work of '", move_->unit, "' has not ended in ",
        absl::FormatDuration(kWorkTime), ", so it stays: try again")));
  }
  if (waited >= kSampleTime) {
    parts_.samples().End(
        desk.DropSamples(move_->unit),
        parts_.context().dispatcher.adapters().CheckReady(move_->unit));
  }
  parts_.After(kQuietPoll, [this, begin] { WaitForQuiet(begin); });
}

void Departure::ReadEntry() {
  parts_.OnIo(
      move_->unit,
      [this, unit = move_->unit,
       to = move_->leaving.to]() -> absl::StatusOr<std::string> {
        directory::Directory& directory = parts_.directory();
        WEFT_RETURN_IF_ERROR(directory.CheckOwned(to));
        absl::StatusOr<directory::Directory::Entry> found =
            directory.Read(unit);
        if (absl::IsNotFound(found.status())) {
          // A session has none before it has a model.
          WEFT_RETURN_IF_ERROR(directory.Claim(unit));
          directory.EndClaim(unit);
          found = directory.Read(unit);
        }
        WEFT_ASSIGN_OR_RETURN(const directory::Directory::Entry entry,
                              std::move(found));
        if (entry.log == directory.own()) return entry.version();
        return absl::FailedPreconditionError(
            absl::StrCat("adapter_id: the directory says that '", unit,
                         "' is in another log"));
      },
      [this](const absl::StatusOr<std::string>& entry) {
        entry.ok() ? Record(*entry) : End(entry.status());
      });
}

void Departure::Record(const std::string& entry) {
  const EngineContext& context = parts_.context();
  move_->leaving.entry = entry;
  move_->patience = kReceiverPatience;
  for (const AdapterKey key : move_->keys) {
    move_->patience +=
        absl::Seconds(static_cast<double>(context.adapters.ImageBytes(key)) /
                      kCopiedBytesPerSecond);
  }
  move_->deadline = SteadyNow() + move_->patience;
  move_->sent = {.unit = move_->unit,
                 .notes = context.recorder.NotesOf(move_->unit),
                 .from = parts_.directory().own(),
                 .entry = entry};
  context.recorder.Write(move_->leaving);
  WriteImages();
}

void Departure::WriteImages() {
  const size_t next = move_->sent.adapters.size();
  if (next == move_->keys.size()) {
    move_->deadline = SteadyNow() + move_->patience;
    return parts_.WhenDurable([this] { Send(); });
  }
  parts_.snapshots().DescribeNow(
      move_->keys[next],
      [this](const absl::StatusOr<Snapshotter::Described>& made) {
        if (made.ok()) {
          if (made->is_new) {
            move_->new_images.push_back(made->adapter.image->file);
          }
          move_->sent.adapters.push_back(made->adapter);
          return WriteImages();
        }
        if (IsStoreAway(parts_.context(), made.status()) && !IsOver()) {
          return parts_.Again(move_->unit, made.status(),
                              [this] { WriteImages(); });
        }
        move_->reason = made.status();
        parts_.WhenDurable([this] { Judge(); });
      });
}

void Departure::Send() {
  parts_.OnIo(
      "",
      [this, to = move_->leaving.to,
       arrival =
           directory::Arrival{.from = parts_.directory().own(),
                              .unit = move_->unit,
                              .entry = move_->leaving.entry,
                              .record = Encode(log::Record(move_->sent))}] {
        if (Failpoint("moves.send")) return ErrnoStatus(errno, "sending");
        return parts_.directory().arrivals().Send(to, arrival);
      },
      [this](const absl::Status& sent) {
        if (absl::IsResourceExhausted(sent)) move_->reason = sent;
        if (sent.ok() || IsOver()) return Judge();
        parts_.After(kJudgeInterval, [this] { Send(); });
      });
}

absl::StatusOr<Departure::Verdict> Departure::Decide(
    const log::MoveRecord& leaving, bool is_over) const {
  directory::Directory& directory = parts_.directory();
  if (Failpoint("moves.judge")) return ErrnoStatus(errno, "judging");
  const absl::StatusOr<directory::Directory::Entry> entry =
      directory.Read(leaving.unit);
  // Deleted by the receiver, or by a log to which that has sent it.
  if (absl::IsNotFound(entry.status())) return Verdict{.what = Verdict::kLeft};
  WEFT_RETURN_IF_ERROR(entry.status());
  if (!entry->log) {
    return absl::DataLossError(
        absl::StrCat("the entry of '", leaving.unit, "' is damaged"));
  }
  // Another log has it, or had it until it was deleted and its name made anew.
  if (*entry->log != directory.own() || !entry->IsOf(leaving.entry)) {
    return Verdict{.what = Verdict::kLeft};
  }
  // Nobody but this log's owners has written it.
  if (entry->version() != leaving.entry) {
    return Verdict{.what = Verdict::kStayed};
  }
  if (is_over) {
    WEFT_ASSIGN_OR_RETURN(const bool taken,
                          directory.Take(leaving.unit, leaving.entry));
    return Verdict{.what = taken ? Verdict::kStayed : Verdict::kWaits};
  }
  const absl::StatusOr<directory::FoundArrival> message =
      directory.arrivals().Find(leaving.to);
  if (!message.ok() || message->arrival.from != directory.own() ||
      message->arrival.entry != leaving.entry) {
    return Verdict();
  }
  return Verdict{.refused = message->arrival.refused};
}

void Departure::Judge() {
  parts_.OnIo(
      move_->unit,
      [this, leaving = move_->leaving, is_over = IsOver()] {
        return Decide(leaving, is_over);
      },
      [this](const absl::StatusOr<Verdict>& verdict) {
        if (!verdict.ok()) {
          return parts_.Again(move_->unit, verdict.status(),
                              [this] { Judge(); });
        }
        if (verdict->what == Verdict::kLeft) return Leave();
        if (verdict->what == Verdict::kStayed) return Stay();
        if (verdict->refused.empty()) {
          return parts_.After(kJudgeInterval, [this] { Judge(); });
        }
        move_->reason = absl::FailedPreconditionError(
            absl::StrCat("log ", move_->leaving.to,
                         " refuses the adapter: ", verdict->refused));
        Judge();
      });
}

void Departure::Leave() {
  parts_.Count(MoveMetrics::kLeft);
  for (const AdapterKey key : move_->keys) parts_.manager().Remove(key);
  parts_.context().recorder.Left(move_->unit, move_->keys);
  Log(LogLevel::kInfo, "an adapter has left",
      {{"adapter", move_->unit},
       {"models", move_->keys.size()},
       {"log", move_->leaving.to}});
  // So that calls find it there at once.
  parts_.OnIo(
      "", [this, unit = move_->unit] { return parts_.directory().Find(unit); },
      [](const absl::Status& /*moved*/) {});
  End(true);
}

void Departure::Stay() {
  parts_.Count(MoveMetrics::kStayed);
  if (move_->reason.ok()) {
    move_->reason = absl::AbortedError(absl::StrCat(
        "the server of log ", move_->leaving.to,
        " has not taken the adapter in ",
        absl::FormatDuration(absl::Ceil(move_->patience, absl::Seconds(1))),
        ", so it stays: try again"));
  }
  parts_.context().recorder.Write(
      log::MoveRecord{.unit = move_->unit, .stage = log::MoveStage::kStayed});
  Log(LogLevel::kWarning, "an adapter that was to leave stays",
      {{"adapter", move_->unit},
       {"log", move_->leaving.to},
       {"reason", move_->reason.message()}});
  End(move_->reason);
}

void Departure::End(const absl::StatusOr<bool>& result) {
  const Move move = *std::exchange(move_, std::nullopt);
  const EngineContext& context = parts_.context();
  if (move.held) parts_.Release(move.unit);
  for (const std::string& image : move.new_images) DropState(context, image);
  parts_.Close();
  for (const Callback<bool>& done : move.waiters) done(result);
  if (move.leaving.entry.empty()) return;
  parts_.OnIo(
      "",
      [this, leaving = move.leaving] {
        return parts_.directory().arrivals().Recall(leaving.to, leaving.entry);
      },
      [](const absl::Status& recalled) {
        if (recalled.ok()) return;
        Log(LogLevel::kWarning, "a message to another log stays",
            {{"reason", recalled.message()}});
      });
}

}  // namespace weft::engine
