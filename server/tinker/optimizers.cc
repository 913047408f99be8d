#include "server/tinker/optimizers.h"

#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/tinker/wire/fields.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// A field of the SDK's parameters and how it is set in a message of weft.v1.
template <typename Config>
using ParamField = std::pair<const char*, void (Config::*)(double)>;

constexpr ParamField<v1::AdamWConfig> kAdamFields[] = {
    {"learning_rate", &v1::AdamWConfig::set_learning_rate},
    {"beta1", &v1::AdamWConfig::set_beta1},
    {"beta2", &v1::AdamWConfig::set_beta2},
    {"eps", &v1::AdamWConfig::set_eps},
    {"weight_decay", &v1::AdamWConfig::set_weight_decay},
    {"grad_clip_norm", &v1::AdamWConfig::set_max_grad_norm}};

constexpr ParamField<v1::MuonConfig> kDimuonFields[] = {
    {"learning_rate", &v1::MuonConfig::set_learning_rate},
    {"beta1", &v1::MuonConfig::set_momentum},
    {"grad_clip_norm", &v1::MuonConfig::set_max_grad_norm}};

template <typename Config>
absl::Status ReadParams(const Json& params,
                        std::span<const ParamField<Config>> fields,
                        Config* out) {
  for (const auto& [name, set] : fields) {
    WEFT_ASSIGN_OR_RETURN(const std::optional<double> value,
                          Number(params, name));
    if (value) (out->*set)(*value);
  }
  return absl::OkStatus();
}

absl::Status ReadDimuon(const Json& params, v1::MuonConfig* out) {
  WEFT_ASSIGN_OR_RETURN(const std::string type, Text(params, "type"));
  if (type != kDimuonType) {
    return absl::UnimplementedError(
        absl::StrCat("optimizer_params of type ", Quoted(type),
                     " are not offered: use dimuon, or adam_params"));
  }
  for (const auto& [name, value] : params.items()) {
    bool known = name == "type";
    for (const auto& [field, set] : kDimuonFields) known |= name == field;
    if (known) continue;
    return BadField(absl::StrCat("optimizer_params.", name),
                    "is not a field of dimuon: leave it out");
  }
  out->set_momentum(0.9);  // The SDK's default.
  WEFT_RETURN_IF_ERROR(ReadParams<v1::MuonConfig>(params, kDimuonFields, out));
  if (!out->has_learning_rate()) {
    return BadField("optimizer_params.learning_rate", "is required");
  }
  // As the SDK says, a value below 0 means no clipping, too.
  if (out->max_grad_norm() < 0) out->clear_max_grad_norm();
  return absl::OkStatus();
}

}  // namespace

std::string TypeOf(Optimizer optimizer) {
  return optimizer == Optimizer::kMuon ? kDimuonType : kAdamType;
}

Optimizer OptimizerOf(absl::string_view type) {
  return type == kDimuonType ? Optimizer::kMuon : Optimizer::kAdamW;
}

Json OptimizerJson(const std::string& type) {
  Json config = {{"type", type}};
  if (type == kDimuonType) config["version"] = 1;
  return config;
}

absl::StatusOr<std::string> ReadOptimizer(const Json& body) {
  WEFT_ASSIGN_OR_RETURN(const bool loads_state, Bool(body, "optimizer", false));
  if (Find(body, "optimizer_config") == nullptr) {
    return std::string(loads_state ? "" : kAdamType);
  }
  if (loads_state) {
    return BadField("optimizer_config",
                    "is set, but the checkpoint's optimizer is loaded: leave "
                    "it out, or set optimizer to false");
  }
  WEFT_ASSIGN_OR_RETURN(const Json* const config,
                        Object(body, "optimizer_config"));
  WEFT_ASSIGN_OR_RETURN(std::string type, Text(*config, "type", kAdamType));
  if (type != kAdamType && type != kDimuonType) {
    return absl::UnimplementedError(
        absl::StrCat("optimizer_config of type ", Quoted(type),
                     " is not offered: use adamw or dimuon"));
  }
  WEFT_ASSIGN_OR_RETURN(const int64_t version, Int(*config, "version", 1));
  if (version == 1) return type;
  return absl::UnimplementedError(absl::StrCat(
      "optimizer_config.version ", version, " is not offered: use 1"));
}

absl::Status ReadOptimizerParams(const Json& body, v1::OptimStepRequest* out) {
  const bool has_adam = Find(body, "adam_params") != nullptr;
  if (Find(body, "optimizer_params") != nullptr) {
    if (has_adam) {
      return BadField("optimizer_params",
                      "is set beside adam_params: leave one of them out");
    }
    WEFT_ASSIGN_OR_RETURN(const Json* const params,
                          Object(body, "optimizer_params"));
    return ReadDimuon(*params, out->mutable_muon());
  }
  if (!has_adam) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const Json* const params, Object(body, "adam_params"));
  return ReadParams<v1::AdamWConfig>(*params, kAdamFields,
                                     out->mutable_adamw());
}

absl::Status CheckOptimizerOf(const Model& model,
                              const v1::OptimStepRequest& step) {
  const bool dimuon = step.has_muon();
  if (model.loads > 0 || model.optimizer.empty() ||
      dimuon == (model.optimizer == kDimuonType)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      dimuon ? "optimizer_params of dimuon" : "adam_params",
      ": the model was made for the optimizer ", model.optimizer,
      ", which is fixed: send its parameters, or make a model with the other "
      "optimizer, if need be from this model's checkpoint without the "
      "optimizer's state"));
}

}  // namespace weft::server::tinker
