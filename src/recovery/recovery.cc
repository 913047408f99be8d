#include "src/recovery/recovery.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
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

void Recovery::Start(std::function<void(absl::StatusOr<RecoveryReport>)> done) {
  done_ = std::move(done);
  context_.dispatcher.Post([this](const absl::Status& open) {
    absl::Status status = open;
    if (status.ok()) status = CheckFolder();
    if (status.ok()) status = ReadSnapshot();
    if (status.ok()) {
      Advance();
    } else {
      Finish(status);
    }
  });
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

absl::Status Recovery::ReadSnapshot() {
  WEFT_ASSIGN_OR_RETURN(const std::optional<journal::Snapshot> file,
                        context_.state->ReadSnapshot());
  uint64_t first = 1;
  if (file) {
    WEFT_ASSIGN_OR_RETURN(const records::Snapshot snapshot,
                          records::DecodeSnapshot(file->bytes));
    context_.dispatcher.recovery().Reserve(snapshot.next_key,
                                           snapshot.last_epoch);
    for (const records::AdapterRecord& adapter : snapshot.adapters) {
      if (skipped_.contains(adapter.key)) continue;
      if (!report_.restores.Follow(adapter)) {
        WEFT_RETURN_IF_ERROR(Restore(adapter));
      }
      Note(adapter.key, 0);
    }
    first = file->next_sequence;
  }
  WEFT_ASSIGN_OR_RETURN(journal::LogReader reader,
                        journal::LogReader::Open(*context_.state, first));
  reader_ = std::move(reader);
  progress_ = std::make_unique<Progress>(
      "running the log again", static_cast<int64_t>(reader_->total_bytes()),
      "B");
  return absl::OkStatus();
}

void Recovery::Note(AdapterKey key, uint64_t sequence) {
  const auto& unlogged = report_.restores.adapters();
  const auto found = unlogged.find(key);
  const std::string name =
      found == unlogged.end() ? NameOf(key) : found->second.adapter_id;
  if (name.empty()) return;
  report_.marks[key] = {.key = key, .last = sequence, .name = name};
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
  context_.dispatcher.Post([this](const absl::Status& open) {
    if (!open.ok()) {
      Finish(open);
      return;
    }
    const uint64_t before = reader_->read_bytes();
    const absl::StatusOr<std::optional<journal::LogReader::Record>> bytes =
        reader_->Next();
    absl::Status status = bytes.status();
    const bool hole = absl::IsDataLoss(status) && report_.damaged;
    if (hole) status = PassHole();
    progress_->Add(static_cast<int64_t>(reader_->read_bytes() - before));
    if (!status.ok()) {
      Finish(status);
    } else if (hole) {
      Advance();
    } else if (*bytes) {
      ApplyRecord(**bytes);
    } else {
      Finish(FinishLog());
    }
  });
}

absl::Status Recovery::PassHole() {
  WEFT_ASSIGN_OR_RETURN(const journal::LogReader::Hole hole,
                        reader_->SkipDamage());
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments,
                        context_.state->Segments());
  // A process begins with a segment, and its ids begin anew.
  const bool process_began =
      std::ranges::any_of(segments, [&hole](uint64_t segment) {
        return hole.first <= segment && segment < hole.next;
      });
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
  ++report_.records;
  const std::optional<AdapterKey> key = records::KeyOf(*record);
  if (key && skipped_.contains(*key)) {
    Advance();
    return;
  }
  if (report_.restores.Follow(*record)) {
    report_.marks.erase(*key);
    Note(*key, bytes.sequence);
    Advance();
    return;
  }
  const Next next = [this, key,
                     sequence = bytes.sequence](const absl::Status& status) {
    if (status.ok()) {
      if (key) Note(*key, sequence);
      Advance();
    } else {
      Finish(absl::Status(status.code(),
                          absl::StrCat("record ", sequence,
                                       " of the log: ", status.message())));
    }
  };
  std::visit([this, &next](auto& kind) { Apply(kind, next); }, *record);
}

absl::Status Recovery::FinishLog() {
  report_.log_bytes = reader_->read_bytes();
  while (!begun_.empty()) {
    report_.given_up.push_back(begun_.begin()->first);
    GiveUp(begun_.begin());
  }
  report_.torn_bytes = reader_->torn_bytes();
  WEFT_RETURN_IF_ERROR(reader_->Repair());
  report_.next_sequence = reader_->next_sequence();
  return absl::OkStatus();
}

void Recovery::Finish(const absl::Status& status) {
  progress_.reset();
  reader_.reset();
  if (status.ok()) {
    done_(std::move(report_));
  } else {
    done_(status);
  }
}

std::string Recovery::NameOf(AdapterKey key) const {
  return context_.dispatcher.adapters().NameOf(key);
}

absl::Status Recovery::CheckSlots(const std::vector<AdapterKey>& keys) const {
  std::set<AdapterKey> together(keys.begin(), keys.end());
  for (const auto& [work, begun] : begun_) {
    if (begun.between_slices) together.insert(begun.step.adapter);
  }
  const auto limit =
      static_cast<size_t>(context_.options.max_resident_adapters);
  if (together.size() <= limit) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a batch of the log has ", together.size(),
      " adapters on the device together, and now there is room for ", limit,
      " (--max-resident-adapters)"));
}

void Recovery::WithAdapters(const std::vector<AdapterKey>& keys,
                            const std::function<absl::Status()>& body,
                            const Next& next) {
  const absl::Status fits = CheckSlots(keys);
  if (!fits.ok()) {
    next(fits);
    return;
  }
  BringIn(keys, 0, [this, keys, body, next](const absl::Status& room) {
    const absl::Status status = room.ok() ? body() : room;
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
