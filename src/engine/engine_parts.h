// The parts of an engine that StartEngine loads.
#ifndef WEFT_SRC_ENGINE_ENGINE_PARTS_H_
#define WEFT_SRC_ENGINE_ENGINE_PARTS_H_

#include <memory>
#include <optional>
#include <string>

#include "src/base/disk_metrics.h"
#include "src/base/options.h"
#include "src/base/spill_folder.h"
#include "src/engine/compute_device.h"
#include "src/engine/memory_split.h"
#include "src/executor/executor.h"
#include "src/log/state_folder.h"
#include "src/lora/checkpoint_fields.h"
#include "src/model/decoder.h"
#include "src/request/engine_info.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

// What StartEngine loads and passes to the engine.
struct EngineParts {
  EngineOptions options;
  EngineInfo info;
  parallel::Links links;  // The communicators of rank 0.
  std::unique_ptr<ComputeDevice> device;
  std::unique_ptr<model::Decoder> decoder;
  // Null if the model's tokenizer files do not give the bytes of tokens.
  std::unique_ptr<sampling::TokenBytes> token_bytes;
  lora::BaseModel base;
  std::unique_ptr<DiskMetrics> disks;
  std::unique_ptr<SpillFolder> spill;
  std::optional<MemorySplit> memory;            // Set on CUDA only.
  std::unique_ptr<journal::StateFolder> state;  // Null without --state-dir.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_PARTS_H_
