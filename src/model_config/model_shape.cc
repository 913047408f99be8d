#include "src/model_config/model_shape.h"

#include "absl/strings/str_cat.h"

namespace weft::model_config {

int64_t InWidth(const ModelShape& shape, TargetModule module) {
  if (module == TargetModule::kOProj) return shape.q_width;
  if (module == TargetModule::kDownProj) return shape.ffn;
  if (module == TargetModule::kEmbedTokens) return shape.vocab;
  if (module == TargetModule::kOutProj) return shape.delta.value_width();
  return shape.hidden;
}

int64_t OutWidth(const ModelShape& shape, TargetModule module) {
  switch (module) {
    case TargetModule::kQProj:
      return shape.q_width + shape.gate_width;
    case TargetModule::kKProj:
    case TargetModule::kVProj:
      return shape.kv_width;
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
      return shape.ffn;
    case TargetModule::kLmHead:
      return shape.vocab;
    case TargetModule::kInProjQkv:
      return shape.delta.conv_width();
    case TargetModule::kInProjZ:
      return shape.delta.value_width();
    case TargetModule::kInProjB:
    case TargetModule::kInProjA:
      return shape.delta.value_heads;
    case TargetModule::kInProjQkvz:
      return shape.delta.conv_width() + shape.delta.value_width();
    case TargetModule::kInProjBa:
      return int64_t{2} * shape.delta.value_heads;
    case TargetModule::kOProj:
    case TargetModule::kDownProj:
    case TargetModule::kEmbedTokens:
    case TargetModule::kOutProj:
      return shape.hidden;
  }
  return 0;
}

const char* ExpertModuleName(TargetModule module, ExpertNames names) {
  if (names != ExpertNames::kMixtral) return TargetModuleName(module);
  switch (module) {
    case TargetModule::kGateProj:
      return "w1";
    case TargetModule::kUpProj:
      return "w3";
    default:
      return "w2";
  }
}

std::string ExpertPath(int layer, int expert, const ExpertShape& experts) {
  const std::string mlp = absl::StrCat(
      "model.layers.", layer,
      experts.names == ExpertNames::kMixtral ? ".block_sparse_moe" : ".mlp");
  if (expert == experts.count) {
    return absl::StrCat(mlp, experts.names == ExpertNames::kGlm
                                 ? ".shared_experts"
                                 : ".shared_expert");
  }
  return absl::StrCat(mlp, ".experts.", expert);
}

}  // namespace weft::model_config
