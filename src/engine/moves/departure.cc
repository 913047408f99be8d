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
// The receiver gets so long, and more for a large image. It is asked so often.
constexpr absl::Duration kReceiverPatience = absl::Seconds(30);
constexpr double kCopiedBytesPerSecond = 10e6;
constexpr absl::Duration kJudgeInterval = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<AdapterKey> Departure::Check(const std::string& adapter_id,
                                            int to) const {
  const int logs = parts_.directory().num_logs();
  if (to < 0 || to >= logs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "log: ", to, " is not one of 0 to ", logs - 1, " (--logs=", logs, ")"));
  }
  const EngineContext& context = parts_.context();
  WEFT_RETURN_IF_ERROR(context.dispatcher.CheckOpen());
  WEFT_ASSIGN_OR_RETURN(const AdapterKey key,
                        parts_.manager().Find(adapter_id));
  if (key == AdapterKey::kBaseModel) {
    return absl::InvalidArgumentError("adapter_id: the base model is on all");
  }
  if (!context.recorder.Has(key)) {
    return absl::FailedPreconditionError(
        absl::StrCat("adapter_id: '", adapter_id,
                     "' has durability memory, so it cannot move: save it, "
                     "and load it elsewhere"));
  }
  return key;
}

void Departure::Start(const std::string& adapter_id, int to,
                      Callback<bool> done) {
  const absl::Status status = Check(adapter_id, to).status();
  if (!status.ok()) return done(status);
  // Also for a call that is repeated, and has followed the adapter.
  if (to == parts_.directory().own()) return done(true);
  waiting_.push_back({.adapter_id = adapter_id,
                      .leaving = {.stage = log::MoveStage::kLeaving, .to = to},
                      .waiters = {std::move(done)}});
}

bool Departure::Join(const std::string& adapter_id, int to,
                     const Callback<bool>& done) {
  const auto is_same = [&](const Move& move) {
    return move.adapter_id == adapter_id && move.leaving.to == to;
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
  waiting_.push_front(
      {.adapter_id = parts_.context().dispatcher.adapters().NameOf(record.key),
       .leaving = record,
       .reason = absl::AbortedError("the server has restarted"),
       .resumed = true});
}

void Departure::GoOn() {
  if (move_ || waiting_.empty()) return;
  move_ = std::move(waiting_.front());
  waiting_.pop_front();
  move_->resumed ? Judge() : Begin();
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
  const EngineContext& context = parts_.context();
  parts_.Open();
  const absl::StatusOr<AdapterKey> key =
      Check(move_->adapter_id, move_->leaving.to);
  // It may be gone by now, perhaps to another log. A repeated call learns that.
  if (absl::IsNotFound(key.status())) {
    return End(absl::UnavailableError(key.status().message()));
  }
  if (!key.ok()) return End(key.status());
  const absl::Status held = context.dispatcher.recovery().Hold(
      move_->adapter_id,
      context.dispatcher.adapters().Info(move_->adapter_id)->tenant);
  if (!held.ok()) return End(held);
  move_->leaving.key = *key;
  WaitForQuiet(SteadyNow());
}

void Departure::WaitForQuiet(absl::Time begin) {
  dispatch::RecoveryDesk& desk = parts_.context().dispatcher.recovery();
  if (desk.IsQuiet(move_->leaving.key)) return ReadEntry();
  const absl::Duration waited = SteadyNow() - begin;
  if (waited >= kWorkTime) {
    return End(absl::UnavailableError(absl::StrCat(
        "the accepted work of '", move_->adapter_id, "' has not ended in ",
        absl::FormatDuration(kWorkTime), ", so it stays: try again")));
  }
  if (waited >= kSampleTime) {
    const std::vector<uint64_t> running = desk.DropSamples(move_->leaving.key);
    parts_.samples().End(
        running,
        parts_.context().dispatcher.adapters().CheckReady(move_->adapter_id));
  }
  parts_.After(kQuietPoll, [this, begin] { WaitForQuiet(begin); });
}

void Departure::ReadEntry() {
  parts_.OnIo(
      move_->adapter_id,
      [this, id = move_->adapter_id,
       to = move_->leaving.to]() -> absl::StatusOr<std::string> {
        WEFT_RETURN_IF_ERROR(parts_.directory().CheckOwned(to));
        WEFT_ASSIGN_OR_RETURN(const directory::Directory::Entry entry,
                              parts_.directory().Read(id));
        if (entry.log == parts_.directory().own()) return entry.version();
        return absl::FailedPreconditionError(
            absl::StrCat("adapter_id: the directory says that '", id,
                         "' is in another log"));
      },
      [this](const absl::StatusOr<std::string>& entry) {
        entry.ok() ? Record(*entry) : End(entry.status());
      });
}

void Departure::Record(const std::string& entry) {
  move_->leaving.entry = entry;
  move_->patience = kReceiverPatience;
  move_->deadline = SteadyNow() + move_->patience;
  parts_.context().recorder.Write(move_->leaving);
  WriteImage();
}

void Departure::WriteImage() {
  parts_.snapshots().DescribeNow(
      move_->leaving.key,
      [this](const absl::StatusOr<Snapshotter::Described>& made) {
        if (made.ok()) {
          if (made->is_new) move_->new_image = made->adapter.image->file;
          move_->record = Encode(log::Record(made->adapter));
          move_->patience += absl::Seconds(
              static_cast<double>(
                  parts_.context().adapters.ImageBytes(move_->leaving.key)) /
              kCopiedBytesPerSecond);
          move_->deadline = SteadyNow() + move_->patience;
          return parts_.WhenDurable([this] { Send(); });
        }
        if (IsStoreAway(parts_.context(), made.status()) && !IsOver()) {
          return parts_.Again(move_->adapter_id, made.status(),
                              [this] { WriteImage(); });
        }
        move_->reason = made.status();
        parts_.WhenDurable([this] { Judge(); });
      });
}

void Departure::Send() {
  parts_.OnIo(
      "",
      [this, to = move_->leaving.to,
       arrival = directory::Arrival{.from = parts_.directory().own(),
                                    .adapter_id = move_->adapter_id,
                                    .entry = move_->leaving.entry,
                                    .record = move_->record}] {
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
    const std::string& adapter_id, const log::MoveRecord& leaving,
    bool is_over) const {
  directory::Directory& directory = parts_.directory();
  if (Failpoint("moves.judge")) return ErrnoStatus(errno, "judging");
  const absl::StatusOr<directory::Directory::Entry> entry =
      directory.Read(adapter_id);
  // Deleted by the receiver, or by a log to which that has sent it.
  if (absl::IsNotFound(entry.status())) return Verdict{.what = Verdict::kLeft};
  WEFT_RETURN_IF_ERROR(entry.status());
  if (!entry->log) {
    return absl::DataLossError(
        absl::StrCat("the entry of '", adapter_id, "' is damaged"));
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
                          directory.Take(adapter_id, leaving.entry));
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
      move_->adapter_id,
      [this, id = move_->adapter_id, leaving = move_->leaving,
       is_over = IsOver()] { return Decide(id, leaving, is_over); },
      [this](const absl::StatusOr<Verdict>& verdict) {
        if (!verdict.ok()) {
          return parts_.Again(move_->adapter_id, verdict.status(),
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
  parts_.manager().Remove(move_->leaving.key);
  parts_.context().recorder.Write(
      log::RemovedRecord{.key = move_->leaving.key});
  Log(LogLevel::kInfo, "an adapter has left",
      {{"adapter", move_->adapter_id}, {"log", move_->leaving.to}});
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
  parts_.context().recorder.Write(log::MoveRecord{
      .key = move_->leaving.key, .stage = log::MoveStage::kStayed});
  Log(LogLevel::kWarning, "an adapter that was to leave stays",
      {{"adapter", move_->adapter_id},
       {"log", move_->leaving.to},
       {"reason", move_->reason.message()}});
  End(move_->reason);
}

void Departure::End(const absl::StatusOr<bool>& result) {
  const Move move = *std::exchange(move_, std::nullopt);
  const EngineContext& context = parts_.context();
  if (move.leaving.key != AdapterKey::kBaseModel) {
    context.dispatcher.recovery().SetReady(move.adapter_id);
  }
  DropState(context, move.new_image);
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
