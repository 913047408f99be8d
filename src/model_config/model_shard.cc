#include "src/model_config/model_shard.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"

namespace weft::model_config {
namespace {

using parallel::Range;
using parallel::Shard;

// In the model, each key/value head serves `group` query heads. Returns whether
// the range [begin, end) has equally many query heads of each key/value head
// that it uses. Attention requires this.
bool IsUniform(int64_t begin, int64_t end, int64_t group) {
  const int64_t first = begin / group;
  const int64_t last = (end - 1) / group;
  if (first == last) return true;
  const int64_t of_first = (first + 1) * group - begin;
  return of_first == end - last * group &&
         (last - first == 1 || of_first == group);
}

// Splits the query heads among ranks if there are more ranks than key/value
// heads. Parts differ by at most one head. A search chooses which ranks get the
// larger parts, so that all parts are uniform (IsUniform). For example, it
// splits 14 query heads with 2 key/value heads on 3 ranks. The result is empty
// if no split works.
class HeadParts {
 public:
  HeadParts(int64_t num_heads, int64_t num_kv_heads, int size)
      : small_(num_heads / size),
        num_large_(num_heads % size),
        group_(num_heads / num_kv_heads),
        size_(size),
        dead_(size * (num_large_ + 1), false) {}

  std::vector<Range> Find() {
    if (!Place(0)) return {};
    return parts_;
  }

 private:
  // Assigns the remaining heads to the remaining ranks. `large_used` of the
  // earlier ranks have a larger part. Returns false if no assignment works.
  bool Place(int64_t large_used) {
    const auto rank = static_cast<int64_t>(parts_.size());
    if (rank == size_) return large_used == num_large_;
    const int64_t state = rank * (num_large_ + 1) + large_used;
    if (dead_[state]) return false;
    const int64_t begin = rank * small_ + large_used;
    for (const int64_t extra : {0, 1}) {
      if (large_used + extra > num_large_) continue;
      const Range part{.begin = begin, .end = begin + small_ + extra};
      if (!IsUniform(part.begin, part.end, group_)) continue;
      parts_.push_back(part);
      if (Place(large_used + extra)) return true;
      parts_.pop_back();
    }
    dead_[state] = true;
    return false;
  }

  const int64_t small_;
  const int64_t num_large_;
  const int64_t group_;
  const int64_t size_;
  // Marks each state (rank, large_used) in which Place returned false.
  std::vector<bool> dead_;
  std::vector<Range> parts_;
};

// Returns the largest number of ranks for which every rank has at least one
// feature of each MLP, of its experts and of the shared expert. If every layer
// has experts, there is no MLP, and config.ffn does not count.
int64_t MostRanksWithFeatures(const ModelConfig& config) {
  const ExpertShape& experts = config.moe.shape;
  int64_t least = experts.num_layers() < config.num_layers
                      ? config.ffn
                      : std::numeric_limits<int64_t>::max();
  if (experts.count > 0) {
    least = std::min(least, experts.ffn * config.moe.expert_groups);
  }
  if (experts.shared_ffn > 0) least = std::min(least, experts.shared_ffn);
  return least;
}

}  // namespace

absl::Status CheckTensorParallelSize(const ModelConfig& config, int size) {
  const auto at_most = [size](int64_t limit, absl::string_view what) {
    if (size <= limit) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor-parallel-size ", size, " > ", limit, " ", what));
  };
  if (size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor-parallel-size ", size, " < 1"));
  }
  if (size > 1 && config.qk_norm == QkNorm::kWhole) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor-parallel-size ", size,
                     " > 1, but the norms of q and k of a ", config.model_type,
                     " are over all heads, which ranks would have to "
                     "share; run it on one rank"));
  }
  for (const absl::Status& status :
       {at_most(config.num_heads, "query heads"),
        at_most(MostRanksWithFeatures(config), "feed-forward features"),
        at_most(config.vocab, "vocabulary entries"),
        at_most(config.has_delta() ? config.delta.key_heads : size,
                "key heads of linear layers")}) {
    if (!status.ok()) return status;
  }
  if (size <= config.num_kv_heads ||
      !HeadParts(config.num_heads, config.num_kv_heads, size).Find().empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--tensor-parallel-size ", size, ": ", config.num_heads,
                   " query heads cannot be dealt out evenly so that the ",
                   config.num_kv_heads,
                   " key/value heads serve equally many on each rank; at most ",
                   config.num_kv_heads, " ranks always work"));
}

absl::Status SetExpertParallelSize(int size, int tensor_parallel_size,
                                   ModelConfig& config) {
  const auto refuse = [size](auto... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("--expert-parallel-size ", size, why...));
  };
  if (size < 1) return refuse(" < 1");
  if (size > 1 && config.moe.shape.count == 0) {
    return refuse(" > 1, but the model has no experts");
  }
  if (tensor_parallel_size % size != 0) {
    return refuse(" does not divide --tensor-parallel-size ",
                  tensor_parallel_size);
  }
  if (size > 1 && size > config.moe.shape.count) {
    return refuse(" > ", config.moe.shape.count, " experts");
  }
  config.moe.expert_groups = size;
  return absl::OkStatus();
}

ModelShard ShardOf(const ModelConfig& config, const Shard& shard) {
  const ExpertShape& experts = config.moe.shape;
  // A single rank has the whole model, even if expert_groups is more than 1.
  const int num_groups = std::min(config.moe.expert_groups, shard.size);
  const int group_size = shard.size / num_groups;
  const Shard group{.rank = shard.rank / group_size, .size = num_groups};
  const Shard in_group{.rank = shard.rank % group_size, .size = group_size};
  ModelShard part{.ffn = shard.Of(config.ffn),
                  .vocab = shard.Of(config.vocab),
                  .experts = group.Of(experts.count),
                  .expert_ffn = in_group.Of(experts.ffn),
                  .shared_ffn = shard.Of(experts.shared_ffn),
                  .has_expert_bias = in_group.rank == 0};
  if (config.has_delta()) {
    const int64_t values = config.delta.value_heads / config.delta.key_heads;
    const Range keys = shard.Of(config.delta.key_heads);
    part.delta_key_heads = keys;
    part.delta_value_heads = {.begin = keys.begin * values,
                              .end = keys.end * values};
  }
  const int64_t served = config.num_heads / config.num_kv_heads;
  if (shard.size <= config.num_kv_heads) {
    part.kv_heads = shard.Of(config.num_kv_heads);
    part.heads = {.begin = part.kv_heads.begin * served,
                  .end = part.kv_heads.end * served};
  } else {
    part.heads = HeadParts(config.num_heads, config.num_kv_heads, shard.size)
                     .Find()[shard.rank];
    part.kv_heads = {.begin = part.heads.begin / served,
                     .end = (part.heads.end - 1) / served + 1};
  }
  return part;
}

ModelConfig LocalConfig(const ModelConfig& config, const Shard& shard) {
  if (shard.size == 1) return config;
  const ModelShard part = ShardOf(config, shard);
  ModelConfig local = config;
  local.num_heads = static_cast<int>(part.heads.size());
  local.num_kv_heads = static_cast<int>(part.kv_heads.size());
  local.ffn = part.ffn.size();
  local.vocab = part.vocab.size();
  local.delta.key_heads = static_cast<int>(part.delta_key_heads.size());
  local.delta.value_heads = static_cast<int>(part.delta_value_heads.size());
  local.moe.shape.own = part.experts;
  local.moe.shape.ffn = part.expert_ffn.size();
  local.moe.shape.shared_ffn = part.shared_ffn.size();
  return local;
}

ModelConfig LargestConfig(const ModelConfig& config, int size) {
  ModelConfig largest = LocalConfig(config, {.rank = 0, .size = size});
  for (int rank = 1; rank < size; ++rank) {
    const ModelConfig local = LocalConfig(config, {.rank = rank, .size = size});
    largest.num_heads = std::max(largest.num_heads, local.num_heads);
    largest.num_kv_heads = std::max(largest.num_kv_heads, local.num_kv_heads);
    DeltaShape& delta = largest.delta;
    delta.key_heads = std::max(delta.key_heads, local.delta.key_heads);
    delta.value_heads = std::max(delta.value_heads, local.delta.value_heads);
    largest.ffn = std::max(largest.ffn, local.ffn);
    largest.vocab = std::max(largest.vocab, local.vocab);
    ExpertShape& experts = largest.moe.shape;
    if (local.moe.shape.num_own() > experts.num_own()) {
      experts.own = local.moe.shape.own;
    }
    experts.ffn = std::max(experts.ffn, local.moe.shape.ffn);
    experts.shared_ffn =
        std::max(experts.shared_ffn, local.moe.shape.shared_ffn);
  }
  return largest;
}

ShapeRanges LocalRanges(const ModelConfig& config, const Shard& shard) {
  const ModelShard part = ShardOf(config, shard);
  const auto features = [](const Range& heads, int64_t size) {
    return Range{.begin = heads.begin * size, .end = heads.end * size};
  };
  const DeltaShape& delta = config.delta;
  return {.q = features(part.heads, config.head_dim),
          .kv = features(part.kv_heads, config.head_dim),
          .ffn = part.ffn,
          .vocab = part.vocab,
          .expert_ffn = part.expert_ffn,
          .shared_ffn = part.shared_ffn,
          .delta_key = features(part.delta_key_heads, delta.key_features),
          .delta_value = features(part.delta_value_heads, delta.value_features),
          .delta_heads = part.delta_value_heads,
          .delta = delta,
          .q_rows = config.output_gate ? 2 : 1,
          .num_experts = config.moe.shape.count};
}

}  // namespace weft::model_config
