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

absl::Status CheckImages(const EngineContext& context,
                         const std::vector<log::StoredAdapter>& adapters) {
  std::vector<log::ImageShape> images;
  images.reserve(adapters.size());
  for (const log::StoredAdapter& adapter : adapters) {
    images.push_back(
        {.name = adapter.image->file,
         .num_blocks = log::kStateBlocks + adapter.image->versions.size()});
  }
  return log::CheckImageTables(*context.state, images);
}

absl::Status RestoreFromImage(const EngineContext& context,
                              const log::StoredAdapter& adapter,
                              Snapshotter* snapshots) {
  WEFT_RETURN_IF_ERROR(CheckImages(context, {adapter}));
  AddFromImage(context, adapter, snapshots);
  return absl::OkStatus();
}

void AddFromImage(const EngineContext& context,
                  const log::StoredAdapter& adapter, Snapshotter* snapshots) {
  const log::ImageRecord& image = *adapter.image;
  context.adapters.AddOnDisk(
      adapter.key, adapter.config, ImageOf(image), image.snapshots,
      {.name = image.file, .durable = true}, adapter.created_at);
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
}

}  // namespace weft::engine
