#include "src/lora/checkpoint_fields.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/fingerprint.h"
#include "src/base/name.h"
#include "src/base/observe/log.h"
#include "src/weights/strict_json.h"

namespace weft::lora {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr uint64_t kMaxStoredRank = 1 << 16;
constexpr uint64_t kMaxStoredLayer = 1 << 16;
// The largest step number that a manifest may have. The numbering continues
// from the stored step and must not overflow.
constexpr uint64_t kMaxStoredStep = uint64_t{1} << 62;
constexpr double kMaxCreatedAt = 253402300800;  // The year 10000.
// An error message shows at most kShownDigits characters of a fingerprint and
// kShownName characters of a name.
constexpr size_t kShownDigits = 12;
constexpr size_t kShownName = 64;

// Describes the base model's shape. A checkpoint loads only into a model with
// an equal description.
json ShapeToJson(const model_config::ModelShape& shape) {
  json fields = {{"num_layers", shape.num_layers},
                 {"hidden", shape.hidden},
                 {"q_width", shape.q_width},
                 {"kv_width", shape.kv_width},
                 {"ffn", shape.ffn},
                 {"vocab", shape.vocab}};
  if (shape.gate_width > 0) fields["gate_width"] = shape.gate_width;
  const model_config::DeltaShape& d = shape.delta;
  if (!d.layers.empty()) {
    fields["delta"] = {d.key_width(), d.value_width(), d.key_heads,
                       d.value_heads, d.layers};
  }
  const model_config::ExpertShape& e = shape.experts;
  if (e.count > 0) fields["experts"] = {e.count, e.ffn, e.shared_ffn};
  return fields;
}

json ConfigToJson(const LoraConfig& config) {
  json modules = json::array();
  for (const TargetModule module : config.target_modules) {
    modules.push_back(static_cast<int>(module));
  }
  json overrides = json::array();
  for (const LoraOverride& other : config.overrides) {
    overrides.push_back({{"layer", other.layer},
                         {"module", static_cast<int>(other.module)},
                         {"rank", other.shape.rank},
                         {"alpha", other.shape.alpha}});
  }
  return {{"rank", config.rank},
          {"alpha", config.alpha},
          {"seed", config.seed},
          {"target_modules", std::move(modules)},
          {"overrides", std::move(overrides)}};
}

// Each Get stores the field's value. Returns false if the field is missing or
// has another type.
bool Get(const json& object, const char* key, std::string* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_string()) return false;
  *value = it->get<std::string>();
  return true;
}
bool Get(const json& object, const char* key, uint64_t* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_unsigned()) return false;
  *value = it->get<uint64_t>();
  return true;
}
bool Get(const json& object, const char* key, double* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number()) return false;
  *value = it->get<double>();
  return true;
}

bool GetModule(const json& value, TargetModule* out) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() >= kAllTargetModules.size()) {
    return false;
  }
  *out = static_cast<TargetModule>(value.get<uint64_t>());
  return true;
}

bool GetOverride(const json& value, LoraOverride* out) {
  uint64_t layer = 0;
  uint64_t rank = 0;
  if (!value.is_object() || !Get(value, "layer", &layer) ||
      !Get(value, "rank", &rank) || !Get(value, "alpha", &out->shape.alpha) ||
      !value.contains("module") || !GetModule(value["module"], &out->module) ||
      layer > kMaxStoredLayer || rank > kMaxStoredRank) {
    return false;
  }
  out->layer = static_cast<int>(layer);
  out->shape.rank = static_cast<int>(rank);
  return true;
}

bool GetConfig(const json& config, LoraConfig* out) {
  uint64_t rank = 0;
  if (!config.is_object() || !Get(config, "rank", &rank) ||
      !Get(config, "alpha", &out->alpha) || !Get(config, "seed", &out->seed)) {
    return false;
  }
  const auto modules = config.find("target_modules");
  if (rank < 1 || rank > kMaxStoredRank || modules == config.end() ||
      !modules->is_array()) {
    return false;
  }
  out->rank = static_cast<int>(rank);
  out->target_modules.clear();
  for (const json& module : *modules) {
    if (!GetModule(module, &out->target_modules.emplace_back())) return false;
  }
  // Checkpoints of older servers lack `overrides`.
  const json overrides = config.value("overrides", json::array());
  return overrides.is_array() &&
         std::ranges::all_of(overrides, [out](const json& other) {
           return GetOverride(other, &out->overrides.emplace_back());
         });
}

// Stores the field's value, or leaves `*value` as it is if the field is absent.
// Returns false if the field has another type.
template <typename T>
bool GetOptional(const json& object, const char* key, T* value) {
  return !object.contains(key) || Get(object, key, value);
}

// Reads the name of one of the first `count` values of an enum. Leaves `*value`
// as it is if the field is absent.
template <typename Enum>
bool GetNamed(const json& fields, const char* key, int count,
              const char* (*name_of)(Enum), Enum* value) {
  std::string name = name_of(*value);
  if (!GetOptional(fields, key, &name)) return false;
  for (int i = 0; i < count; ++i) {
    *value = static_cast<Enum>(i);
    if (name == name_of(*value)) return true;
  }
  return false;
}

bool GetMetadata(const json& fields, CheckpointMetadata* metadata) {
  const json entries = fields.value("metadata", json::object());
  if (!entries.is_object() || entries.size() > kMaxMetadataEntries) {
    return false;
  }
  for (const auto& [key, value] : entries.items()) {
    if (!IsName(key) || !value.is_string()) return false;
    metadata->emplace(key, value.get<std::string>());
  }
  return MetadataBytes(*metadata) <= kMaxMetadataBytes;
}

// Reads the fields that checkpoints of older servers may lack.
bool GetProperties(const json& fields, CheckpointInfo* info) {
  uint64_t ttl_seconds = 0;
  double ttl_from = absl::ToDoubleSeconds(info->created_at - absl::UnixEpoch());
  info->accumulated_tokens = kUncountedTokens;
  if (!GetNamed(fields, "kind", kNumCheckpointKinds, CheckpointKindName,
                &info->kind) ||
      !GetNamed(fields, "optimizer", kNumOptimizers, OptimizerName,
                &info->optimizer) ||
      !GetOptional(fields, "accumulated_tokens", &info->accumulated_tokens) ||
      info->accumulated_tokens > kMaxStoredStep ||
      !GetMetadata(fields, &info->metadata) ||
      !GetOptional(fields, "ttl_seconds", &ttl_seconds) ||
      ttl_seconds > kMaxStoredTtlSeconds ||
      !GetOptional(fields, "ttl_from", &ttl_from) || ttl_from < 0 ||
      ttl_from > kMaxCreatedAt ||
      !GetOptional(fields, "tenant", &info->tenant) ||
      !GetOptional(fields, "base_model_name", &info->base_model) ||
      !GetOptional(fields, "base_fingerprint", &info->base_fingerprint)) {
    return false;
  }
  info->ttl_from = absl::UnixEpoch() + absl::Seconds(ttl_from);
  if (info->kind == CheckpointKind::kSampler) info->accumulated_tokens = 0;
  if (ttl_seconds > 0) {
    info->expires_at =
        info->ttl_from + absl::Seconds(static_cast<int64_t>(ttl_seconds));
  }
  return true;
}

absl::Status Damaged() {
  return absl::DataLossError("the checkpoint's manifest is damaged");
}

std::string Describe(const std::string& name, const std::string& fingerprint) {
  return absl::StrCat(
      "'", absl::CHexEscape(name.substr(0, kShownName)), "' (fingerprint ",
      absl::CHexEscape(fingerprint.substr(0, kShownDigits)), ")");
}

}  // namespace

json WriteCheckpointFields(const CheckpointInfo& info,
                           const model_config::ModelShape& shape) {
  json fields = {{"format_version", kFormatVersion},
                 {"adapter_id", info.adapter_id},
                 {"name", info.name},
                 {"last_step", info.last_step},
                 {"optim_steps", info.optim_steps},
                 {"optimizer", OptimizerName(info.optimizer)},
                 {"accumulated_tokens", info.accumulated_tokens},
                 {"size_bytes", info.size_bytes},
                 {"created_at",
                  absl::ToDoubleSeconds(info.created_at - absl::UnixEpoch())},
                 {"config", ConfigToJson(info.config)},
                 {"base_model", ShapeToJson(shape)},
                 {"kind", CheckpointKindName(info.kind)},
                 {"metadata", info.metadata},
                 {"tenant", info.tenant},
                 {"base_model_name", info.base_model},
                 {"base_fingerprint", info.base_fingerprint}};
  CheckpointInfo expiring = info;
  WriteExpiry(&expiring, &fields);
  return fields;
}

void WriteExpiry(CheckpointInfo* info, json* fields) {
  if (info->expires_at == absl::InfiniteFuture()) {
    fields->erase("ttl_seconds");
    fields->erase("ttl_from");
    return;
  }
  const int64_t seconds =
      std::clamp(absl::ToInt64Seconds(absl::Ceil(
                     info->expires_at - info->ttl_from, absl::Seconds(1))),
                 int64_t{1}, static_cast<int64_t>(kMaxStoredTtlSeconds));
  info->expires_at = info->ttl_from + absl::Seconds(seconds);
  (*fields)["ttl_seconds"] = static_cast<uint64_t>(seconds);
  if (info->ttl_from != info->created_at) {
    (*fields)["ttl_from"] =
        absl::ToDoubleSeconds(info->ttl_from - absl::UnixEpoch());
  }
}

absl::StatusOr<json> ParseCheckpointFields(absl::string_view text,
                                           absl::string_view file) {
  return weights::ParseStrictJson<json>(text, file, {});
}

absl::StatusOr<CheckpointInfo> ReadCheckpointFields(const json& fields) {
  CheckpointInfo info;
  double created_at = 0;
  if (!fields.is_object() || !Get(fields, "adapter_id", &info.adapter_id) ||
      !Get(fields, "name", &info.name) ||
      !Get(fields, "last_step", &info.last_step) ||
      !Get(fields, "optim_steps", &info.optim_steps) ||
      info.last_step > kMaxStoredStep || info.optim_steps > kMaxStoredStep ||
      !Get(fields, "size_bytes", &info.size_bytes) ||
      !Get(fields, "created_at", &created_at) || created_at < 0 ||
      created_at > kMaxCreatedAt || !fields.contains("config") ||
      !GetConfig(fields["config"], &info.config)) {
    return Damaged();
  }
  info.created_at = absl::UnixEpoch() + absl::Seconds(created_at);
  if (!GetProperties(fields, &info)) return Damaged();
  return info;
}

absl::Status CheckBaseModel(const json& fields, const BaseModel& base) {
  uint64_t version = 0;
  std::string name;
  std::string fingerprint;
  if (!fields.is_object() || !Get(fields, "format_version", &version) ||
      !fields.contains("base_model") ||
      !GetOptional(fields, "base_model_name", &name) ||
      !GetOptional(fields, "base_fingerprint", &fingerprint)) {
    return Damaged();
  }
  if (version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "checkpoint format ", version, " is not ", kFormatVersion));
  }
  if (!fingerprint.empty() && fingerprint != base.fingerprint) {
    const std::string message = absl::StrCat(
        "the checkpoint belongs to base model ", Describe(name, fingerprint),
        ", the server has ", Describe(base.name, base.fingerprint), ": ",
        FingerprintDifference(fingerprint, base.fingerprint));
    if (!base.accepts_change) {
      return absl::FailedPreconditionError(absl::StrCat(
          message, ". A server with --accept-base-model-change takes it"));
    }
    Log(LogLevel::kWarning, message);
  }
  if (fields["base_model"] != ShapeToJson(base.shape)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the checkpoint belongs to a base model of another shape than '",
        base.name, "'"));
  }
  return absl::OkStatus();
}

}  // namespace weft::lora
