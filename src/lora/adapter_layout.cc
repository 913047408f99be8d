#include "src/lora/adapter_layout.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

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
  static constexpr TargetModule kDeltaIn[] = {
      TargetModule::kInProjQkv, TargetModule::kInProjZ, TargetModule::kInProjB,
      TargetModule::kInProjA};
  static constexpr TargetModule kDeltaFusedIn[] = {TargetModule::kInProjQkvz,
                                                   TargetModule::kInProjBa};
  static constexpr TargetModule kDeltaOut[] = {TargetModule::kOutProj};
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
    case ProjectionGroup::kDeltaIn:
      return kDeltaIn;
    case ProjectionGroup::kDeltaFusedIn:
      return kDeltaFusedIn;
    case ProjectionGroup::kDeltaOut:
      return kDeltaOut;
  }
  return {};
}

LayerGroups GroupsOf(const model_config::ModelShape& shape, int layer) {
  using enum ProjectionGroup;
  if (!shape.delta.InLayer(layer)) return {kQkv, kO, kGateUp, kDown};
  return {shape.delta.is_fused ? kDeltaFusedIn : kDeltaIn, kDeltaOut, kGateUp,
          kDown};
}

int IndexInLayer(ProjectionGroup group) {
  switch (group) {
    case ProjectionGroup::kO:
    case ProjectionGroup::kDeltaOut:
      return 1;
    case ProjectionGroup::kGateUp:
      return 2;
    case ProjectionGroup::kDown:
      return 3;
    default:
      return 0;
  }
}

std::vector<TargetModule> ProjectionsOf(const model_config::ModelShape& shape) {
  std::vector<TargetModule> modules;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (const ProjectionGroup group : GroupsOf(shape, layer)) {
      const auto of = ModulesOf(group);
      modules.insert(modules.end(), of.begin(), of.end());
    }
  }
  std::ranges::sort(modules);
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  return modules;
}

ProjectionGroup GroupOf(TargetModule module) {
  using enum ProjectionGroup;
  for (const ProjectionGroup group : {kQkv, kO, kGateUp, kDown, kLmHead,
                                      kDeltaIn, kDeltaFusedIn, kDeltaOut}) {
    const std::span<const TargetModule> modules = ModulesOf(group);
    if (std::ranges::find(modules, module) != modules.end()) return group;
  }
  return kEmbedTokens;
}

AdapterLayout::AdapterLayout(const model_config::ModelShape& shape,
                             const LoraConfig& config)
    : config_(config) {
  groups_.reserve(shape.num_layers * kGroupsPerLayer + 2);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    layer_groups_.push_back(groups_.size());
    const LayerGroups groups = GroupsOf(shape, layer);
    AddGroup(shape, config, layer, groups[0]);
    AddGroup(shape, config, layer, groups[1]);
    const bool dense = !shape.experts.InLayer(layer);
    const int last = dense ? kNoExpert : shape.experts.total() - 1;
    for (int expert = dense ? kNoExpert : 0; expert <= last; ++expert) {
      const model_config::ModelShape of =
          dense ? shape : shape.OfExpert(expert);
      AddGroup(of, config, layer, ProjectionGroup::kGateUp, expert);
      AddGroup(of, config, layer, ProjectionGroup::kDown, expert);
    }
  }
  layer_groups_.push_back(groups_.size());
  AddGroup(shape, config, shape.num_layers, ProjectionGroup::kLmHead);
  AddGroup(shape, config, shape.num_layers, ProjectionGroup::kEmbedTokens);
}

void AdapterLayout::AddGroup(const model_config::ModelShape& shape,
                             const LoraConfig& config, int layer,
                             ProjectionGroup group, int expert) {
  GroupLayout layout{.expert = expert};
  const bool is_own = expert == kNoExpert || shape.experts.Has(expert);
  for (const TargetModule module : ModulesOf(group)) {
    if (!is_own) break;
    const LoraShape lora = config.ShapeOf(layer, module);
    if (lora.rank == 0) continue;
    max_rank_ = std::max(max_rank_, lora.rank);
    layout.total_rank += lora.rank;
    layout.factors.push_back({.layer = layer,
                              .module = module,
                              .expert = expert,
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

const GroupLayout& AdapterLayout::group(int layer, ProjectionGroup group,
                                        int expert) const {
  if (group == ProjectionGroup::kEmbedTokens) return groups_.back();
  if (group == ProjectionGroup::kLmHead) return groups_[groups_.size() - 2];
  const size_t first = layer_groups_[layer];
  const auto index = first + static_cast<size_t>(IndexInLayer(group));
  if (expert != kNoExpert) {
    return groups_[index + 2 * static_cast<size_t>(expert)];
  }
  static const GroupLayout kEmpty;
  const bool is_dense = groups_[first + 2].expert == kNoExpert;
  return IsOfMlp(group) && !is_dense ? kEmpty : groups_[index];
}

std::string PathInFile(const std::string& path,
                       model_config::DecoderNames names) {
  constexpr absl::string_view kModel = "model.";
  const bool in_model = absl::StartsWith(path, kModel);
  if (names == model_config::DecoderNames::kWrapped && in_model) {
    return absl::StrCat("model.language_model.", path.substr(kModel.size()));
  }
  if (names == model_config::DecoderNames::kOldWrapped) {
    return absl::StrCat("language_model.", path);
  }
  return path;
}

int NumFused(TargetModule module, const model_config::ModelShape& shape) {
  const ProjectionGroup group = GroupOf(module);
  const bool is_fused =
      (group == ProjectionGroup::kQkv && shape.fused_qkv) ||
      (group == ProjectionGroup::kGateUp && shape.fused_gate_up);
  return is_fused ? static_cast<int>(ModulesOf(group).size()) : 1;
}

const char* FileModuleName(TargetModule module,
                           const model_config::ModelShape& shape) {
  if (NumFused(module, shape) == 1) return TargetModuleName(module);
  return GroupOf(module) == ProjectionGroup::kQkv ? "qkv_proj" : "gate_up_proj";
}

std::string FilePath(const LoraFactor& factor,
                     const model_config::ModelShape& shape) {
  std::string path = ModulePath(factor, shape.experts);
  if (factor.expert == kNoExpert) {
    path.replace(path.rfind('.') + 1, std::string::npos,
                 FileModuleName(factor.module, shape));
  }
  return PathInFile(path, shape.names);
}

std::string ModulePath(const LoraFactor& factor,
                       const model_config::ExpertShape& experts) {
  if (factor.expert != kNoExpert) {
    return absl::StrCat(ExpertPath(factor.layer, factor.expert, experts), ".",
                        ExpertModuleName(factor.module, experts.names));
  }
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
    case TargetModule::kInProjQkv:
    case TargetModule::kInProjZ:
    case TargetModule::kInProjB:
    case TargetModule::kInProjA:
    case TargetModule::kOutProj:
    case TargetModule::kInProjQkvz:
    case TargetModule::kInProjBa:
      return absl::StrCat("model.layers.", factor.layer, ".linear_attn.", name);
    default:
      return absl::StrCat("model.layers.", factor.layer, ".self_attn.", name);
  }
}

}  // namespace weft::lora
