// Restores an adapter from its record in a snapshot or in the log. The
// adapter's tensors stay in the image file until work needs them.
#ifndef WEFT_SRC_ENGINE_RECOVERY_RESTORE_ADAPTER_H_
#define WEFT_SRC_ENGINE_RECOVERY_RESTORE_ADAPTER_H_

#include <vector>

#include "absl/status/status.h"
#include "src/engine/engine_context.h"
#include "src/engine/recovery/snapshotter.h"
#include "src/log/record.h"

namespace weft::engine {

// Adds the adapter to context.adapters and context.dispatcher as an adapter on
// disk. Errors: DATA_LOSS (the image is missing or damaged), RESOURCE_EXHAUSTED
// (from the file system).
// Threads: engine thread.   REQUIRES: the record has an image.
absl::Status RestoreFromImage(const EngineContext& context,
                              const log::StoredAdapter& adapter,
                              Snapshotter* snapshots);

// The two halves of RestoreFromImage, for a snapshot with many adapters.
absl::Status CheckImages(const EngineContext& context,
                         const std::vector<log::StoredAdapter>& adapters);
void AddFromImage(const EngineContext& context,
                  const log::StoredAdapter& adapter, Snapshotter* snapshots);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_RESTORE_ADAPTER_H_
