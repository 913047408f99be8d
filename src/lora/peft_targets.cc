#include "src/lora/peft_targets.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/status_macros.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/path_expression.h"
#include "src/lora/peft_config.h"
#include "src/lora/peft_matrices.h"
#include "src/request/adapter.h"
#include "src/weights/strict_json.h"

namespace weft::lora {
namespace {

// Selects modules by the target_modules, target_parameters, exclude_modules and
// layer fields of an adapter_config.json. Here a site is a module that LoRA can
// adapt.

// Returns whether `entry` is the path, or the end of the path after a dot.
bool IsSuffix(absl::string_view entry, absl::string_view path) {
  return path == entry || absl::EndsWith(path, absl::StrCat(".", entry));
}

// Returns whether the module is gate, up or down.
bool IsOfMlp(TargetModule module) {
  return module == TargetModule::kGateProj || module == TargetModule::kUpProj ||
         module == TargetModule::kDownProj;
}

// Returns the maximum number of entries in a list or pattern of a file.
size_t MaxEntries(const model_config::ModelShape& shape) {
  // The head and the embedding may have LoRA, too.
  return (ProjectionsOf(shape).size() + 2) * (shape.num_layers + 1);
}

// Returns the entry of target_modules that selects this module in every layer.
const char* NameOf(TargetModule module, const model_config::ModelShape& shape) {
  const model_config::ExpertShape& experts = shape.experts;
  return experts.count > 0 && IsOfMlp(module)
             ? ExpertModuleName(module, experts.names)
             : FileModuleName(module, shape);
}

// The value of target_modules or exclude_modules. It is a list of names or one
// expression. A name selects a path that IsSuffix accepts. An expression must
// match the whole path.
struct ModuleNames {
  std::vector<std::string> names;
  std::optional<PathExpression> expression;

  bool Match(absl::string_view path) const {
    return (expression.has_value() && expression->Matches(path)) ||
           std::ranges::any_of(names, [&](const std::string& name) {
             return IsSuffix(name, path);
           });
  }
};

absl::StatusOr<ModuleNames> ReadNames(const char* field, const PeftJson& value,
                                      const model_config::ModelShape& shape,
                                      int& instructions_left) {
  ModuleNames result;
  if (const auto* text = value.get_ptr<const std::string*>()) {
    WEFT_ASSIGN_OR_RETURN(result.expression,
                          PathExpression::Parse(field, *text, PathMatch::kWhole,
                                                instructions_left));
    return result;
  }
  if (!value.is_array() || value.size() > MaxEntries(shape)) {
    return Refused(
        field, value,
        absl::StrCat("a list of at most ", MaxEntries(shape), " module names"));
  }
  for (const PeftJson& entry : value) {
    const auto* name = entry.get_ptr<const std::string*>();
    if (name == nullptr) return Refused(field, value, "a list of strings");
    result.names.push_back(*name);
  }
  return result;
}

// Says for each layer whether layers_to_transform keeps it. nullopt if the
// field is absent or empty.
using Layers = std::optional<std::vector<bool>>;

absl::Status AddLayer(const PeftJson& index, std::vector<bool>& layers) {
  if (!index.is_number_unsigned() || index.get<uint64_t>() >= layers.size()) {
    return Refused("layers_to_transform", index,
                   absl::StrCat("layers in [0, ", layers.size(), ")"));
  }
  layers[index.get<uint64_t>()] = true;
  return absl::OkStatus();
}

absl::StatusOr<Layers> ReadLayers(const PeftJson& root,
                                  const model_config::ModelShape& shape) {
  const PeftJson& pattern = FieldOf(root, "layers_pattern");
  const PeftJson& value = FieldOf(root, "layers_to_transform");
  const bool used = !value.is_null() && !(value.is_array() && value.empty());
  const bool any_pattern =
      pattern.is_null() || pattern == "" || pattern == PeftJson::array();
  if (!any_pattern && (!used || (pattern != "layers" &&
                                 pattern != PeftJson::array({"layers"})))) {
    return Refused("layers_pattern", pattern,
                   "null, or \"layers\" beside layers_to_transform");
  }
  if (!used) return Layers();
  std::vector<bool> layers(shape.num_layers);
  if (!value.is_array()) {
    WEFT_RETURN_IF_ERROR(AddLayer(value, layers));
    return Layers(std::move(layers));
  }
  for (const PeftJson& index : value) {
    WEFT_RETURN_IF_ERROR(AddLayer(index, layers));
  }
  return Layers(std::move(layers));
}

// Returns whether layers_to_transform keeps the module. Without this field,
// every module is kept. As in PEFT, a module that is in no layer, such as
// lm_head, is kept only if `names` has its whole path. Returns an error if
// `names` has the whole path of a module in a layer: PEFT shortens the paths in
// long lists before it compares them, so the meaning of the path would depend
// on the length of the list.
absl::StatusOr<bool> IsKept(const Layers& layers, const LoraFactor& site,
                            const std::string& path, const ModuleNames& names,
                            const model_config::ModelShape& shape) {
  if (!layers.has_value()) return true;
  const bool is_whole =
      std::ranges::find(names.names, path) != names.names.end();
  if (site.layer == shape.num_layers) return is_whole;
  if (is_whole) {
    return Refused("target_modules entry", path,
                   "names that are not whole paths, beside "
                   "layers_to_transform");
  }
  return (*layers)[site.layer];
}

// Refuses an expression that also matches a module that LoRA cannot adapt, such
// as a norm or a whole layer. PEFT refuses it, too.
absl::Status CheckMatchesLayersAlone(const ModuleNames& targets,
                                     const ModuleNames& excluded,
                                     const PeftJson& field,
                                     const model_config::ModelShape& shape) {
  if (!targets.expression.has_value()) return absl::OkStatus();
  std::vector<std::string> others = {"model", "model.layers", "model.norm",
                                     "model.rotary_emb"};
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    const char* attention =
        shape.delta.InLayer(layer) ? ".linear_attn" : ".self_attn";
    for (const char* module :
         {"", attention, ".mlp", ".mlp.act_fn", ".post_attention_layernorm"}) {
      others.push_back(absl::StrCat("model.layers.", layer, module));
    }
    if (shape.delta.InLayer(layer)) {
      for (const char* module : {".conv1d", ".norm"}) {
        others.push_back(
            absl::StrCat("model.layers.", layer, attention, module));
      }
    }
    if (!shape.experts.InLayer(layer)) continue;
    const std::string expert = ExpertPath(layer, 0, shape.experts);
    const std::string list = expert.substr(0, expert.rfind('.'));
    const std::string block = list.substr(0, list.rfind('.'));
    others.insert(others.end(), {expert, list, absl::StrCat(block, ".gate")});
  }
  for (const std::string& other : others) {
    const std::string path = PathInFile(other, shape.names);
    if (!targets.Match(path) || excluded.Match(path)) continue;
    return Refused("target_modules", field,
                   absl::StrCat("linear layers, head and embedding; ", path,
                                ", which matches too, is not one of them"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModuleNames> ReadTargetNames(
    const PeftJson& root, const model_config::ModelShape& shape,
    int& instructions_left) {
  const PeftJson& value = FieldOf(root, "target_modules");
  const auto* text = value.get_ptr<const std::string*>();
  if (text == nullptr || absl::AsciiStrToLower(*text) != "all-linear") {
    return ReadNames("target_modules", value, shape, instructions_left);
  }
  ModuleNames every;
  const bool is_fused = shape.experts.is_fused();
  for (const TargetModule module : ProjectionsOf(shape)) {
    // Fused experts are parameters, not linear layers.
    if (is_fused && IsOfMlp(module)) continue;
    every.names.emplace_back(NameOf(module, shape));
  }
  return every;
}

// Returns every site of the model, in the order of AdapterLayout.
std::vector<LoraFactor> EverySite(const model_config::ModelShape& shape) {
  return AdapterLayout(shape, {.rank = 1,
                               .target_modules = {kAllTargetModules.begin(),
                                                  kAllTargetModules.end()}})
      .factors();
}

// Returns the path of the fused parameter that contains the site, such as
// "model.layers.0.mlp.experts.gate_up_proj".
std::string FusedPath(const LoraFactor& site,
                      const model_config::ModelShape& shape) {
  return PathInFile(
      absl::StrCat("model.layers.", site.layer, ".mlp.experts.",
                   site.module == TargetModule::kDownProj ? "down_proj"
                                                          : "gate_up_proj"),
      shape.names);
}

// Returns the path of the parameter that contains the site's weight: that of
// all experts of a layer, or the weight of a linear layer.
std::string ParameterPath(const LoraFactor& site,
                          const model_config::ModelShape& shape) {
  return IsExpert(site, shape.experts)
             ? FusedPath(site, shape)
             : absl::StrCat(FilePath(site, shape), ".weight");
}

// Returns, for every site, whether target_parameters selects it
// (ParameterPath). Errors: those of SelectSites.
absl::StatusOr<std::vector<bool>> SelectParameters(
    const PeftJson& root, const model_config::ModelShape& shape,
    const std::vector<LoraFactor>& sites) {
  std::vector<bool> selected(sites.size());
  const PeftJson& value = FieldOf(root, "target_parameters");
  if (value.is_null()) return selected;
  if (!value.is_array() || value.size() > MaxEntries(shape)) {
    return Refused("target_parameters", value,
                   absl::StrCat("null, or a list of at most ",
                                MaxEntries(shape), " names"));
  }
  // The sites of each parameter. Those of all experts of a layer are together.
  std::map<std::string, std::vector<size_t>> parameters;
  for (size_t i = 0; i < sites.size(); ++i) {
    if (sites[i].module == TargetModule::kEmbedTokens) continue;
    parameters[ParameterPath(sites[i], shape)].push_back(i);
  }
  for (const PeftJson& entry : value) {
    const auto* name = entry.get_ptr<const std::string*>();
    bool is_there = false;
    for (const auto& [path, places] : parameters) {
      if (name == nullptr || !IsSuffix(*name, path)) continue;
      is_there = true;
      for (const size_t i : places) selected[i] = true;
    }
    if (is_there) continue;
    return Refused("target_parameters entry", entry,
                   "mlp.experts.gate_up_proj and mlp.experts.down_proj of a "
                   "model with experts, weights of linear layers such as "
                   "up_proj.weight, or their full paths");
  }
  return selected;
}

// Returns, for every site, whether the file selects it as a module. If the file
// selects none, returns an error unless `may_be_none`. The cost of regular
// expressions is subtracted from `instructions_left` (path_expression.h).
// Errors: INVALID_ARGUMENT, which names the field, its value and what is
// accepted.
absl::StatusOr<std::vector<bool>> SelectSites(
    const PeftJson& root, const model_config::ModelShape& shape,
    const std::vector<LoraFactor>& sites, bool may_be_none,
    int& instructions_left) {
  const PeftJson& field = FieldOf(root, "target_modules");
  if (may_be_none && field.is_null()) return std::vector<bool>(sites.size());
  WEFT_ASSIGN_OR_RETURN(const ModuleNames targets,
                        ReadTargetNames(root, shape, instructions_left));
  WEFT_ASSIGN_OR_RETURN(const Layers layers, ReadLayers(root, shape));
  if (layers.has_value() && !field.is_array()) {
    return Refused("layers_to_transform", FieldOf(root, "layers_to_transform"),
                   "null beside target_modules that are not a list");
  }
  ModuleNames excluded;
  if (const PeftJson& value = FieldOf(root, "exclude_modules");
      !value.is_null() && value != "") {
    WEFT_ASSIGN_OR_RETURN(excluded, ReadNames("exclude_modules", value, shape,
                                              instructions_left));
  }
  WEFT_RETURN_IF_ERROR(
      CheckMatchesLayersAlone(targets, excluded, field, shape));
  std::vector<bool> selected(sites.size());
  for (size_t i = 0; i < sites.size(); ++i) {
    const std::string path = FilePath(sites[i], shape);
    if (excluded.Match(path) || !targets.Match(path)) continue;
    WEFT_ASSIGN_OR_RETURN(selected[i],
                          IsKept(layers, sites[i], path, targets, shape));
  }
  if (may_be_none || std::ranges::find(selected, true) != selected.end()) {
    return selected;
  }
  std::vector<absl::string_view> modules;  // Several may be one in files.
  for (const TargetModule module : ProjectionsOf(shape)) {
    const absl::string_view name = NameOf(module, shape);
    if (std::ranges::find(modules, name) == modules.end()) {
      modules.push_back(name);
    }
  }
  return Refused("target_modules", field,
                 absl::StrCat("what names a module to adapt: ",
                              absl::StrJoin(modules, ", "),
                              ", lm_head, embed_tokens or their full paths"));
}

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
        read(absl::StrCat(field, "[", weights::ShownJson(PeftJson(key)), "]"),
             value));
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
    const model_config::ModelShape& shape, bool rank_stabilised,
    const LoraConfig& config) {
  int instructions_left = kMaxInstructions;
  WEFT_ASSIGN_OR_RETURN(const std::vector<bool> parameters,
                        SelectParameters(root, shape, sites));
  const bool any_parameter =
      std::ranges::find(parameters, true) != parameters.end();
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<bool> selected,
      SelectSites(root, shape, sites, any_parameter, instructions_left));
  WEFT_ASSIGN_OR_RETURN(const Pattern<int> ranks,
                        ReadPattern(root, "rank_pattern", MaxEntries(shape),
                                    &ReadRank, instructions_left));
  WEFT_ASSIGN_OR_RETURN(const Pattern<double> alphas,
                        ReadPattern(root, "alpha_pattern", MaxEntries(shape),
                                    &ReadAlpha, instructions_left));
  std::vector<LoraShape> loras(sites.size());
  for (size_t i = 0; i < sites.size(); ++i) {
    if (!selected[i] && !parameters[i]) continue;
    const std::string path = parameters[i] ? ParameterPath(sites[i], shape)
                                           : FilePath(sites[i], shape);
    loras[i] = Stabilised({.rank = Lookup(ranks, path, config.rank),
                           .alpha = Lookup(alphas, path, config.alpha)},
                          rank_stabilised);
  }
  return loras;
}

// Returns an error if experts of the same layer have different ranks or alphas
// for a module. LoraConfig has only one LoraShape for each module of a layer.
// The shared expert may have half the rank of gate and up of all others, which
// is what each of these has with FusedForm::kParts.
absl::Status CheckExpertsAgree(const std::vector<LoraFactor>& sites,
                               const std::vector<LoraShape>& loras,
                               const model_config::ModelShape& shape) {
  size_t first_expert = 0;
  for (size_t i = 0; i < sites.size(); ++i) {
    if (sites[i].expert <= 0) {
      if (sites[i].module == TargetModule::kGateProj) first_expert = i;
      continue;
    }
    size_t first = first_expert;
    while (sites[first].module != sites[i].module) ++first;
    const LoraShape twice{.rank = 2 * loras[i].rank,
                          .alpha = 2 * loras[i].alpha};
    const bool may_be_half = sites[i].expert == shape.experts.count &&
                             sites[i].module != TargetModule::kDownProj;
    if (loras[i] == loras[first] || (may_be_half && twice == loras[first])) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        FilePath(sites[i], shape), " has rank ", loras[i].rank, " and alpha ",
        loras[i].alpha, ", and ", FilePath(sites[first], shape), " has rank ",
        loras[first].rank, " and alpha ", loras[first].alpha,
        "; all experts of a layer must have the same"));
  }
  return absl::OkStatus();
}

// Writes the fields of adapter_config.json that name what has LoRA.
class TargetWriter {
 public:
  TargetWriter(const LoraShape& usual, const FileRules& rules,
               nlohmann::json& root)
      : usual_(usual), one_rank_(rules.one_rank), root_(root) {
    using nlohmann::json;
    root_["target_modules"] = json::array();
    root_["rank_pattern"] = root_["alpha_pattern"] = json::object();
  }

  void Add(const char* field, const std::string& name) {
    root_[field].push_back(name);
  }
  // Adds the patterns of a path that has not the usual rank and alpha.
  void AddShape(const std::string& path, const LoraShape& lora) {
    if (one_rank_) return;
    if (lora.rank != usual_.rank) root_["rank_pattern"][path] = lora.rank;
    if (lora.alpha != usual_.alpha) {
      root_["alpha_pattern"][path] = AlphaToJson(lora.alpha);
    }
  }

 private:
  const LoraShape usual_;
  const bool one_rank_;
  nlohmann::json& root_;
};

// Adds the sites that are parameters. gate_up_proj of experts has the rank of
// gate plus that of up, which are equal (FusedForm::kParts).
void AddParameters(const LoraConfig& config,
                   const model_config::ModelShape& shape,
                   const FileRules& rules, TargetWriter& writer) {
  for (const LoraFactor& site : EverySite(shape)) {
    LoraShape lora = config.ShapeOf(site.layer, site.module);
    if (lora.rank == 0 || !IsOfMlp(site.module)) continue;
    const bool is_expert = IsExpert(site, shape.experts);
    if (is_expert ? site.expert > 0 || site.module == TargetModule::kUpProj
                  : !rules.mlp_parameters) {
      continue;
    }
    if (is_expert && site.module == TargetModule::kGateProj) {
      lora = {.rank = 2 * lora.rank, .alpha = 2 * lora.alpha};
    }
    const std::string path = ParameterPath(site, shape);
    writer.Add("target_parameters", path);
    writer.AddShape(path, lora);
  }
}

// Adds a module to target_modules, by its name if the adapter has it in every
// layer.
void AddModule(TargetModule module, const LoraConfig& config,
               const model_config::ModelShape& shape, bool skips_experts,
               TargetWriter& writer) {
  // The first module of several that are one stands for all of them.
  const int parts = NumFused(module, shape);
  if (parts > 1 && module != ModulesOf(GroupOf(module)).front()) return;
  const bool everywhere =
      !skips_experts &&
      std::ranges::none_of(config.overrides, [&](const LoraOverride& other) {
        return other.module == module && other.shape.rank == 0;
      });
  if (everywhere) writer.Add("target_modules", NameOf(module, shape));
  for (const LoraFactor& site : EverySite(shape)) {
    const LoraShape lora = config.ShapeOf(site.layer, module);
    if (site.module != module || lora.rank == 0) continue;
    if (skips_experts && IsExpert(site, shape.experts)) continue;
    const std::string path = FilePath(site, shape);
    if (!everywhere) writer.Add("target_modules", path);
    writer.AddShape(path,
                    {.rank = parts * lora.rank, .alpha = parts * lora.alpha});
  }
}

}  // namespace

LoraShape FileShape(const LoraConfig& config,
                    const model_config::ModelShape& shape,
                    const FileRules& rules) {
  const LoraShape usual{.rank = config.rank, .alpha = config.alpha};
  if (rules.form != FusedForm::kSingle || rules.one_rank) return usual;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (!shape.experts.InLayer(layer)) continue;
    for (const TargetModule module :
         {TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj}) {
      const LoraShape lora = config.ShapeOf(layer, module);
      if (lora.rank > 0) return lora;
    }
  }
  return usual;
}

absl::Status ReadTargets(const PeftJson& root,
                         const model_config::ModelShape& shape,
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

void WriteTargets(const LoraConfig& config,
                  const model_config::ModelShape& shape, const FileRules& rules,
                  nlohmann::json& root) {
  TargetWriter writer(FileShape(config, shape, rules), rules, root);
  if (shape.names == model_config::DecoderNames::kWrapped) {
    // The image parts have modules of the same names.
    root["exclude_modules"] =
        ".*\\b(vision_tower|multi_modal_projector|visual)\\b.*";
  }
  const bool fuses_experts =
      shape.experts.count > 0 && rules.form == FusedForm::kParts;
  if (fuses_experts) AddParameters(config, shape, rules, writer);
  for (const TargetModule module : config.target_modules) {
    if (rules.mlp_parameters && IsOfMlp(module)) continue;
    AddModule(module, config, shape, fuses_experts && IsOfMlp(module), writer);
  }
}

}  // namespace weft::lora
