// Converts training runs and checkpoints to JSON.
// Threads: any; only the front's for RunJson, because it reads Front.
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

// Returns a checkpoint in the form of the SDK's type Checkpoint.
[[nodiscard]] Json CheckpointJson(const CheckpointInfo& info,
                                  const CheckpointPath& path,
                                  const CheckpointExtras& extras);

// A training run: an adapter and its checkpoints. After the adapter is deleted,
// the checkpoints alone are the run.
struct Run {
  std::string adapter;
  LoraConfig config;
  absl::Time last_used_at;
  std::vector<CheckpointInfo> checkpoints;  // Newest first.
};

// Groups adapters and checkpoints into runs. The run that was used last comes
// first. Leaves out all tenants' adapters that were loaded for sampling
// (kSamplerAdapterPrefix).
[[nodiscard]] std::vector<Run> MakeRuns(
    const std::vector<AdapterInfo>& adapters,
    const std::vector<CheckpointInfo>& checkpoints);
// Returns a run in the form of the SDK's type TrainingRun.
[[nodiscard]] Json RunJson(const Front& front, const Caller& caller,
                           const Run& run);

// Returns the part [offset, offset + limit) of the list `all`, and a cursor:
// {name: [...], "cursor": {...}}. `offset` (default 0) and `limit` (default 20,
// at most 1000) come from the call's query. Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                                            const Json& all);

// Returns the reply of weights_info: {"base_model", "is_lora", "lora_rank",
// "train_unembed", "train_mlp", "train_attn", "optimizer_config"}.
[[nodiscard]] Json WeightsJson(const std::string& base_model,
                               const LoraConfig& config);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RUN_JSON_H_
