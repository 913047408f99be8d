// Decides which part of every layer each rank (process) computes under tensor
// parallelism. Torch-free.
//
// Query heads, key/value heads, the key heads of linear layers with their value
// heads, feed-forward features and the vocabulary are split into contiguous
// parts. Every rank has the whole residual stream and all
// norms. Products that read the residual stream (q, k, v, gate, up, head) are
// split by rows. Products that write to it (o, down) are split by columns, and
// the ranks' results are summed. Source: Shoeybi et al. 2019 (Megatron-LM).
//
// Experts may be dealt out among groups of these ranks
// (MoeConfig::expert_groups). Then a rank has only its group's experts, and a
// part of their features. Every rank has all tokens, so ranks exchange no
// tokens. The sum over ranks also adds the results of the groups.
#ifndef WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_
#define WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_

#include "absl/status/status.h"
#include "src/model_config/model_config.h"
#include "src/model_config/model_shape.h"
#include "src/parallel/shard.h"

namespace weft::model_config {

// The parts of one rank. Together the ranks have all heads, all features and
// the whole vocabulary. Each rank has the key/value heads that its query heads
// read. So if there are more ranks than key/value heads, several ranks have the
// same key/value head.
struct ModelShard {
  parallel::Range heads;
  parallel::Range kv_heads;
  parallel::Range ffn;
  parallel::Range vocab;
  parallel::Range experts;
  parallel::Range expert_ffn;
  parallel::Range shared_ffn;
  parallel::Range delta_key_heads;
  parallel::Range delta_value_heads;
  // True if this rank adds the bias of its experts' `down`. In each group
  // (MoeConfig::expert_groups), only one rank adds it.
  bool has_expert_bias = true;
};

// Returns INVALID_ARGUMENT, naming --tensor-parallel-size, its value and the
// limit, if the model cannot be split over `size` ranks. Each rank needs at
// least one query head, one key head of linear layers, one feed-forward feature
// and one vocabulary entry. On each rank every key/value head must serve
// equally many query heads.
absl::Status CheckTensorParallelSize(const ModelConfig& config, int size);

// Sets MoeConfig::expert_groups to `size`. `size` must be 1, or must divide
// `tensor_parallel_size` and be at most the number of experts. Otherwise
// returns INVALID_ARGUMENT, which names --expert-parallel-size, its value and
// the limit.
absl::Status SetExpertParallelSize(int size, int tensor_parallel_size,
                                   ModelConfig& config);

// Returns the parts of rank `shard`. REQUIRES, also in LocalConfig and
// LocalRanges: CheckTensorParallelSize accepts the number of ranks.
ModelShard ShardOf(const ModelConfig& config, const parallel::Shard& shard);

// Returns the config with this rank's numbers of heads, features and vocabulary
// entries, and with its experts. The shape() of that config describes the
// rank's part of an adapter.
ModelConfig LocalConfig(const ModelConfig& config,
                        const parallel::Shard& shard);

// Computes the LocalConfig of each of `size` ranks, and returns the largest
// value of each field. Memory budgets from this config hold on all ranks.
// REQUIRES: as for ShardOf.
ModelConfig LargestConfig(const ModelConfig& config, int size);

// Returns the rank's parts as ranges of features and of vocabulary entries.
ShapeRanges LocalRanges(const ModelConfig& config,
                        const parallel::Shard& shard);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_SHARD_H_
