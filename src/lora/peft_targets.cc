#include "src/lora/peft_targets.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/lora/path_expression.h"
#include "src/lora/peft_selection.h"

namespace weft::lora {
namespace {

// The entries of rank_pattern or alpha_pattern, in the order of the file.
template <typename Value>
using Pattern = std::vector<std::pair<PathExpression, Value>>;

template <typename Value>
absl::StatusOr<Pattern<Value>> ReadPattern(
    const PeftJson& root, const char* field, size_t max_keys,
    absl::StatusOr<Value> (*read)(absl::string_view, const PeftJson&),
    int& instructions_left) {
  const PeftJson& object = FieldOf(root, field);
  Pattern<Value> pattern;
  if (object.is_null()) return pattern;
  if (!object.is_object() || object.size() > max_keys) {
    return Refused(field, object,
                   absl::StrCat("an object of at most ", max_keys, " keys"));
  }
  for (const auto& [key, value] : object.items()) {
    WEFT_ASSIGN_OR_RETURN(
        PathExpression expression,
        PathExpression::Parse(absl::StrCat(field, " key"), key, PathMatch::kEnd,
                              instructions_left));
    WEFT_ASSIGN_OR_RETURN(
        const Value number,
        read(absl::StrCat(field, "[", Shown(PeftJson(key)), "]"), value));
    pattern.emplace_back(std::move(expression), number);
  }
  return pattern;
}

template <typename Value>
Value Lookup(const Pattern<Value>& pattern, absl::string_view path,
             Value fallback) {
  const auto found = std::ranges::find_if(
      pattern, [&](const auto& entry) { return entry.first.Matches(path); });
  return found == pattern.end() ? fallback : found->second;
}

LoraShape Stabilised(LoraShape shape, bool rank_stabilised) {
  if (rank_stabilised) shape.alpha *= std::sqrt(shape.rank);
  return shape;
}

bool Contains(const std::vector<TargetModule>& modules, TargetModule module) {
  return std::ranges::find(modules, module) != modules.end();
}

// Returns the LoRA shape of every site, with rank 0 where there is no LoRA.
absl::StatusOr<std::vector<LoraShape>> ShapesOf(
    const std::vector<LoraFactor>& sites, const PeftJson& root,
    const ModelShape& shape, bool rank_stabilised, const LoraConfig& config) {
  int instructions_left = kMaxInstructions;
  WEFT_ASSIGN_OR_RETURN(const std::vector<bool> fused,
                        SelectFused(root, shape, sites));
  const bool any_fused = std::ranges::find(fused, true) != fused.end();
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<bool> selected,
      SelectSites(root, shape, sites, any_fused, instructions_left));
  WEFT_ASSIGN_OR_RETURN(const Pattern<int> ranks,
                        ReadPattern(root, "rank_pattern", MaxEntries(shape),
                                    &ReadRank, instructions_left));
  WEFT_ASSIGN_OR_RETURN(const Pattern<double> alphas,
                        ReadPattern(root, "alpha_pattern", MaxEntries(shape),
                                    &ReadAlpha, instructions_left));
  std::vector<LoraShape> loras(sites.size());
  for (size_t i = 0; i < sites.size(); ++i) {
    if (!selected[i] && !fused[i]) continue;
    const std::string path =
        fused[i] ? FusedPath(sites[i], shape) : FilePath(sites[i], shape);
    loras[i] = Stabilised({.rank = Lookup(ranks, path, config.rank),
                           .alpha = Lookup(alphas, path, config.alpha)},
                          rank_stabilised);
  }
  return loras;
}

// Returns an error if experts of the same layer have different ranks or alphas
// for a module. LoraConfig has only one LoraShape for each module of a layer.
absl::Status CheckExpertsAgree(const std::vector<LoraFactor>& sites,
                               const std::vector<LoraShape>& loras,
                               const ModelShape& shape) {
  size_t first_expert = 0;
  for (size_t i = 0; i < sites.size(); ++i) {
    if (sites[i].expert <= 0) {
      if (sites[i].module == TargetModule::kGateProj) first_expert = i;
      continue;
    }
    size_t first = first_expert;
    while (sites[first].module != sites[i].module) ++first;
    if (loras[i] == loras[first]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        FilePath(sites[i], shape), " has rank ", loras[i].rank, " and alpha ",
        loras[i].alpha, ", and ", FilePath(sites[first], shape), " has rank ",
        loras[first].rank, " and alpha ", loras[first].alpha,
        "; all experts of a layer must have the same"));
  }
  return absl::OkStatus();
}

}  // namespace

LoraShape FileShape(const LoraConfig& config, const ModelShape& shape) {
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (!shape.experts.InLayer(layer)) continue;
    for (const TargetModule module :
         {TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj}) {
      const LoraShape lora = config.ShapeOf(layer, module);
      if (lora.rank > 0) return lora;
    }
  }
  return {.rank = config.rank, .alpha = config.alpha};
}

absl::Status ReadTargets(const PeftJson& root, const ModelShape& shape,
                         bool rank_stabilised, LoraConfig& config) {
  const std::vector<LoraFactor> sites = EverySite(shape);
  WEFT_ASSIGN_OR_RETURN(const std::vector<LoraShape> loras,
                        ShapesOf(sites, root, shape, rank_stabilised, config));
  WEFT_RETURN_IF_ERROR(CheckExpertsAgree(sites, loras, shape));
  const LoraShape usual =
      Stabilised({.rank = config.rank, .alpha = config.alpha}, rank_stabilised);
  config.target_modules.clear();
  std::vector<LoraOverride> unusual;
  for (size_t i = 0; i < sites.size(); ++i) {
    const TargetModule module = sites[i].module;
    if (loras[i].rank > 0 && !Contains(config.target_modules, module)) {
      config.target_modules.push_back(module);
    }
    // All experts of a layer have the same shape, so the first one suffices.
    if (loras[i] == usual || sites[i].expert > 0) continue;
    unusual.push_back(
        {.layer = sites[i].layer, .module = module, .shape = loras[i]});
  }
  std::ranges::sort(config.target_modules);
  std::erase_if(unusual, [&](const LoraOverride& other) {
    return !Contains(config.target_modules, other.module);
  });
  config.overrides = std::move(unusual);
  config.alpha = usual.alpha;
  return absl::OkStatus();
}

nlohmann::json AlphaToJson(double alpha) {
  const double whole = std::floor(alpha);
  if (whole == alpha && std::abs(whole) < 1e15) {
    return static_cast<int64_t>(whole);
  }
  return alpha;
}

namespace {

// Writes target_parameters and the patterns for them. gate_up_proj gets the
// rank of gate plus that of up, which are equal (ExpertForm::kHalves).
void WriteFusedTargets(const LoraConfig& config, const ModelShape& shape,
                       nlohmann::json& root) {
  nlohmann::json& targets = root["target_parameters"] = nlohmann::json::array();
  const LoraShape usual = FileShape(config, shape);
  for (const LoraFactor& site : EverySite(shape)) {
    if (site.expert != 0 || site.module == TargetModule::kUpProj) continue;
    LoraShape lora = config.ShapeOf(site.layer, site.module);
    if (lora.rank == 0) continue;
    if (site.module == TargetModule::kGateProj) {
      lora = {.rank = 2 * lora.rank, .alpha = 2 * lora.alpha};
    }
    const std::string path = FusedPath(site, shape);
    targets.push_back(path);
    if (lora.rank != usual.rank) root["rank_pattern"][path] = lora.rank;
    if (lora.alpha != usual.alpha) {
      root["alpha_pattern"][path] = AlphaToJson(lora.alpha);
    }
  }
}

}  // namespace

void WriteTargets(const LoraConfig& config, const ModelShape& shape,
                  nlohmann::json& root) {
  nlohmann::json& targets = root["target_modules"] = nlohmann::json::array();
  if (shape.names == DecoderNames::kWrapped) {
    // The image parts have modules of the same names.
    root["exclude_modules"] = ".*\\b(vision_tower|multi_modal_projector)\\b.*";
  }
  nlohmann::json& ranks = root["rank_pattern"] = nlohmann::json::object();
  nlohmann::json& alphas = root["alpha_pattern"] = nlohmann::json::object();
  const LoraShape usual = FileShape(config, shape);
  const bool is_fused = shape.experts.names == ExpertNames::kFused;
  if (is_fused) WriteFusedTargets(config, shape, root);
  // Names a module only once if the adapter has it in every layer.
  for (const TargetModule module : config.target_modules) {
    const bool everywhere =
        std::ranges::none_of(config.overrides, [&](const LoraOverride& other) {
          return other.module == module && other.shape.rank == 0;
        });
    if (is_fused && IsOfMlp(module)) continue;
    if (everywhere) targets.push_back(NameOf(module, shape));
    for (const LoraFactor& site : EverySite(shape)) {
      const LoraShape lora = config.ShapeOf(site.layer, module);
      if (site.module != module || lora.rank == 0) continue;
      const std::string path = FilePath(site, shape);
      if (!everywhere) targets.push_back(path);
      if (lora.rank != usual.rank) ranks[path] = lora.rank;
      if (lora.alpha != usual.alpha) alphas[path] = AlphaToJson(lora.alpha);
    }
  }
}

}  // namespace weft::lora
