// The LoRA rank of experts. A token passes through few of many experts, so an
// expert sees few tokens, and an adapter's rank is shared among the experts of
// a token.
#ifndef WEFT_SRC_PEFT_EXPERT_RANK_H_
#define WEFT_SRC_PEFT_EXPERT_RANK_H_

#include "absl/status/statusor.h"
#include "src/peft/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Returns rank / experts per token, at least 1.
[[nodiscard]] int SharedRank(int rank, const ExpertShape& experts);

// Replaces config.expert_rank by overrides of gate, up and down in the layers
// of experts. The experts' scale alpha / rank is that of the other layers. If
// expert_rank is 0, it is SharedRank. Does nothing for a model without experts.
// Errors: INVALID_ARGUMENT for an expert_rank of a model without experts.
[[nodiscard]] absl::StatusOr<LoraConfig> WithExpertRank(
    LoraConfig config, const ModelShape& shape);

// Returns INVALID_ARGUMENT if a factor's rank is above `max_rank`, or an
// expert's is above SharedRank(max_rank).
[[nodiscard]] absl::Status CheckRanks(const AdapterLayout& layout,
                                      const ExpertShape& experts, int max_rank);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_EXPERT_RANK_H_
