#include "src/recovery/recovery.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/files/file_io.h"
#include "src/journal/image_file.h"
#include "src/journal/set_aside.h"

namespace weft::engine {
namespace {

dispatch::StoredReply Stored(const records::ReplyRecord& reply) {
  return {.step = reply.step,
          .digest = reply.digest,
          .result = std::make_shared<const StepResult>(reply.result)};
}

lora::AdapterImage ImageOf(const records::ImageRecord& record) {
  lora::AdapterImage image;
  image.optim_steps = record.optim_steps;
  for (const uint64_t number : record.versions) {
    image.versions.push_back({.number = number});
  }
  return image;
}

}  // namespace

void Recovery::Start(Opened opened, Replayed replayed) {
  opened_ = std::move(opened);
  replayed_ = std::move(replayed);
  context_.dispatcher.Post([this](const absl::Status& open) {
    const absl::Status status = opened_(open.ok() ? Read() : open);
    if (status.ok()) {
      Advance();
    } else {
      Finish(status);
    }
  });
}

absl::Status Recovery::Wait() const {
  ended_.WaitForNotification();
  return status_;
}

absl::Status Recovery::failure() const {
  return ended() ? status_ : absl::OkStatus();
}

absl::Status Recovery::Read() {
  WEFT_RETURN_IF_ERROR(CheckFolder());
  WEFT_ASSIGN_OR_RETURN(const std::optional<journal::Snapshot> file,
                        context_.state->ReadSnapshot());
  records::Snapshot snapshot;
  if (file) {
    WEFT_ASSIGN_OR_RETURN(snapshot, records::DecodeSnapshot(file->bytes));
  }
  const uint64_t first = file ? file->next_sequence : 1;
  WEFT_RETURN_IF_ERROR(RestoreSnapshot(snapshot));
  WEFT_ASSIGN_OR_RETURN(report_.log,
                        ReadLog(*context_.state, snapshot,
                                {.first_sequence = first,
                                 .skipped = skipped_,
                                 .damaged = report_.damaged,
                                 .max_resident = static_cast<size_t>(
                                     context_.options.max_resident_adapters)}));
  WEFT_ASSIGN_OR_RETURN(journal::LogReader reader,
                        journal::LogReader::Open(*context_.state, first));
  reader_ = std::move(reader);
  progress_ = std::make_unique<Progress>(
      "running the log again", static_cast<int64_t>(reader_->total_bytes()),
      "B");
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  desk.Reserve(report_.log.next_key, report_.log.last_epoch);
  std::map<std::string, std::string> tenants;
  for (const auto& [id, adapter] : report_.log.changed) {
    tenants.emplace(id, adapter.tenant);
    last_records_.emplace(adapter.last, id);
  }
  desk.SetRecovering(std::move(tenants));
  return absl::OkStatus();
}

absl::Status Recovery::CheckFolder() {
  const std::vector<std::string>& names = context_.options.recover_adapters;
  const std::set<std::string> given_up(names.begin(), names.end());
  WEFT_ASSIGN_OR_RETURN(report_.damaged,
                        records::LogIsDamaged(*context_.state));
  if (!report_.damaged && given_up.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const records::Damage damage,
                        records::FindDamage(*context_.state, given_up));
  WEFT_RETURN_IF_ERROR(records::RefusalOf(damage, given_up));
  report_.damaged = report_.damaged || !damage.adapters.empty();
  if (!report_.damaged) {
    Log(LogLevel::kWarning,
        "--recover-adapter names adapters that are not damaged: they are kept");
    return absl::OkStatus();
  }
  return SetAside(damage);
}

absl::Status Recovery::SetAside(const records::Damage& damage) {
  const std::string name = absl::StrCat(absl::ToUnixMicros(absl::Now()));
  std::set<std::string> images;
  skipped_ = damage.gone;
  for (const auto& [key, adapter] : damage.adapters) {
    skipped_.insert(key);
    images.insert(adapter.images.begin(), adapter.images.end());
    Log(LogLevel::kWarning, "an adapter is set aside",
        {{"adapter", adapter.name}, {"reason", adapter.how}, {"to", name}});
  }
  for (const std::string& place : damage.places) {
    Log(LogLevel::kWarning, "the log is damaged", {{"place", place}});
  }
  context_.dispatcher.recovery().Reserve(damage.next_key, 0);
  return journal::SetAside(*context_.state, name, images);
}

absl::Status Recovery::RestoreSnapshot(const records::Snapshot& snapshot) {
  for (const records::AdapterRecord& adapter : snapshot.adapters) {
    if (skipped_.contains(adapter.key) || restores_.Follow(adapter)) continue;
    WEFT_RETURN_IF_ERROR(Restore(adapter));
  }
  return absl::OkStatus();
}

absl::Status Recovery::Restore(const records::AdapterRecord& adapter) {
  const records::ImageRecord& image = *adapter.image;
  const absl::Status whole =
      journal::CheckImageTable(*context_.state, image.file,
                               records::kStateBlocks + image.versions.size());
  if (!whole.ok()) return records::ImageRefusal(adapter.adapter_id, whole);
  context_.adapters.AddOnDisk(adapter.key, adapter.config, ImageOf(image),
                              image.snapshots, image.file, adapter.created_at);
  dispatch::AdapterHistory history;
  history.info.adapter_id = adapter.adapter_id;
  history.info.tenant = adapter.tenant;
  history.info.durability = Durability::kStep;
  history.info.epoch = adapter.epoch;
  history.info.last_step = adapter.last_step;
  history.info.durable_step = adapter.last_step;
  history.info.last_used_at = adapter.created_at;
  for (const records::ReplyRecord& reply : adapter.replies) {
    history.replies.push_back(Stored(reply));
  }
  if (adapter.origin) {
    dispatch::StoredReply origin = Stored(*adapter.origin);
    history.origin = dispatch::LoadOrigin{.step = origin.step,
                                          .digest = std::move(origin.digest),
                                          .result = std::move(origin.result)};
  }
  context_.dispatcher.recovery().AddOnDisk(
      adapter.key, history, context_.adapters.Facts(adapter.key));
  snapshots_.Restored(adapter.key, image);
  ++report_.adapters;
  return absl::OkStatus();
}

void Recovery::Advance() {
  context_.dispatcher.recovery().Post([this](const absl::Status& open) {
    // New records follow those to replay.
    const bool at_end = reader_->next_sequence() >= report_.log.next_sequence;
    if (!open.ok() || at_end) {
      Finish(open);
      return;
    }
    if (Failpoint("recovery.replay")) {
      Finish(ErrnoStatus(errno, "replaying the log"));
      return;
    }
    const records::Recorder::Replaying replaying(&context_.recorder);
    const uint64_t before = reader_->read_bytes();
    const absl::StatusOr<std::optional<journal::LogReader::Record>> bytes =
        reader_->Next();
    absl::Status status = bytes.status();
    const bool hole = absl::IsDataLoss(status) && report_.damaged;
    if (hole) status = SkipHole();
    progress_->Add(static_cast<int64_t>(reader_->read_bytes() - before));
    if (!status.ok()) {
      Finish(status);
    } else if (hole) {
      Advance();
    } else if (*bytes) {
      ApplyRecord(**bytes);
    } else {
      Finish(absl::OkStatus());
    }
  });
}

absl::Status Recovery::SkipHole() {
  WEFT_ASSIGN_OR_RETURN(const bool process_began,
                        PassHole(*context_.state, &*reader_));
  while (process_began && !begun_.empty()) GiveUp(begun_.begin());
  return absl::OkStatus();
}

void Recovery::ApplyRecord(const journal::LogReader::Record& bytes) {
  absl::StatusOr<records::Record> record = records::DecodeRecord(bytes.bytes);
  if (!record.ok()) {
    Finish(absl::DataLossError(
        absl::StrCat("record ", bytes.sequence,
                     " of the log: ", record.status().message())));
    return;
  }
  const std::optional<AdapterKey> key = records::KeyOf(*record);
  if ((key && skipped_.contains(*key)) || restores_.Follow(*record)) {
    Advance();
    return;
  }
  const Next next = [this,
                     sequence = bytes.sequence](const absl::Status& status) {
    if (status.ok()) {
      EndRecord(sequence);
      Advance();
    } else {
      Finish(absl::Status(status.code(),
                          absl::StrCat("record ", sequence,
                                       " of the log: ", status.message())));
    }
  };
  std::visit([this, &next](auto& kind) { Apply(kind, next); }, *record);
}

void Recovery::EndRecord(uint64_t sequence) {
  for (auto [next, end] = last_records_.equal_range(sequence); next != end;) {
    // Requests without a later record did not complete.
    for (auto begun = begun_.begin(); begun != begun_.end();) {
      const auto request = begun++;
      if (NameOf(request->second.step.adapter) == next->second) GiveUp(request);
    }
    context_.dispatcher.recovery().SetReady(next->second);
    next = last_records_.erase(next);
  }
}

void Recovery::Finish(absl::Status status) {
  progress_.reset();
  reader_.reset();
  if (status.ok()) status = replayed_();
  status_ = std::move(status);
  ended_.Notify();
}

std::string Recovery::NameOf(AdapterKey key) const {
  return context_.dispatcher.adapters().NameOf(key);
}

void Recovery::WithAdapters(const std::vector<AdapterKey>& keys,
                            const std::function<absl::Status()>& body,
                            const Next& next) {
  BringIn(keys, 0, [this, keys, body, next](const absl::Status& room) {
    const records::Recorder::Replaying replaying(&context_.recorder);
    const absl::Time start = absl::Now();
    const absl::Status status = room.ok() ? body() : room;
    report_.device_time += absl::Now() - start;
    for (const AdapterKey key : keys) Unpin(key);
    next(status);
  });
}

void Recovery::BringIn(const std::vector<AdapterKey>& keys, size_t first,
                       const Next& ready) {
  if (first == keys.size()) {
    ready(absl::OkStatus());
    return;
  }
  context_.dispatcher.recovery().Pin(keys[first], true);
  context_.dispatcher.adapters().WhenOnDevice(
      keys[first], [this, keys, first, ready](const absl::Status& room) {
        if (room.ok()) {
          BringIn(keys, first + 1, ready);
        } else {
          ready(room);
        }
      });
}

}  // namespace weft::engine
