// Puts an adapter of a snapshot or of the log back. Its tensors stay in the
// image until something needs them.
#ifndef WEFT_SRC_RECOVERY_RESTORE_ADAPTER_H_
#define WEFT_SRC_RECOVERY_RESTORE_ADAPTER_H_

#include "absl/status/status.h"
#include "src/adapters/engine_context.h"
#include "src/records/record.h"
#include "src/recovery/snapshotter.h"

namespace weft::engine {

// Errors: DATA_LOSS (the image's table).   Threads: engine thread.
// REQUIRES: the record has an image.
[[nodiscard]] absl::Status RestoreFromImage(
    const EngineContext& context, const records::AdapterRecord& adapter,
    Snapshotter* snapshots);

}  // namespace weft::engine

#endif  // WEFT_SRC_RECOVERY_RESTORE_ADAPTER_H_
