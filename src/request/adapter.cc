#include "src/request/adapter.h"

#include <algorithm>
#include <array>

namespace weft {

std::vector<TargetModule> DefaultTargetModules() {
  return {TargetModule::kQProj,    TargetModule::kKProj,
          TargetModule::kVProj,    TargetModule::kOProj,
          TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj};
}

const char* TargetModuleName(TargetModule module) {
  constexpr std::array kNames = {
      "q_proj",       "k_proj",      "v_proj",       "o_proj",
      "gate_proj",    "up_proj",     "down_proj",    "lm_head",
      "embed_tokens", "in_proj_qkv", "in_proj_z",    "in_proj_b",
      "in_proj_a",    "out_proj",    "in_proj_qkvz", "in_proj_ba"};
  static_assert(kNames.size() == kAllTargetModules.size());
  const auto index = static_cast<size_t>(module);
  return index < kNames.size() ? kNames[index] : "unknown";
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
