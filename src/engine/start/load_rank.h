// Prepares a rank for computing: picks its device, meets the other ranks and
// loads its part of the model. Rank 0 also divides the memory of CUDA devices.
#ifndef WEFT_SRC_ENGINE_START_LOAD_RANK_H_
#define WEFT_SRC_ENGINE_START_LOAD_RANK_H_

#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/options/options.h"
#include "src/base/options/world.h"
#include "src/engine/device/compute_device.h"
#include "src/engine/start/memory_split.h"
#include "src/model/decoder.h"
#include "src/parallel/communicator.h"

namespace weft::engine {

// A rank with its part of the model.
struct LoadedRank {
  EngineOptions options;  // On rank 0, automatic sizes are replaced by numbers.
  parallel::Links links;
  std::unique_ptr<ComputeDevice> device;
  std::unique_ptr<model::Decoder> decoder;
  std::optional<MemorySplit> memory;  // Set on CUDA, on rank 0 only.
};

// Returns OK if this machine has the device for a rank, and the device computes
// with the formats of the options. Errors: FAILED_PRECONDITION, and those of
// CheckCudaFormat.
absl::Status CheckDevice(const EngineOptions& options, int local_rank);

// Returns when every rank has loaded its part of the model. If a rank cannot
// load, the ranks that it has met return its error, too. Calls `met`, if set,
// when all ranks have met. Errors: those of StartEngine, and of RunGuarded
// (compute_guard.h).
absl::StatusOr<LoadedRank> LoadRank(const EngineOptions& options,
                                    const World& world,
                                    const std::function<void()>& met = {});

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_START_LOAD_RANK_H_
