#include "src/lora/peft_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/strict_json.h"

namespace weft::lora {
namespace {

using Json = nlohmann::json;

constexpr weights::JsonLimits kConfigLimits = {.max_bytes = size_t{1} << 20,
                                               .max_depth = 6};
constexpr absl::string_view kFile = "adapter_config.json";

constexpr std::array<TargetModule, 8> kAllModules = {
    TargetModule::kQProj,    TargetModule::kKProj,    TargetModule::kVProj,
    TargetModule::kOProj,    TargetModule::kGateProj, TargetModule::kUpProj,
    TargetModule::kDownProj, TargetModule::kLmHead};

// Read below, one by one.
constexpr absl::string_view kHonouredFields[] = {
    "peft_type",    "task_type",     "r", "lora_alpha", "use_rslora",
    "lora_dropout", "target_modules"};

// They say where an adapter comes from, not what it computes.
constexpr absl::string_view kBookkeepingFields[] = {
    "auto_mapping",   "base_model_name_or_path",
    "inference_mode", "megatron_core",
    "peft_version",   "qalora_group_size",
    "revision"};

// Initialisations that leave the base model as it is, so that A and B say all.
constexpr absl::string_view kPlainInits[] = {"gaussian", "eva", "orthogonal"};

// The value as the file has it, cut short; never throws on damaged UTF-8.
std::string Shown(const Json& value) {
  constexpr size_t kMaxShown = 80;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true,
                                Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

absl::Status Refused(absl::string_view field, const Json& value,
                     absl::string_view accepted) {
  return absl::InvalidArgumentError(absl::StrCat(
      kFile, ": ", field, " is ", Shown(value), "; accepted: ", accepted));
}

template <typename List>
bool Contains(const List& list, absl::string_view value) {
  return std::ranges::find(list, value) != std::end(list);
}

// Whether a value switches a feature off.
bool IsOff(const Json& value) {
  return value.is_null() || value == false ||
         (value.is_structured() && value.empty());
}

// Refuses every field whose effect we do not reproduce.
absl::Status CheckOtherFields(const Json& root) {
  for (const auto& [field, value] : root.items()) {
    if (Contains(kHonouredFields, field) ||
        Contains(kBookkeepingFields, field) || IsOff(value)) {
      continue;
    }
    if (field == "bias") {
      if (value == "none") continue;
      return Refused(field, value, "\"none\"");
    }
    if (field == "init_lora_weights") {
      const auto* name = value.get_ptr<const std::string*>();
      if (value == true || (name != nullptr && Contains(kPlainInits, *name))) {
        continue;
      }
      return Refused(field, value,
                     "true, false, \"gaussian\", \"eva\", \"orthogonal\"");
    }
    return Refused(Shown(Json(field)), value, "null or absent");
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ReadNumber(const Json& root, const char* field,
                                  double fallback) {
  const auto found = root.find(field);
  if (found == root.end()) return fallback;
  if (!found->is_number()) return Refused(field, *found, "a number");
  return found->get<double>();
}

absl::StatusOr<bool> ReadBool(const Json& root, const char* field) {
  const auto found = root.find(field);
  if (found == root.end() || found->is_null()) return false;
  if (!found->is_boolean()) return Refused(field, *found, "true or false");
  return found->get<bool>();
}

absl::StatusOr<int> ReadRank(const Json& root) {
  const auto found = root.find("r");
  const Json value = found == root.end() ? Json() : *found;
  if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 ||
      value.get<uint64_t>() > kMaxFileRank) {
    return Refused("r", value,
                   absl::StrCat("an integer in [1, ", kMaxFileRank, "]"));
  }
  return value.get<int>();
}

absl::StatusOr<double> ReadAlpha(const Json& root, int rank) {
  const auto found = root.find("lora_alpha");
  const Json value = found == root.end() ? Json() : *found;
  constexpr double kMaxAlpha = 1e6;
  if (!value.is_number() || !(value.get<double>() > 0) ||
      !(value.get<double>() <= kMaxAlpha)) {
    return Refused("lora_alpha", value, "a number in (0, 1e6]");
  }
  WEFT_ASSIGN_OR_RETURN(const bool rank_stabilised,
                        ReadBool(root, "use_rslora"));
  const double alpha = value.get<double>();
  return rank_stabilised ? alpha * std::sqrt(static_cast<double>(rank)) : alpha;
}

absl::Status CheckKind(const Json& root) {
  const auto kind = root.find("peft_type");
  if (kind == root.end() || *kind != "LORA") {
    return Refused("peft_type", kind == root.end() ? Json() : *kind,
                   "\"LORA\"");
  }
  const auto task = root.find("task_type");
  if (task != root.end() && !task->is_null() && *task != "CAUSAL_LM") {
    return Refused("task_type", *task, "\"CAUSAL_LM\" or null");
  }
  WEFT_ASSIGN_OR_RETURN(const double dropout,
                        ReadNumber(root, "lora_dropout", 0));
  if (!(dropout >= 0 && dropout < 1)) {
    return Refused("lora_dropout", root["lora_dropout"], "a number in [0, 1)");
  }
  return absl::OkStatus();
}

// Whether `entry` names the module at `path`: the whole path, or its end at a
// dot, as PEFT matches them.
bool Names(absl::string_view entry, absl::string_view path) {
  if (!absl::EndsWith(path, entry)) return false;
  return path.size() == entry.size() ||
         path[path.size() - entry.size() - 1] == '.';
}

// Which layers of a module the entries of target_modules name.
class Coverage {
 public:
  explicit Coverage(const ModelShape& shape) : num_layers_(shape.num_layers) {
    for (std::vector<bool>& layers : covered_) layers.resize(num_layers_);
    covered_.back().resize(1);  // The head is there once.
  }

  // False when no module has this name.
  bool Add(absl::string_view entry) {
    bool any = false;
    for (size_t module = 0; module < kAllModules.size(); ++module) {
      const char* name = TargetModuleName(kAllModules[module]);
      if (!absl::EndsWith(entry, name)) continue;
      for (size_t layer = 0; layer < covered_[module].size(); ++layer) {
        const LoraFactor factor = {.layer = static_cast<int>(layer),
                                   .module = kAllModules[module]};
        if (!Names(entry, ModulePath(factor))) continue;
        covered_[module][layer] = true;
        any = true;
      }
    }
    return any;
  }

  absl::StatusOr<std::vector<TargetModule>> Modules() const {
    std::vector<TargetModule> modules;
    for (size_t module = 0; module < kAllModules.size(); ++module) {
      const std::vector<bool>& layers = covered_[module];
      const auto missing = std::ranges::find(layers, false);
      if (std::ranges::find(layers, true) == layers.end()) continue;
      if (missing != layers.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            kFile, ": target_modules names ",
            TargetModuleName(kAllModules[module]),
            " of some layers but not of "
            "layer ",
            missing - layers.begin(), "; accepted: every layer or none"));
      }
      modules.push_back(kAllModules[module]);
    }
    return modules;
  }

 private:
  int num_layers_;
  std::array<std::vector<bool>, kAllModules.size()> covered_;
};

absl::StatusOr<std::vector<TargetModule>> ReadTargets(const Json& root,
                                                      const ModelShape& shape) {
  const auto found = root.find("target_modules");
  const Json value = found == root.end() ? Json() : *found;
  // Any other string is a regular expression, which we never run.
  if (value == "all-linear") return DefaultTargetModules();
  const size_t max_entries = kAllModules.size() * (shape.num_layers + 1);
  if (!value.is_array() || value.empty() || value.size() > max_entries) {
    return Refused("target_modules", value,
                   absl::StrCat("\"all-linear\" or a list of 1 to ",
                                max_entries, " module names"));
  }
  Coverage coverage(shape);
  for (const Json& entry : value) {
    const auto* name = entry.get_ptr<const std::string*>();
    if (name == nullptr || !coverage.Add(*name)) {
      return Refused("target_modules entry", entry,
                     "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
                     "down_proj, lm_head or their full paths");
    }
  }
  return coverage.Modules();
}

}  // namespace

absl::StatusOr<LoraConfig> ParsePeftConfig(absl::string_view json,
                                           const ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(const Json root,
                        weights::ParseStrictJson(json, kFile, kConfigLimits));
  WEFT_RETURN_IF_ERROR(CheckKind(root));
  WEFT_RETURN_IF_ERROR(CheckOtherFields(root));
  LoraConfig config;
  WEFT_ASSIGN_OR_RETURN(config.rank, ReadRank(root));
  WEFT_ASSIGN_OR_RETURN(config.alpha, ReadAlpha(root, config.rank));
  WEFT_ASSIGN_OR_RETURN(config.target_modules, ReadTargets(root, shape));
  return config;
}

std::string WritePeftConfig(const LoraConfig& config,
                            const std::string& base_model_name) {
  Json modules = Json::array();
  for (const TargetModule module : config.target_modules) {
    modules.push_back(TargetModuleName(module));
  }
  Json root = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base_model_name},
      {"inference_mode", true},
      {"r", config.rank},
      {"lora_dropout", 0.0},
      {"target_modules", modules},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"init_lora_weights", true},
      {"modules_to_save", nullptr},
      {"rank_pattern", Json::object()},
      {"alpha_pattern", Json::object()},
      {"use_dora", false},
      {"use_rslora", false},
  };
  // PEFT declares an integer; readers take a fraction as well.
  const double whole = std::floor(config.alpha);
  if (whole == config.alpha && std::abs(whole) < 1e15) {
    root["lora_alpha"] = static_cast<int64_t>(whole);
  } else {
    root["lora_alpha"] = config.alpha;
  }
  return root.dump(2, ' ', /*ensure_ascii=*/true,
                   Json::error_handler_t::replace) +
         "\n";
}

}  // namespace weft::lora
