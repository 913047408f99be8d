// Converts runs and checkpoints to JSON.
// Threads: any, except RunJson, which reads the front's tables.
#ifndef WEFT_SERVER_TINKER_RUN_JSON_H_
#define WEFT_SERVER_TINKER_RUN_JSON_H_

#include <map>
#include <string>
#include <vector>

#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::tinker {

// Returns the SDK's description of a checkpoint.
[[nodiscard]] Json CheckpointJson(const CheckpointInfo& info,
                                  const CheckpointPath& path,
                                  const CheckpointExtras& extras);

// A training run.
struct Run {
  std::string adapter;
  LoraConfig config;
  absl::Time last_used_at;
  std::vector<CheckpointInfo> checkpoints;  // Newest first.
};

// Makes the runs of adapters and checkpoints; the one used last comes first. It
// leaves out the adapters that are only sampled from.
[[nodiscard]] std::vector<Run> MakeRuns(
    const std::vector<AdapterInfo>& adapters,
    const std::vector<CheckpointInfo>& checkpoints);
// Returns the SDK's description of a run.
[[nodiscard]] Json RunJson(const Front& front, const Caller& caller,
                           const Run& run);

// Returns the part [offset, offset + limit) of a list, as the call's query
// asks, and its cursor: {NAME: [...], "cursor": {...}}. Errors:
// INVALID_ARGUMENT for a bad query.
[[nodiscard]] absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                                            const Json& all);

// Returns {"base_model", "is_lora", "lora_rank", "train_...",
// "optimizer_config"}.
[[nodiscard]] Json WeightsJson(const std::string& base_model,
                               const LoraConfig& config);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RUN_JSON_H_
