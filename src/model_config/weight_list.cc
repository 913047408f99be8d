#include "src/model_config/weight_list.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cpu/int8_rows.h"
#include "src/model_config/model_shard.h"

namespace weft::model_config {
namespace {

using parallel::Range;
using parallel::Shard;

Range Whole(int64_t count) { return {.begin = 0, .end = count}; }

// A projection in a WeightSlot: its number of rows, and the rows that this rank
// keeps.
struct Projection {
  std::string name;
  int64_t rows;
  Range part;
  StoredPlace fused = {};
  int64_t head_rows = 0;  // WeightEntry::head_rows.
};

// The columns of a slot's tensors: their number, and the part that this rank
// keeps. A vector has a count of 0.
struct Columns {
  int64_t count = 0;
  Range part;
};

WeightEntry MakeEntry(std::string name, WeightSlot slot, int layer,
                      const Projection& projection, const Columns& columns) {
  WeightEntry entry{.name = std::move(name),
                    .slot = slot,
                    .layer = layer,
                    .shape = {projection.rows},
                    .part_shape = {projection.part.size()},
                    .part_row = projection.part.begin,
                    .part_column = columns.part.begin,
                    .slot_rows = projection.part.size(),
                    .head_rows = projection.head_rows,
                    .fused = projection.fused};
  if (columns.count > 0) {
    entry.shape.push_back(columns.count);
    entry.part_shape.push_back(columns.part.size());
  }
  return entry;
}

// Lists the tensors of one layer.
class LayerList {
 public:
  LayerList(const ModelConfig& config, const Shard& shard, int layer,
            std::vector<WeightEntry>& entries)
      : config_(config),
        ranges_(LocalRanges(config, shard)),
        part_(ShardOf(config, shard)),
        is_first_rank_(shard.rank == 0),
        layer_(layer),
        prefix_(absl::StrCat("model.layers.", layer, ".")),
        entries_(entries) {}

  void AddAttention() {
    const ModelShape shape = config_.shape();
    AddNorm(config_.norms.attention_in, WeightSlot::kInputNorm);
    std::vector<Projection> qkv = {
        {"self_attn.q_proj",
         OutWidth(shape, TargetModule::kQProj),
         QueryRows(),
         {},
         int64_t{ranges_.q_rows} * config_.head_dim},
        {"self_attn.k_proj", shape.kv_width, ranges_.kv, {}, config_.head_dim},
        {"self_attn.v_proj", shape.kv_width, ranges_.kv}};
    if (config_.fused_qkv) Fuse("self_attn.qkv_proj", qkv);
    AddStack(qkv, WeightSlot::kQkv, Hidden());
    if (config_.qkv_bias) AddBiases(qkv, WeightSlot::kQkvBias);
    if (config_.qk_norm != QkNorm::kNone) {
      AddQkNorm("self_attn.q_norm", WeightSlot::kQNorm, shape.q_width);
      AddQkNorm("self_attn.k_norm", WeightSlot::kKNorm, shape.kv_width);
    }
    if (config_.sinks) {
      AddRows({{"self_attn.sinks", config_.num_heads, part_.heads}}, "",
              WeightSlot::kSinks, {});
    }
    AddSummed("self_attn.o_proj", {shape.q_width, ranges_.q}, WeightSlot::kO,
              config_.o_bias, WeightSlot::kOBias);
    AddNorm(config_.norms.attention_out, WeightSlot::kAttentionOutNorm);
  }

  void AddDelta() {
    const DeltaShape& delta = config_.delta;
    AddNorm(config_.norms.attention_in, WeightSlot::kInputNorm);
    AddStack(delta.is_fused ? FusedDeltaInputs() : DeltaInputs(),
             WeightSlot::kQkv, Hidden());
    const Columns taps = {delta.conv_kernel, Whole(delta.conv_kernel)};
    AddStack(ConvFeatures("linear_attn.conv1d",
                          {delta.conv_width(), 1, delta.conv_kernel}),
             WeightSlot::kConv, taps);
    const Projection heads = {"", delta.value_heads, part_.delta_value_heads};
    for (const auto& [name, slot] :
         {std::pair("linear_attn.A_log", WeightSlot::kDecay),
          std::pair("linear_attn.dt_bias", WeightSlot::kDtBias)}) {
      AddRows({{name, heads.rows, heads.part}}, "", slot, {});
    }
    AddStack({{"linear_attn.norm", delta.value_features,
               Whole(delta.value_features)}},
             WeightSlot::kDeltaNorm, {});
    AddSummed("linear_attn.out_proj",
              {delta.value_width(), ranges_.delta_value}, WeightSlot::kO,
              /*has_bias=*/false, WeightSlot::kOBias);
  }

  void AddMlp() {
    AddNorm(config_.norms.mlp_in, WeightSlot::kMlpNorm);
    if (config_.moe.shape.InLayer(layer_)) {
      AddExperts();
    } else {
      AddDenseMlp();
    }
    AddNorm(config_.norms.mlp_out, WeightSlot::kMlpOutNorm);
  }

 private:
  // Returns the parts of q, k and v in a tensor with rows of q | k | v.
  std::vector<Projection> ConvFeatures(
      const std::string& name, const std::vector<int64_t>& shape) const {
    const int64_t keys = config_.delta.key_width();
    const auto part = [&](int64_t first_row, int64_t rows, const Range& own) {
      return Projection{name,
                        rows,
                        own,
                        {.name = absl::StrCat(prefix_, name, ".weight"),
                         .shape = shape,
                         .first_row = first_row,
                         .is_only = true}};
    };
    return {part(0, keys, ranges_.delta_key),
            part(keys, keys, ranges_.delta_key),
            part(2 * keys, config_.delta.value_width(), ranges_.delta_value)};
  }

  std::vector<Projection> DeltaInputs() const {
    const DeltaShape& delta = config_.delta;
    std::vector<Projection> inputs = ConvFeatures(
        "linear_attn.in_proj_qkv", {delta.conv_width(), config_.hidden});
    inputs.push_back(
        {"linear_attn.in_proj_z", delta.value_width(), ranges_.delta_value});
    for (const char* name :
         {"linear_attn.in_proj_b", "linear_attn.in_proj_a"}) {
      inputs.push_back({name, delta.value_heads, part_.delta_value_heads});
    }
    return inputs;
  }

  // Returns the parts of tensors whose rows are grouped by key head: those of a
  // head's q, k, v and z in one tensor, and of its b and a in the other.
  std::vector<Projection> FusedDeltaInputs() const {
    const DeltaShape& delta = config_.delta;
    std::vector<Projection> inputs;
    const int64_t heads = delta.value_heads / delta.key_heads;
    const int64_t values = heads * delta.value_features;
    const auto add = [&](const char* name, const std::vector<int64_t>& sizes) {
      const int64_t group =
          std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      int64_t first = 0;
      for (const int64_t rows : sizes) {
        for (int64_t j = part_.delta_key_heads.begin;
             j < part_.delta_key_heads.end; ++j) {
          inputs.push_back({name,
                            rows,
                            Whole(rows),
                            {.name = absl::StrCat(prefix_, name, ".weight"),
                             .shape = {group * delta.key_heads, config_.hidden},
                             .first_row = group * j + first,
                             .is_only = true}});
        }
        first += rows;
      }
    };
    add("linear_attn.in_proj_qkvz",
        {delta.key_features, delta.key_features, values, values});
    add("linear_attn.in_proj_ba", {heads, heads});
    return inputs;
  }

  void AddDenseMlp() {
    std::vector<Projection> gate_up = {
        {"mlp.gate_proj", config_.ffn, ranges_.ffn},
        {"mlp.up_proj", config_.ffn, ranges_.ffn}};
    if (config_.fused_gate_up) Fuse("mlp.gate_up_proj", gate_up);
    AddStack(gate_up, WeightSlot::kGateUp, Hidden());
    if (config_.mlp_bias) AddBiases(gate_up, WeightSlot::kGateUpBias);
    AddSummed("mlp.down_proj", {config_.ffn, ranges_.ffn}, WeightSlot::kDown,
              config_.mlp_bias, WeightSlot::kDownBias);
  }

  void AddExperts() {
    const ExpertShape& experts = config_.moe.shape;
    if (experts.names == ExpertNames::kFused) return AddFusedExperts();
    const bool is_mixtral = experts.names == ExpertNames::kMixtral;
    const std::string block = is_mixtral ? "block_sparse_moe." : "mlp.";
    AddStack({{block + "gate",
               experts.count,
               Whole(experts.count),
               {.name = prefix_ + "mlp.gate.weight",
                .shape = {experts.count, config_.hidden}}}},
             WeightSlot::kRouter, Hidden());
    if (config_.moe.sigmoid) {
      AddRows({{absl::StrCat(block, is_mixtral ? "" : "gate.",
                             "e_score_correction_bias"),
                experts.count,
                Whole(experts.count),
                {.name = prefix_ + "mlp.e_score_correction_bias",
                 .shape = {experts.count}}}},
              "", WeightSlot::kRouterCorrection, {});
    }
    AddExpertRange(part_.experts, {experts.ffn, part_.expert_ffn},
                   WeightSlot::kExpertGateUp, WeightSlot::kExpertDown);
    if (experts.shared_ffn == 0) return;
    AddExpertRange({.begin = experts.count, .end = experts.total()},
                   {experts.shared_ffn, part_.shared_ffn},
                   WeightSlot::kSharedGateUp, WeightSlot::kSharedDown);
    if (!config_.moe.has_shared_gate) return;
    AddStack({{block + "shared_expert_gate", 1, Whole(1)}},
             WeightSlot::kSharedGate, Hidden());
  }

  // Adds experts with ExpertNames::kFused: each tensor has all experts of a
  // layer. Matrices are transposed, and rows of gate and up alternate.
  void AddFusedExperts() {
    const ExpertShape& experts = config_.moe.shape;
    const std::vector<Projection> router = {
        {"mlp.router", experts.count, Whole(experts.count)}};
    AddStack(router, WeightSlot::kRouter, Hidden());
    AddBiases(router, WeightSlot::kRouterBias);
    const Columns features = {experts.ffn, part_.expert_ffn};
    const int64_t wide = 2 * experts.ffn;
    std::vector<Projection> gate_up, gate_up_bias, down, down_bias;
    for (int64_t i = part_.experts.begin; i < part_.experts.end; ++i) {
      const auto expert = static_cast<int>(i);
      const auto add = [&](const char* name, std::vector<int64_t> shape,
                           int64_t first_row, int64_t row_step,
                           const Columns& rows, std::vector<Projection>& list) {
        shape.insert(shape.begin(), experts.count);
        list.push_back({absl::StrCat("mlp.experts.", expert, ".", name),
                        rows.count,
                        rows.part,
                        {.name = absl::StrCat(prefix_, "mlp.experts.", name),
                         .shape = std::move(shape),
                         .first_row = first_row,
                         .form = StoredForm::kTransposed,
                         .expert = expert,
                         .row_step = row_step}});
      };
      for (const int64_t is_up : {0, 1}) {
        add("gate_up_proj", {config_.hidden, wide}, is_up, 2, features,
            gate_up);
        add("gate_up_proj_bias", {wide}, is_up, 2, features, gate_up_bias);
      }
      add("down_proj", {experts.ffn, config_.hidden}, 0, 1, Hidden(), down);
      add("down_proj_bias", {config_.hidden}, 0, 1, Hidden(), down_bias);
    }
    AddRows(gate_up, "", WeightSlot::kExpertGateUp, Hidden());
    AddRows(gate_up_bias, "", WeightSlot::kExpertGateUpBias, {});
    AddRows(down, "", WeightSlot::kExpertDown, features);
    if (part_.has_expert_bias) {
      AddRows(down_bias, "", WeightSlot::kExpertDownBias, {});
    }
  }

  // Adds the matrices of the experts in a range, each with `features` features.
  void AddExpertRange(const Range& experts, const Columns& features,
                      WeightSlot gate_up_slot, WeightSlot down_slot) {
    std::vector<Projection> gate_up;
    std::vector<Projection> down;
    for (int64_t i = experts.begin; i < experts.end; ++i) {
      const auto expert = static_cast<int>(i);
      const auto name = [&](TargetModule module) {
        return absl::StrCat(ExpertPath(layer_, expert, config_.moe.shape)
                                .substr(prefix_.size()),
                            ".",
                            ExpertModuleName(module, config_.moe.shape.names));
      };
      for (const auto module :
           {TargetModule::kGateProj, TargetModule::kUpProj}) {
        gate_up.push_back({name(module), features.count, features.part,
                           Fused(module, expert)});
      }
      down.push_back({name(TargetModule::kDownProj), config_.hidden,
                      Whole(config_.hidden),
                      Fused(TargetModule::kDownProj, expert)});
    }
    AddStack(gate_up, gate_up_slot, Hidden());
    AddStack(down, down_slot, features);
  }

  // Returns the place of an expert's matrix inside the tensor of all experts.
  // Returns no place for the shared expert, which is not in that tensor.
  StoredPlace Fused(TargetModule module, int expert) const {
    const ExpertShape& experts = config_.moe.shape;
    if (expert == experts.count) return {};
    const std::string block = prefix_ + "mlp.experts.";
    const bool is_only = experts.is_fused();
    if (module == TargetModule::kDownProj) {
      return {.name = block + "down_proj",
              .shape = {experts.count, config_.hidden, experts.ffn},
              .first_row = expert * config_.hidden,
              .expert = expert,
              .is_only = is_only};
    }
    const int64_t half = module == TargetModule::kUpProj ? experts.ffn : 0;
    return {.name = block + "gate_up_proj",
            .shape = {experts.count, 2 * experts.ffn, config_.hidden},
            .first_row = 2 * experts.ffn * expert + half,
            .expert = expert,
            .is_only = is_only};
  }

  // Returns the rank's rows of q_proj. A gate's rows are beside its query's.
  Range QueryRows() const {
    return {.begin = ranges_.q.begin * ranges_.q_rows,
            .end = ranges_.q.end * ranges_.q_rows};
  }
  Columns Hidden() const { return {config_.hidden, Whole(config_.hidden)}; }
  // Places the projections, one after another, in the tensor of `name`.
  void Fuse(const std::string& name, std::vector<Projection>& parts) const {
    int64_t rows = 0;
    for (Projection& part : parts) {
      part.fused = {.name = absl::StrCat(prefix_, name, ".weight"),
                    .first_row = rows,
                    .is_only = true};
      rows += part.rows;
    }
    for (Projection& part : parts) part.fused.shape = {rows, config_.hidden};
  }
  // Adds a norm of the residual stream, if it has a name.
  void AddNorm(absl::string_view name, WeightSlot slot) {
    if (name.empty()) return;
    AddRows({{std::string(name), config_.hidden, Whole(config_.hidden)}},
            ".weight", slot, {});
  }
  // Adds a norm of each head, or of all heads with `width` features.
  void AddQkNorm(const std::string& name, WeightSlot slot, int64_t width) {
    const int64_t size =
        config_.qk_norm == QkNorm::kWhole ? width : config_.head_dim;
    AddRows({{name, size, Whole(size), {}, config_.head_dim}}, ".weight", slot,
            {});
  }
  void AddStack(const std::vector<Projection>& projections, WeightSlot slot,
                const Columns& columns) {
    AddRows(projections, ".weight", slot, columns);
  }
  void AddBiases(const std::vector<Projection>& projections, WeightSlot slot) {
    AddRows(projections, ".bias", slot, {});
  }
  // Adds a projection that writes to the residual stream. Its results are
  // summed over ranks, so only the first rank has the bias.
  void AddSummed(const std::string& name, const Columns& columns,
                 WeightSlot slot, bool has_bias, WeightSlot bias_slot) {
    const std::vector<Projection> rows = {
        {name, config_.hidden, Whole(config_.hidden)}};
    AddStack(rows, slot, columns);
    if (has_bias && is_first_rank_) AddBiases(rows, bias_slot);
  }

  // Adds an entry for each projection. All entries share one matrix or vector.
  void AddRows(const std::vector<Projection>& projections,
               absl::string_view suffix, WeightSlot slot,
               const Columns& columns) {
    int64_t slot_rows = 0;
    for (const Projection& projection : projections) {
      slot_rows += projection.part.size();
    }
    int64_t first_row = 0;
    for (const Projection& projection : projections) {
      WeightEntry entry =
          MakeEntry(absl::StrCat(prefix_, projection.name, suffix), slot,
                    layer_, projection, columns);
      entry.first_row = first_row;
      entry.slot_rows = slot_rows;
      entries_.push_back(std::move(entry));
      first_row += projection.part.size();
    }
  }

  const ModelConfig& config_;
  const ShapeRanges ranges_;
  const ModelShard part_;
  const bool is_first_rank_;
  const int layer_;
  const std::string prefix_;
  std::vector<WeightEntry>& entries_;
};

// Returns the entry of the embedding or of the head.
WeightEntry VocabMatrix(const ModelConfig& config, const Shard& shard,
                        const char* name, WeightSlot slot) {
  return MakeEntry(name, slot, /*layer=*/0,
                   {"", config.vocab, shard.Of(config.vocab)},
                   {config.hidden, Whole(config.hidden)});
}

WeightEntry Embedding(const ModelConfig& config, const Shard& shard) {
  return VocabMatrix(config, shard, "model.embed_tokens.weight",
                     WeightSlot::kEmbedding);
}

WeightEntry Head(const ModelConfig& config, const Shard& shard) {
  return VocabMatrix(config, shard, "lm_head.weight", WeightSlot::kHead);
}

}  // namespace

bool IsNorm(WeightSlot slot) {
  switch (slot) {
    case WeightSlot::kInputNorm:
    case WeightSlot::kQNorm:
    case WeightSlot::kKNorm:
    case WeightSlot::kAttentionOutNorm:
    case WeightSlot::kMlpNorm:
    case WeightSlot::kMlpOutNorm:
    case WeightSlot::kDeltaNorm:
    case WeightSlot::kFinalNorm:
      return true;
    default:
      return false;
  }
}

bool MayBeInt8(WeightSlot slot) {
  using enum WeightSlot;
  constexpr WeightSlot kMatrices[] = {
      kEmbedding,  kQkv,          kO,          kGateUp, kDown, kExpertGateUp,
      kExpertDown, kSharedGateUp, kSharedDown, kHead};
  return std::ranges::find(kMatrices, slot) != std::end(kMatrices);
}

int64_t SlotBytes(const WeightEntry& entry, const ModelConfig& config,
                  int64_t element_bytes, MatrixFormat format) {
  constexpr int64_t kAlignment = 256;
  constexpr int64_t kFloatBytes = 4;
  int64_t bytes = IsWide(entry.slot, config) ? kFloatBytes : element_bytes;
  if (format == MatrixFormat::kInt8 && MayBeInt8(entry.slot)) {
    bytes = kernels::cpu::Int8RowStride(entry.part_shape[1]);
  } else if (entry.part_shape.size() > 1) {
    bytes *= entry.part_shape[1];
  }
  bytes *= entry.slot_rows;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool IsFromOne(WeightSlot slot, const ModelConfig& config) {
  return config.norms_from_one && IsNorm(slot) &&
         slot != WeightSlot::kDeltaNorm;
}

bool IsWide(WeightSlot slot, const ModelConfig& config) {
  return slot == WeightSlot::kRouterCorrection || slot == WeightSlot::kDecay ||
         slot == WeightSlot::kDtBias || IsFromOne(slot, config);
}

int64_t WeightBytes(const ModelConfig& config, int64_t element_bytes,
                    const parallel::Shard& shard, MatrixFormat format) {
  int64_t bytes = 0;
  for (const WeightEntry& entry : ListWeights(config, shard)) {
    if (entry.first_row == 0) {
      bytes += SlotBytes(entry, config, element_bytes, format);
    }
  }
  return bytes;
}

int64_t WeightEntry::num_elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

std::vector<WeightEntry> ListWeights(const ModelConfig& config,
                                     const Shard& shard) {
  std::vector<WeightEntry> entries = {Embedding(config, shard)};
  for (int layer = 0; layer < config.num_layers; ++layer) {
    LayerList list(config, shard, layer, entries);
    if (config.delta.InLayer(layer)) {
      list.AddDelta();
    } else {
      list.AddAttention();
    }
    list.AddMlp();
  }
  entries.push_back(MakeEntry("model.norm.weight", WeightSlot::kFinalNorm,
                              /*layer=*/0,
                              {"", config.hidden, Whole(config.hidden)}, {}));
  if (!config.tied_embeddings) entries.push_back(Head(config, shard));
  return entries;
}

std::vector<WeightEntry> ListHeadWeights(const ModelConfig& config) {
  std::vector<WeightEntry> entries = {Embedding(config, {})};
  if (!config.tied_embeddings) entries.push_back(Head(config, {}));
  return entries;
}

}  // namespace weft::model_config
