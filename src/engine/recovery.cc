#include "src/engine/recovery.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/engine/restore_adapter.h"

namespace weft::engine {
namespace {

// Says in the error of a damaged folder what the operator can do.
absl::Status WayOut(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  return absl::DataLossError(absl::StrCat(
      "the state folder is damaged: ", status.message(),
      ". `weftctl state restore BACKUP DIR` makes a folder from a backup; then "
      "start with --state-dir DIR"));
}

}  // namespace

void Recovery::Start(Opened opened, Replayed replayed) {
  opened_ = std::move(opened);
  replayed_ = std::move(replayed);
  context_.dispatcher.Post([this](const absl::Status& open) {
    const absl::Status status = opened_(open.ok() ? WayOut(Read()) : open);
    if (status.ok()) {
      Replay();
    } else {
      Finish(status);
    }
  });
}

void Recovery::Replay() {
  replay_.Start(*std::exchange(reader_, std::nullopt),
                [this](const absl::Status& status) { Finish(WayOut(status)); });
}

absl::Status Recovery::failure() const {
  return ended_.HasBeenNotified() ? status_ : absl::OkStatus();
}

absl::Status Recovery::Read() {
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

absl::Status Recovery::RestoreSnapshot(const records::Snapshot& snapshot) {
  for (const records::AdapterRecord& adapter : snapshot.adapters) {
    WEFT_RETURN_IF_ERROR(RestoreFromImage(context_, adapter, &snapshots_));
    ++report_.adapters;
  }
  return absl::OkStatus();
}

void Recovery::Finish(absl::Status status) {
  if (status.ok()) replayed_();
  status_ = std::move(status);
  ended_.Notify();
}

}  // namespace weft::engine
