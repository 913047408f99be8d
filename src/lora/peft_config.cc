#include "src/lora/peft_config.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/lora/peft_targets.h"
#include "src/weights/strict_json.h"

namespace weft::lora {
namespace {

// These limits suffice for a file whose rank_pattern and alpha_pattern have a
// key for each module of a large model.
constexpr weights::JsonLimits kConfigLimits = {
    .max_bytes = size_t{1} << 20, .max_depth = 6, .max_keys = 4096};

// Fields that ParsePeftConfig reads.
constexpr absl::string_view kHonouredFields[] = {
    "peft_type",        "task_type",           "r",
    "lora_alpha",       "use_rslora",          "lora_dropout",
    "target_modules",   "exclude_modules",     "rank_pattern",
    "alpha_pattern",    "layers_to_transform", "layers_pattern",
    "target_parameters"};

// Fields that do not change what the adapter computes.
constexpr absl::string_view kBookkeepingFields[] = {
    "auto_mapping",      "base_model_name_or_path",
    "eva_config",        "inference_mode",
    "megatron_core",     "peft_version",
    "qalora_group_size", "revision"};

// Initialisations that do not change the base model.
constexpr absl::string_view kPlainInits[] = {"gaussian", "eva", "orthogonal"};

template <typename List>
bool Contains(const List& list, absl::string_view value) {
  return std::ranges::find(list, value) != std::end(list);
}

// Refuses a field outside the two lists above if its value may change what the
// adapter computes.
absl::Status CheckOtherFields(const PeftJson& root) {
  for (const auto& [field, value] : root.items()) {
    if (Contains(kHonouredFields, field) ||
        Contains(kBookkeepingFields, field) || weights::IsOff(value)) {
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
    return Refused(weights::ShownJson(PeftJson(field)), value,
                   "null or absent");
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ReadBool(const PeftJson& root, const char* field) {
  const auto found = root.find(field);
  if (found == root.end() || found->is_null()) return false;
  if (!found->is_boolean()) return Refused(field, *found, "true or false");
  return found->get<bool>();
}

absl::Status CheckKind(const PeftJson& root) {
  if (const PeftJson& kind = FieldOf(root, "peft_type"); kind != "LORA") {
    return Refused("peft_type", kind, "\"LORA\"");
  }
  const PeftJson& task = FieldOf(root, "task_type");
  if (!task.is_null() && task != "CAUSAL_LM") {
    return Refused("task_type", task, "\"CAUSAL_LM\" or null");
  }
  const auto dropout = root.find("lora_dropout");
  if (dropout != root.end() &&
      !(dropout->is_number() && *dropout >= 0 && *dropout < 1)) {
    return Refused("lora_dropout", *dropout, "a number in [0, 1)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Refused(absl::string_view field, const PeftJson& value,
                     absl::string_view accepted) {
  return absl::InvalidArgumentError(
      absl::StrCat(kPeftConfigFile, ": ", field, " is ",
                   weights::ShownJson(value), "; accepted: ", accepted));
}

const PeftJson& FieldOf(const PeftJson& root, const char* field) {
  static const PeftJson& null = *new PeftJson();
  const auto found = root.find(field);
  return found == root.end() ? null : *found;
}

absl::StatusOr<int> ReadRank(absl::string_view field, const PeftJson& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 ||
      value.get<uint64_t>() > kMaxFileRank) {
    return Refused(field, value,
                   absl::StrCat("an integer in [1, ", kMaxFileRank, "]"));
  }
  return value.get<int>();
}

absl::StatusOr<double> ReadAlpha(absl::string_view field,
                                 const PeftJson& value) {
  constexpr double kMaxAlpha = 1e6;
  if (!value.is_number() || !(value.get<double>() > 0) ||
      !(value.get<double>() <= kMaxAlpha)) {
    return Refused(field, value, "a number in (0, 1e6]");
  }
  return value.get<double>();
}

absl::StatusOr<LoraConfig> ParsePeftConfig(
    absl::string_view json, const model_config::ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(
      const PeftJson root,
      weights::ParseStrictJson<PeftJson>(json, kPeftConfigFile, kConfigLimits));
  WEFT_RETURN_IF_ERROR(CheckKind(root));
  WEFT_RETURN_IF_ERROR(CheckOtherFields(root));
  LoraConfig config;
  WEFT_ASSIGN_OR_RETURN(config.rank, ReadRank("r", FieldOf(root, "r")));
  WEFT_ASSIGN_OR_RETURN(config.alpha,
                        ReadAlpha("lora_alpha", FieldOf(root, "lora_alpha")));
  WEFT_ASSIGN_OR_RETURN(const bool rank_stabilised,
                        ReadBool(root, "use_rslora"));
  WEFT_RETURN_IF_ERROR(ReadTargets(root, shape, rank_stabilised, config));
  return config;
}

std::string WritePeftConfig(const LoraConfig& config,
                            const model_config::ModelShape& shape,
                            const FileRules& rules,
                            const std::string& base_model_name) {
  const LoraShape lora = FileShape(config, shape, rules);
  nlohmann::json root = {{"peft_type", "LORA"},
                         {"task_type", "CAUSAL_LM"},
                         {"base_model_name_or_path", base_model_name},
                         {"inference_mode", true},
                         {"r", lora.rank},
                         {"lora_alpha", AlphaToJson(lora.alpha)},
                         {"lora_dropout", 0.0},
                         {"bias", "none"},
                         {"fan_in_fan_out", false},
                         {"init_lora_weights", true},
                         {"modules_to_save", nullptr},
                         {"use_dora", false},
                         {"use_rslora", false}};
  WriteTargets(config, shape, rules, root);
  return root.dump(2, ' ', /*ensure_ascii=*/true,
                   nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace weft::lora
