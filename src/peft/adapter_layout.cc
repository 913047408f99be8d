#include "src/peft/adapter_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace weft::lora {

std::span<const TargetModule> ModulesOf(ProjectionGroup group) {
  static constexpr TargetModule kQkv[] = {
      TargetModule::kQProj, TargetModule::kKProj, TargetModule::kVProj};
  static constexpr TargetModule kO[] = {TargetModule::kOProj};
  static constexpr TargetModule kGateUp[] = {TargetModule::kGateProj,
                                             TargetModule::kUpProj};
  static constexpr TargetModule kDown[] = {TargetModule::kDownProj};
  static constexpr TargetModule kLmHead[] = {TargetModule::kLmHead};
  static constexpr TargetModule kEmbedTokens[] = {TargetModule::kEmbedTokens};
  switch (group) {
    case ProjectionGroup::kQkv:
      return kQkv;
    case ProjectionGroup::kO:
      return kO;
    case ProjectionGroup::kGateUp:
      return kGateUp;
    case ProjectionGroup::kDown:
      return kDown;
    case ProjectionGroup::kLmHead:
      return kLmHead;
    case ProjectionGroup::kEmbedTokens:
      return kEmbedTokens;
  }
  return {};
}

int64_t InWidth(const ModelShape& shape, TargetModule module) {
  if (module == TargetModule::kOProj) return shape.q_width;
  if (module == TargetModule::kDownProj) return shape.ffn;
  if (module == TargetModule::kEmbedTokens) return shape.vocab;
  return shape.hidden;
}

int64_t OutWidth(const ModelShape& shape, TargetModule module) {
  switch (module) {
    case TargetModule::kQProj:
      return shape.q_width;
    case TargetModule::kKProj:
    case TargetModule::kVProj:
      return shape.kv_width;
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
      return shape.ffn;
    case TargetModule::kLmHead:
      return shape.vocab;
    case TargetModule::kOProj:
    case TargetModule::kDownProj:
    case TargetModule::kEmbedTokens:
      return shape.hidden;
  }
  return 0;
}

AdapterLayout::AdapterLayout(const ModelShape& shape, const LoraConfig& config)
    : config_(config) {
  groups_.reserve(shape.num_layers * kGroupsPerLayer + 2);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (const ProjectionGroup group :
         {ProjectionGroup::kQkv, ProjectionGroup::kO, ProjectionGroup::kGateUp,
          ProjectionGroup::kDown}) {
      AddGroup(shape, config, layer, group);
    }
  }
  AddGroup(shape, config, shape.num_layers, ProjectionGroup::kLmHead);
  AddGroup(shape, config, shape.num_layers, ProjectionGroup::kEmbedTokens);
}

void AdapterLayout::AddGroup(const ModelShape& shape, const LoraConfig& config,
                             int layer, ProjectionGroup group) {
  GroupLayout layout;
  for (const TargetModule module : ModulesOf(group)) {
    const LoraShape lora = config.ShapeOf(layer, module);
    if (lora.rank == 0) continue;
    max_rank_ = std::max(max_rank_, lora.rank);
    layout.total_rank += lora.rank;
    layout.factors.push_back({.layer = layer,
                              .module = module,
                              .rank = lora.rank,
                              .scale = lora.scale(),
                              .in = InWidth(shape, module),
                              .out = OutWidth(shape, module)});
  }
  for (LoraFactor& factor : layout.factors) {
    factor.a_offset = num_parameters_;
    num_parameters_ += factor.rank * factor.in;
  }
  for (LoraFactor& factor : layout.factors) {
    factor.b_offset = num_parameters_;
    num_parameters_ += factor.out * factor.rank;
  }
  factors_.insert(factors_.end(), layout.factors.begin(), layout.factors.end());
  groups_.push_back(std::move(layout));
}

const GroupLayout& AdapterLayout::group(int layer,
                                        ProjectionGroup group) const {
  if (group == ProjectionGroup::kEmbedTokens) return groups_.back();
  if (group == ProjectionGroup::kLmHead) return groups_[groups_.size() - 2];
  return groups_[layer * kGroupsPerLayer + static_cast<int>(group)];
}

std::string ModulePath(const LoraFactor& factor) {
  const char* name = TargetModuleName(factor.module);
  switch (factor.module) {
    case TargetModule::kLmHead:
      return name;
    case TargetModule::kEmbedTokens:
      return absl::StrCat("model.", name);
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
    case TargetModule::kDownProj:
      return absl::StrCat("model.layers.", factor.layer, ".mlp.", name);
    default:
      return absl::StrCat("model.layers.", factor.layer, ".self_attn.", name);
  }
}

}  // namespace weft::lora
