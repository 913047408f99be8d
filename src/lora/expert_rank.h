// Chooses the LoRA rank of experts. A token passes through few of many experts,
// so an expert sees few tokens. Therefore the adapter's rank is divided by the
// number of experts per token.
#ifndef WEFT_SRC_LORA_EXPERT_RANK_H_
#define WEFT_SRC_LORA_EXPERT_RANK_H_

#include "absl/status/statusor.h"
#include "src/lora/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Returns `rank` / experts per token, rounded down, but at least 1.
int SharedRank(int rank, const model_config::ExpertShape& experts);

// Replaces config.expert_rank with overrides for the targeted modules (gate,
// up, down) of layers with experts. The overrides have the same scale (alpha /
// rank) as the other layers. An expert_rank of 0 means SharedRank(config.rank).
// Changes nothing for a model without experts. Errors: INVALID_ARGUMENT for an
// expert_rank in a model without experts, or if the config targets only some of
// the modules that the model has as one.
absl::StatusOr<LoraConfig> WithExpertRank(
    LoraConfig config, const model_config::ModelShape& shape);

// Returns INVALID_ARGUMENT if a rank of the layout is above `max_rank`, or if
// the rank of an expert is above SharedRank(max_rank).
absl::Status CheckRanks(const AdapterLayout& layout,
                        const model_config::ExpertShape& experts, int max_rank);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_EXPERT_RANK_H_
