#include "src/lora/loader_rules.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace weft::lora {
namespace {

using model_config::DecoderNames;
using model_config::ModelShape;

// Returns whether the model's class in vLLM has is_3d_moe_weight.
bool IsFusedInVllm(const ModelShape& shape) {
  return shape.experts.is_fused() ||
         shape.wrapper_names == DecoderNames::kWrapped;
}

}  // namespace

FileRules RulesOf(Loader loader, const ModelShape& shape) {
  const bool has_experts = shape.experts.count > 0;
  FileRules rules{.names = shape.names};
  bool fuses = shape.fused_qkv || shape.fused_gate_up;
  switch (loader) {
    case Loader::kPeft:
      rules.mlp_parameters = has_experts;
      fuses |= has_experts;
      break;
    case Loader::kVllm:
      rules.names = shape.wrapper_names;
      rules.one_scale = true;
      fuses |= has_experts && IsFusedInVllm(shape);
      break;
    case Loader::kLlamaCpp:
      rules.one_scale = rules.one_rank = true;
      break;
  }
  if (fuses) rules.form = FusedForm::kParts;
  return rules;
}

absl::Status CheckLoader(Loader loader, const AdapterLayout& layout,
                         const ModelShape& shape) {
  if (loader != Loader::kLlamaCpp || !shape.experts.is_fused()) {
    return absl::OkStatus();
  }
  for (const LoraFactor& factor : layout.factors()) {
    if (factor.expert == kNoExpert) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "loader is llama.cpp, which has no name for LoRA of this model's "
        "experts, and the adapter has LoRA in ",
        FilePath(factor, shape),
        ": export it for peft, or train an adapter without gate_proj, up_proj "
        "and down_proj"));
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
