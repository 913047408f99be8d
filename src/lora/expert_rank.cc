#include "src/lora/expert_rank.h"

#include <algorithm>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::lora {

int SharedRank(int rank, const model_config::ExpertShape& experts) {
  return std::max(1, rank / std::max(1, experts.per_token));
}

namespace {

// Returns an error if the config targets only some of the modules that the
// model has as one: q, k and v, or gate and up.
absl::Status CheckFusedTargets(const LoraConfig& config,
                               const model_config::ModelShape& shape) {
  const auto has = [&](TargetModule module) {
    return std::ranges::find(config.target_modules, module) !=
           config.target_modules.end();
  };
  for (const ProjectionGroup group :
       {ProjectionGroup::kQkv, ProjectionGroup::kGateUp}) {
    const auto modules = ModulesOf(group);
    const bool is_fused =
        NumFused(modules.front(), shape) > 1 ||
        (group == ProjectionGroup::kGateUp && shape.experts.is_fused());
    const auto count = std::ranges::count_if(modules, has);
    if (!is_fused || count == 0 || count == std::ssize(modules)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "config.target_modules has some of ",
        group == ProjectionGroup::kQkv ? "q_proj, k_proj and v_proj"
                                       : "gate_proj and up_proj",
        "; the base model has them in one parameter, so name all or none"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LoraConfig> WithExpertRank(
    LoraConfig config, const model_config::ModelShape& shape) {
  const model_config::ExpertShape& experts = shape.experts;
  WEFT_RETURN_IF_ERROR(CheckFusedTargets(config, shape));
  if (experts.count == 0) {
    if (config.expert_rank == 0) return config;
    return absl::InvalidArgumentError(
        absl::StrCat("config.expert_rank is ", config.expert_rank,
                     ", but the base model has no experts"));
  }
  const int rank = config.expert_rank > 0 ? config.expert_rank
                                          : SharedRank(config.rank, experts);
  const LoraShape shared = {.rank = rank,
                            .alpha = config.alpha * rank / config.rank};
  config.expert_rank = 0;
  if (rank == config.rank) return config;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (!experts.InLayer(layer)) continue;
    for (const TargetModule module :
         {TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj}) {
      if (config.ShapeOf(layer, module).rank == 0) continue;
      config.overrides.push_back(
          {.layer = layer, .module = module, .shape = shared});
    }
  }
  return config;
}

absl::Status CheckRanks(const AdapterLayout& layout,
                        const model_config::ExpertShape& experts,
                        int max_rank) {
  for (const LoraFactor& factor : layout.factors()) {
    const bool is_expert = factor.expert != kNoExpert;
    const int limit = is_expert ? SharedRank(max_rank, experts) : max_rank;
    if (factor.rank <= limit) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", factor.rank, is_expert ? " of experts" : "",
        " is above the limit ", limit,
        is_expert ? " (--max-rank / experts per token)" : " (--max-rank)"));
  }
  return absl::OkStatus();
}

}  // namespace weft::lora
