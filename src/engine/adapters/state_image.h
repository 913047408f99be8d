// Reads and writes the tensors of adapters as files. KeepState copies the state
// of a loaded or imported adapter to a file in the state folder, so that the
// log does not depend on the checkpoint or the imported files.
// Threads: KeepState on the I/O thread, the others on any thread.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_STATE_IMAGE_H_
#define WEFT_SRC_ENGINE_ADAPTERS_STATE_IMAGE_H_

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/spill_folder.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/engine_context.h"
#include "src/lora/adapter.h"

namespace weft::engine {

// Writes the state as an image of one version (lora::AdapterImage) and returns
// the file's name. The caller must write the name to the log or pass it to
// DropState. If `durability` is not kStep, or before Recorder::Start, writes no
// file and returns an empty name. Errors: RESOURCE_EXHAUSTED (disk full) and
// others of log::WriteImage; UNAVAILABLE if the store does not answer.
absl::StatusOr<std::string> KeepState(const EngineContext& context,
                                      Durability durability,
                                      const lora::AdapterState& state);

// Returns whether an error of the state or of checkpoints says that the store
// of --state does not answer, so that the same may succeed later. Threads: any.
bool IsStoreAway(const EngineContext& context, const absl::Status& status);

// Removes a file that no record will name. Does nothing for an empty name.
void DropState(const EngineContext& context, const std::string& image);

// Allocates the image's tensors, each with `size` floats, and reads them from
// `file`, which is in the spill folder, a checkpoint or, if it is durable, in
// the state folder. Threads: for a checkpoint, the I/O thread. Errors: those of
// SpillFolder, log::ReadImage, AdapterIo::Load and RunGuarded; UNAVAILABLE if
// the checkpoint was overwritten.
absl::Status ReadTensors(const EngineContext& context, const SpillFolder& spill,
                         const ImageFile& file, int64_t size,
                         lora::AdapterImage& image);
// Returns the values of the image's tensors, as the blocks of a file.
std::vector<std::span<const float>> BlocksOf(lora::AdapterImage& image);

// Reads the state of an adapter with `num_parameters` parameters from the file
// `image`. The file does not store optim_steps and optimizer. Errors: those of
// log::ReadImage.
absl::StatusOr<lora::AdapterState> ReadState(const log::State& state_store,
                                             const std::string& image,
                                             int64_t num_parameters);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_STATE_IMAGE_H_
