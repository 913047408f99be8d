// Runs and checkpoints as JSON.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_RUN_JSON_H_
#define WEFT_SERVER_TINKER_RUN_JSON_H_

#include <map>
#include <string>
#include <vector>

#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"
#include "src/request/adapter.h"

namespace weft::tinker {

[[nodiscard]] Json CheckpointJson(const CheckpointInfo& info,
                                  const CheckpointPath& path,
                                  const CheckpointExtras& extras);

// What is known of one run.
struct Run {
  std::string adapter;
  LoraConfig config;
  absl::Time last_used_at;
  std::vector<CheckpointInfo> checkpoints;  // Newest first.
};

// The runs of adapters and checkpoints together, the latest used first. Those
// adapters that are only sampled from are left out.
[[nodiscard]] std::vector<Run> MakeRuns(
    const std::vector<AdapterInfo>& adapters,
    const std::vector<CheckpointInfo>& checkpoints);
[[nodiscard]] Json RunJson(const Front& front, const Caller& caller,
                           const Run& run);

// The part [offset, offset + limit) of a list, by the call's query, and its
// cursor: {NAME: [...], "cursor": {...}}. INVALID_ARGUMENT for a bad query.
[[nodiscard]] absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                                            const Json& all);

// {"base_model", "is_lora", "lora_rank", "train_...", "optimizer_config"}.
[[nodiscard]] Json WeightsJson(const std::string& base_model,
                               const LoraConfig& config);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RUN_JSON_H_
