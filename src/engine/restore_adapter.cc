#include "src/engine/restore_adapter.h"

#include <memory>
#include <utility>

#include "src/base/status_macros.h"
#include "src/log/image_file.h"

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

absl::Status RestoreFromImage(const EngineContext& context,
                              const records::AdapterRecord& adapter,
                              Snapshotter* snapshots) {
  const records::ImageRecord& image = *adapter.image;
  WEFT_RETURN_IF_ERROR(
      journal::CheckImageTable(*context.state, image.file,
                               records::kStateBlocks + image.versions.size()));
  context.adapters.AddOnDisk(adapter.key, adapter.config, ImageOf(image),
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
  context.dispatcher.recovery().AddOnDisk(adapter.key, history,
                                          context.adapters.Facts(adapter.key));
  snapshots->Restored(adapter.key, image);
  return absl::OkStatus();
}

}  // namespace weft::engine
