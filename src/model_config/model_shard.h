// Tensor parallelism: what each of several ranks computes of every layer.
// Torch-free.
//
// Query and key/value heads, feed-forward features and the vocabulary are split
// into contiguous parts. The residual stream and the norms are whole on every
// rank. Products that read the residual stream (q, k, v, gate, up, head) are
// split by rows. Products that write to it (o, down) are split by columns, and
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
// key/value heads that its query heads read, so one may be on several ranks.
struct ModelShard {
  parallel::Range heads;
  parallel::Range kv_heads;
  parallel::Range ffn;
  parallel::Range vocab;
};

// Returns INVALID_ARGUMENT naming --tensor-parallel-size, its value and the
// limit. There may not be more ranks than query heads, feed-forward features or
// vocabulary entries, and on each rank every key/value head must serve the same
// number of query heads.
[[nodiscard]] absl::Status CheckTensorParallelSize(const ModelConfig& config,
                                                   int size);

// Returns the parts of the rank `shard`. Here and in the next two functions
// CheckTensorParallelSize must accept the number of ranks.
[[nodiscard]] ModelShard ShardOf(const ModelConfig& config,
                                 const parallel::Shard& shard);

// Returns the config with the rank's numbers of heads, features and vocabulary
// entries. Its shape() is that of the rank's part of an adapter.
[[nodiscard]] ModelConfig LocalConfig(const ModelConfig& config,
                                      const parallel::Shard& shard);

// Returns the config with the largest numbers that any rank has, for budgets
// that hold on all ranks.
[[nodiscard]] ModelConfig LargestConfig(const ModelConfig& config, int size);

// The same parts, in features.
[[nodiscard]] lora::ShapeRanges LocalRanges(const ModelConfig& config,
                                            const parallel::Shard& shard);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_
