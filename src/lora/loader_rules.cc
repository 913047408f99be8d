#include "src/lora/loader_rules.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace weft::lora {
namespace {

using model_config::DecoderNames;
using model_config::ExpertShape;
using model_config::ModelShape;

// Returns whether the model's class in vLLM has is_3d_moe_weight.
bool IsFusedInVllm(const ModelShape& shape) {
  return shape.experts.is_fused() ||
         shape.wrapper_names == DecoderNames::kWrapped;
}

}  // namespace

FileRules RulesOf(std::optional<Loader> loader, const ModelShape& shape) {
  const bool has_experts = shape.experts.count > 0;
  FileRules rules{.names = shape.names};
  bool fuses = shape.fused_qkv || shape.fused_gate_up ||
               (shape.experts.is_fused() && loader != Loader::kLlamaCpp);
  if (loader == Loader::kPeft) {
    rules.mlp_parameters = has_experts;
    fuses |= has_experts;
  } else if (loader == Loader::kVllm) {
    rules.names = shape.wrapper_names;
    rules.one_scale = true;
    fuses |= has_experts && IsFusedInVllm(shape);
  } else if (loader == Loader::kLlamaCpp) {
    rules.one_scale = rules.one_rank = true;
  }
  if (fuses) rules.form = FusedForm::kParts;
  return rules;
}

absl::Status CheckLoader(Loader loader, const AdapterLayout& layout,
                         const ModelShape& shape) {
  const ExpertShape& experts = shape.experts;
  const FileRules rules = RulesOf(loader, shape);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (!experts.InLayer(layer)) continue;
    const auto& both = layout.group(layer, ProjectionGroup::kGateUp, 0).factors;
    const auto& down = layout.group(layer, ProjectionGroup::kDown, 0).factors;
    if (both.empty() && down.empty()) continue;
    const std::string path = ExpertPath(layer, 0, experts);
    if (loader == Loader::kLlamaCpp && experts.is_fused()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "loader is llama.cpp, which has no name for LoRA of this model's "
          "experts, and the adapter has LoRA in ",
          path,
          ": export it for peft, or train an adapter without gate_proj, "
          "up_proj and down_proj"));
    }
    if (rules.form != FusedForm::kParts || both.empty()) continue;
    if (both.size() == 2 && both[0].rank == both[1].rank &&
        (rules.one_scale || both[0].scale == both[1].scale)) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "loader has gate_proj and up_proj of experts as one parameter, and "
        "LoRA in ",
        path, " has ", both.size(), " of them, or two ranks or scales",
        loader == Loader::kPeft ? ": export it for vllm or llama.cpp" : ""));
  }
  return absl::OkStatus();
}

LoraConfig WithOneScale(LoraConfig config) {
  const double scale = config.alpha / config.rank;
  for (LoraOverride& other : config.overrides) {
    other.shape.alpha = scale * other.shape.rank;
  }
  return config;
}

std::vector<float> ScaledWeights(const AdapterLayout& layout,
                                 absl::Span<const float> weights) {
  const double usual = layout.config().alpha / layout.config().rank;
  std::vector<float> scaled(weights.begin(), weights.end());
  for (const LoraFactor& factor : layout.factors()) {
    if (factor.scale == usual) continue;
    const double times = factor.scale / usual;
    const auto b = absl::MakeSpan(scaled).subspan(factor.b_offset,
                                                  factor.out * factor.rank);
    for (float& value : b) value = static_cast<float>(value * times);
  }
  return scaled;
}

int PadToOneRank(std::vector<PeftMatrix>& matrices) {
  int64_t rank = 0;
  for (size_t i = 0; i < matrices.size(); i += 2) {
    rank = std::max(rank, matrices[i].tensor_rows);
  }
  for (size_t i = 0; i < matrices.size(); i += 2) {
    matrices[i].tensor_rows = rank;
    matrices[i + 1].tensor_columns = rank;
  }
  return static_cast<int>(rank);
}

}  // namespace weft::lora
