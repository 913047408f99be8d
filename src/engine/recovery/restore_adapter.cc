#include "src/engine/recovery/restore_adapter.h"

#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/log/image.h"

namespace weft::engine {
namespace {

lora::AdapterImage ImageOf(const log::ImageRecord& record) {
  lora::AdapterImage image;
  image.optim_steps = record.optim_steps;
  image.optimizer = record.optimizer;
  image.accumulated_tokens = record.accumulated_tokens;
  for (const uint64_t number : record.versions) {
    image.versions.push_back({.number = number});
  }
  return image;
}

}  // namespace

absl::Status RestoreFromImage(const EngineContext& context,
                              const log::StoredAdapter& adapter,
                              Snapshotter* snapshots) {
  const log::ImageRecord& image = *adapter.image;
  WEFT_RETURN_IF_ERROR(log::CheckImageTable(
      *context.state, image.file, log::kStateBlocks + image.versions.size()));
  context.adapters.AddOnDisk(adapter.key, adapter.config, ImageOf(image),
                             image.snapshots, image.file, adapter.created_at);
  dispatch::AdapterHistory history;
  history.info.adapter_id = adapter.adapter_id;
  history.info.tenant = adapter.tenant;
  history.info.durability = Durability::kStep;
  history.info.epoch = adapter.epoch;
  history.info.last_step = adapter.last_step;
  history.info.next_step = adapter.next_step;
  history.info.durable_step = adapter.next_step - 1;
  history.info.last_used_at = adapter.created_at;
  history.replies = adapter.replies;
  context.dispatcher.recovery().AddOnDisk(adapter.key, history,
                                          context.adapters.Facts(adapter.key));
  snapshots->Restored(adapter.key, image);
  return absl::OkStatus();
}

}  // namespace weft::engine
