#include "src/lora/peft_selection.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/lora/path_expression.h"

namespace weft::lora {
namespace {

// Returns whether `entry` is the path, or the end of the path after a dot.
bool IsSuffix(absl::string_view entry, absl::string_view path) {
  return path == entry || absl::EndsWith(path, absl::StrCat(".", entry));
}

// The value of target_modules or exclude_modules. It is a list of names or one
// expression. A name selects a path that IsSuffix accepts. An expression must
// match the whole path.
struct ModuleNames {
  std::vector<std::string> names;
  std::optional<PathExpression> expression;

  [[nodiscard]] bool Match(absl::string_view path) const {
    return (expression.has_value() && expression->Matches(path)) ||
           std::ranges::any_of(names, [&](const std::string& name) {
             return IsSuffix(name, path);
           });
  }
};

absl::StatusOr<ModuleNames> ReadNames(const char* field, const PeftJson& value,
                                      const ModelShape& shape,
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
                                  const ModelShape& shape) {
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
                            const ModelShape& shape) {
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
                                     const ModelShape& shape) {
  if (!targets.expression.has_value()) return absl::OkStatus();
  std::vector<std::string> others = {"model", "model.layers", "model.norm",
                                     "model.rotary_emb"};
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (const char* module : {"", ".self_attn", ".mlp", ".mlp.act_fn",
                               ".post_attention_layernorm"}) {
      others.push_back(absl::StrCat("model.layers.", layer, module));
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

absl::StatusOr<ModuleNames> ReadTargetNames(const PeftJson& root,
                                            const ModelShape& shape,
                                            int& instructions_left) {
  const PeftJson& value = FieldOf(root, "target_modules");
  const auto* text = value.get_ptr<const std::string*>();
  if (text == nullptr || absl::AsciiStrToLower(*text) != "all-linear") {
    return ReadNames("target_modules", value, shape, instructions_left);
  }
  ModuleNames every;
  const bool is_fused = shape.experts.names == ExpertNames::kFused;
  for (const TargetModule module : DefaultTargetModules()) {
    // Fused experts are parameters, not linear layers.
    if (is_fused && IsOfMlp(module)) continue;
    every.names.emplace_back(NameOf(module, shape));
  }
  return every;
}

}  // namespace

std::vector<LoraFactor> EverySite(const ModelShape& shape) {
  return AdapterLayout(shape, {.rank = 1,
                               .target_modules = {kAllTargetModules.begin(),
                                                  kAllTargetModules.end()}})
      .factors();
}

const char* NameOf(TargetModule module, const ModelShape& shape) {
  const ExpertShape& experts = shape.experts;
  return experts.count > 0 && IsOfMlp(module)
             ? ExpertModuleName(module, experts.names)
             : TargetModuleName(module);
}

bool IsOfMlp(TargetModule module) {
  return module == TargetModule::kGateProj || module == TargetModule::kUpProj ||
         module == TargetModule::kDownProj;
}

size_t MaxEntries(const ModelShape& shape) {
  return kAllTargetModules.size() * (shape.num_layers + 1);
}

std::string FusedPath(const LoraFactor& site, const ModelShape& shape) {
  return PathInFile(
      absl::StrCat("model.layers.", site.layer, ".mlp.experts.",
                   site.module == TargetModule::kDownProj ? "down_proj"
                                                          : "gate_up_proj"),
      shape.names);
}

std::string FilePath(const LoraFactor& site, const ModelShape& shape) {
  return PathInFile(ModulePath(site, shape.experts), shape.names);
}

absl::StatusOr<std::vector<bool>> SelectFused(
    const PeftJson& root, const ModelShape& shape,
    const std::vector<LoraFactor>& sites) {
  std::vector<bool> selected(sites.size());
  const PeftJson& value = FieldOf(root, "target_parameters");
  if (value.is_null()) return selected;
  if (!value.is_array() || value.size() > MaxEntries(shape)) {
    return Refused("target_parameters", value,
                   absl::StrCat("null, or a list of at most ",
                                MaxEntries(shape), " names"));
  }
  for (const PeftJson& entry : value) {
    const auto* name = entry.get_ptr<const std::string*>();
    bool is_there = false;
    for (size_t i = 0; name != nullptr && i < sites.size(); ++i) {
      const int expert = sites[i].expert;
      if (expert == kNoExpert || expert == shape.experts.count) continue;
      if (!IsSuffix(*name, FusedPath(sites[i], shape))) continue;
      is_there = selected[i] = true;
    }
    if (is_there) continue;
    return Refused("target_parameters entry", entry,
                   "mlp.experts.gate_up_proj and mlp.experts.down_proj of a "
                   "model with experts, or their full paths");
  }
  return selected;
}

absl::StatusOr<std::vector<bool>> SelectSites(
    const PeftJson& root, const ModelShape& shape,
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
  return Refused(
      "target_modules", field,
      "what names a module to adapt: q_proj, k_proj, v_proj, o_proj, "
      "gate_proj, up_proj, down_proj, lm_head, embed_tokens or their "
      "full paths");
}

}  // namespace weft::lora
