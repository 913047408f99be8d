#include "src/log/restore_points.h"

#include <optional>
#include <utility>

namespace weft::records {
namespace {

// Returns the load that restores the adapter after this record. Returns none if
// the record does not change this load.
std::optional<LoadCheckpointRequest> LoadAfter(const Record& record,
                                               const StoredAdapter& adapter) {
  if (const auto* loaded = std::get_if<LoadedRecord>(&record)) {
    return std::get<LoadCheckpointRequest>(loaded->request);
  }
  const auto* done = std::get_if<DoneRecord>(&record);
  const auto* saved =
      done == nullptr ? nullptr : std::get_if<CheckpointInfo>(&done->result);
  if (saved == nullptr || saved->kind != CheckpointKind::kTrain) {
    return std::nullopt;
  }
  return LoadCheckpointRequest{.adapter_id = adapter.adapter_id,
                               .source_adapter_id = adapter.adapter_id,
                               .name = saved->name};
}

}  // namespace

bool RestorePoints::Follow(const Record& record) {
  if (const auto* made = std::get_if<StoredAdapter>(&record)) {
    if (!made->from_checkpoint) return false;
    std::optional<LoadCheckpointRequest>& restore =
        adapters_.insert_or_assign(made->key, *made).first->second.restore;
    // LoadCheckpointRequest::durability is not in the log.
    if (restore) restore->durability = Durability::kCheckpoint;
    return true;
  }
  const std::optional<AdapterKey> key = KeyOf(record);
  const auto adapter = key ? adapters_.find(*key) : adapters_.end();
  if (adapter == adapters_.end()) return false;
  if (std::holds_alternative<RemovedRecord>(record)) {
    adapters_.erase(adapter);
    return true;
  }
  if (auto load = LoadAfter(record, adapter->second)) {
    load->tenant = adapter->second.tenant;
    load->durability = Durability::kCheckpoint;
    load->step = 0;
    adapter->second.restore = std::move(load);
  }
  return true;
}

}  // namespace weft::records
