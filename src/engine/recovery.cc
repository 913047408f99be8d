#include "src/engine/recovery.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/engine/restore_adapter.h"
#include "src/log/set_aside.h"

namespace weft::engine {

void Recovery::Start(Opened opened, Replayed replayed) {
  opened_ = std::move(opened);
  replayed_ = std::move(replayed);
  context_.dispatcher.Post([this](const absl::Status& open) {
    const absl::Status status = opened_(open.ok() ? Read() : open);
    if (status.ok()) {
      Replay();
    } else {
      Finish(status);
    }
  });
}

void Recovery::Replay() {
  replay_.Start({.reader = *std::exchange(reader_, std::nullopt),
                 .skipped = skipped_,
                 .restores = restores_},
                [this](const absl::Status& status) { Finish(status); });
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
  WEFT_ASSIGN_OR_RETURN(const std::optional<journal::SnapshotFile> file,
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
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  desk.Reserve(report_.log.next_key, report_.log.last_epoch);
  std::map<std::string, std::string> tenants;
  for (const auto& [id, adapter] : report_.log.changed) {
    tenants.emplace(id, adapter.tenant);
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
  for (const records::StoredAdapter& adapter : snapshot.adapters) {
    if (skipped_.contains(adapter.key) || restores_.Follow(adapter)) continue;
    WEFT_RETURN_IF_ERROR(RestoreFromImage(context_, adapter, &snapshots_));
    ++report_.adapters;
  }
  return absl::OkStatus();
}

void Recovery::Finish(absl::Status status) {
  if (status.ok()) status = replayed_();
  status_ = std::move(status);
  ended_.Notify();
}

}  // namespace weft::engine
