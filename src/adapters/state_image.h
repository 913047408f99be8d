// The state that a load or an import gives to an adapter, as a file of the
// state folder: so that its log does not depend on the checkpoint.
// Threads: the I/O thread; DropState: any.
#ifndef WEFT_SRC_ADAPTERS_STATE_IMAGE_H_
#define WEFT_SRC_ADAPTERS_STATE_IMAGE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/adapters/engine_context.h"
#include "src/lora/adapter.h"

namespace weft::engine {

// Writes the state as an image of one version (lora::AdapterImage) and returns
// the file's name, which the log has to name or DropState to get; an empty one
// while nothing is recorded. RESOURCE_EXHAUSTED when the disk is full.
[[nodiscard]] absl::StatusOr<std::string> KeepState(
    const EngineContext& context, const lora::AdapterState& state);

// Removes a file that no record will name; an empty name is none.
void DropState(const EngineContext& context, const std::string& image);

// The state of an adapter of so many parameters. NOT_FOUND, DATA_LOSS.
[[nodiscard]] absl::StatusOr<lora::AdapterState> ReadState(
    const journal::StateFolder& folder, const std::string& image,
    int64_t num_parameters);

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_STATE_IMAGE_H_
