#include "src/request/adapter.h"

#include <algorithm>

namespace weft {

std::vector<TargetModule> DefaultTargetModules() {
  return {TargetModule::kQProj,    TargetModule::kKProj,
          TargetModule::kVProj,    TargetModule::kOProj,
          TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj};
}

const char* TargetModuleName(TargetModule module) {
  switch (module) {
    case TargetModule::kQProj:
      return "q_proj";
    case TargetModule::kKProj:
      return "k_proj";
    case TargetModule::kVProj:
      return "v_proj";
    case TargetModule::kOProj:
      return "o_proj";
    case TargetModule::kGateProj:
      return "gate_proj";
    case TargetModule::kUpProj:
      return "up_proj";
    case TargetModule::kDownProj:
      return "down_proj";
    case TargetModule::kLmHead:
      return "lm_head";
    case TargetModule::kEmbedTokens:
      return "embed_tokens";
    case TargetModule::kInProjQkv:
      return "in_proj_qkv";
    case TargetModule::kInProjZ:
      return "in_proj_z";
    case TargetModule::kInProjB:
      return "in_proj_b";
    case TargetModule::kInProjA:
      return "in_proj_a";
    case TargetModule::kOutProj:
      return "out_proj";
    case TargetModule::kInProjQkvz:
      return "in_proj_qkvz";
    case TargetModule::kInProjBa:
      return "in_proj_ba";
  }
  return "unknown";
}

const char* OptimizerName(Optimizer optimizer) {
  return optimizer == Optimizer::kMuon ? "muon" : "adamw";
}

LoraShape LoraConfig::ShapeOf(int layer, TargetModule module) const {
  if (std::ranges::find(target_modules, module) == target_modules.end()) {
    return {};
  }
  const auto found =
      std::ranges::find_if(overrides, [&](const LoraOverride& other) {
        return other.layer == layer && other.module == module;
      });
  if (found != overrides.end()) return found->shape;
  return {.rank = rank, .alpha = alpha};
}

}  // namespace weft
