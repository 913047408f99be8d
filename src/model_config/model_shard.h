// Tensor parallelism: what each of several ranks computes of every layer.
// Torch-free.
//
// Query and key/value heads, feed-forward features and the vocabulary are split
// into contiguous parts; the residual stream and the norms are whole on every
// rank. The products that read the residual stream are split by their rows
// (q, k, v, gate, up, head), those that write to it by their columns (o, down):
// the ranks' results are summed. Source: Shoeybi et al. 2019 (Megatron-LM).
#ifndef WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_
#define WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_

#include "absl/status/status.h"
#include "src/model_config/model_config.h"
#include "src/parallel/shard.h"
#include "src/peft/adapter_layout.h"

namespace weft::model {

// The parts of a rank. Together the ranks have all heads, all features and the
// whole vocabulary. With more ranks than key/value heads, each rank has the
// ones that its query heads read, so a key/value head may be on several ranks.
struct ModelShard {
  parallel::Range heads;
  parallel::Range kv_heads;
  parallel::Range ffn;
  parallel::Range vocab;
};

// INVALID_ARGUMENT naming --tensor-parallel-size, its value and the limit: more
// ranks than query heads, feed-forward features or vocabulary entries, or heads
// that cannot be dealt out so that a rank's key/value heads serve equally many
// of its query heads.
[[nodiscard]] absl::Status CheckTensorParallelSize(const ModelConfig& config,
                                                   int size);

// The parts of the rank `shard`. Arguments: here and in the next two functions
// CheckTensorParallelSize must accept the number of ranks.
[[nodiscard]] ModelShard ShardOf(const ModelConfig& config,
                                 const parallel::Shard& shard);

// The model with the rank's numbers of heads, features and vocabulary entries:
// its shape() is that of the rank's part of an adapter.
[[nodiscard]] ModelConfig LocalConfig(const ModelConfig& config,
                                      const parallel::Shard& shard);

// The model with the largest numbers that a rank of so many has: for budgets
// that must hold on all of them.
[[nodiscard]] ModelConfig LargestConfig(const ModelConfig& config, int size);

// The same parts, in features.
[[nodiscard]] lora::ShapeRanges LocalRanges(const ModelConfig& config,
                                            const parallel::Shard& shard);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_
