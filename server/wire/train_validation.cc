// Validation of TrainingService's requests; see request_validation.h.
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/wire/custom_loss_reader.h"
#include "server/wire/datum_reader.h"
#include "server/wire/field_checks.h"
#include "server/wire/replay_validation.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"
#include "src/request/field_names.h"

namespace weft::server {
namespace {

// Logits are divided by the temperature. With a lower temperature, a quotient
// could be infinite in f32.
constexpr Interval kTemperature = {.low = 1e-8, .high = 1e8};

absl::StatusOr<LossFunction> ReadLossFunction(v1::LossFunction function) {
  if (function == v1::LOSS_FUNCTION_UNSPECIFIED) {
    return BadField("loss.function", "is required");
  }
  if (!v1::LossFunction_IsValid(function)) {
    return BadField("loss.function",
                    absl::StrCat("is ", static_cast<int>(function),
                                 ", must be a known LossFunction"));
  }
  // Both enums have the same order, but 0 of v1 is no function.
  static_assert(static_cast<int>(LossFunction::kJs) + 1 ==
                v1::LossFunction_MAX);
  return static_cast<LossFunction>(function - 1);
}

// Checks the settings that do not go with a teacher.
absl::Status CheckBesideTeacher(const LossConfig& loss) {
  if (loss.gradient_filter != 0) {
    return BadField("loss.gradient_filter",
                    absl::StrCat("is ", loss.gradient_filter,
                                 ", must be 0 for a loss with a teacher"));
  }
  if (loss.score_all) {
    return BadField("loss.score_all",
                    "is set, must be false for a loss with a teacher, which "
                    "compares no token of weight 0");
  }
  if (loss.function != LossFunction::kJs) return absl::OkStatus();
  return CheckReal("loss.beta", loss.beta,
                   {.high = 1, .low_open = true, .high_open = true});
}

// Reads the teacher. `loss` has all other settings.
absl::StatusOr<Teacher> ReadTeacher(const v1::LossConfig& in,
                                    const LossConfig& loss,
                                    const RequestLimits& limits) {
  const v1::Teacher& teacher = in.teacher();
  if (!HasTeacher(loss.function)) {
    if (!in.has_teacher()) return Teacher();
    return BadField("loss.teacher",
                    "is set, must be absent for every loss but forward_kl, "
                    "reverse_kl and js");
  }
  if (teacher.base_model() == !teacher.adapter_id().empty()) {
    return BadField("loss.teacher",
                    "must have base_model or adapter_id, and not both");
  }
  if (!teacher.base_model()) {
    WEFT_RETURN_IF_ERROR(CheckAdapterId(
        "loss.teacher.adapter_id", teacher.adapter_id(), limits.engine_names));
  }
  if (!teacher.snapshot().empty()) {
    if (teacher.base_model()) {
      return BadField("loss.teacher.snapshot",
                      "is set, but the base model has no snapshots");
    }
    WEFT_RETURN_IF_ERROR(
        CheckName("loss.teacher.snapshot", teacher.snapshot()));
  }
  WEFT_RETURN_IF_ERROR(CheckBesideTeacher(loss));
  return Teacher{.base_model = teacher.base_model(),
                 .adapter_id = teacher.adapter_id(),
                 .snapshot = teacher.snapshot()};
}

absl::StatusOr<LossConfig> ReadLoss(bool has_loss, const v1::LossConfig& in,
                                    const RequestLimits& limits) {
  if (!has_loss) return BadField("loss", "is required");
  LossConfig out;
  WEFT_ASSIGN_OR_RETURN(out.function, ReadLossFunction(in.function()));
  if (in.has_clip_low()) out.clip_low = in.clip_low();
  if (in.has_clip_high()) out.clip_high = in.clip_high();
  if (out.function == LossFunction::kJs) out.beta = 0.5;
  if (in.has_beta()) out.beta = in.beta();
  if (in.has_temperature()) out.temperature = in.temperature();
  out.return_entropy = in.return_entropy();
  out.gradient_filter = in.gradient_filter();
  out.score_all = in.score_all();
  out.return_routing = in.return_routing();
  WEFT_RETURN_IF_ERROR(
      CheckRouting("loss.return_routing", out.return_routing, limits));
  WEFT_RETURN_IF_ERROR(CheckReal("loss.clip_low", out.clip_low, {}));
  WEFT_RETURN_IF_ERROR(CheckReal("loss.clip_high", out.clip_high, {}));
  if (out.clip_low > out.clip_high) {
    return BadField(
        "loss.clip_low",
        absl::StrCat("is ", out.clip_low, ", must be at most ",
                     NameOfField("loss.clip_high"), " ", out.clip_high));
  }
  WEFT_RETURN_IF_ERROR(CheckReal("loss.beta", out.beta, {}));
  WEFT_RETURN_IF_ERROR(
      CheckReal("loss.temperature", out.temperature, kTemperature));
  WEFT_RETURN_IF_ERROR(CheckReal("loss.gradient_filter", out.gradient_filter,
                                 {.low = 0, .high = 1, .high_open = true}));
  WEFT_ASSIGN_OR_RETURN(out.teacher, ReadTeacher(in, out, limits));
  return out;
}

// Reads the fields that ForwardBackward and Forward share.
template <typename Message>
absl::Status ReadData(const Message& in, const RequestLimits& limits,
                      TrainRequest* out) {
  out->adapter_id = in.adapter_id();
  out->step = in.step();
  out->epoch = in.epoch();
  WEFT_ASSIGN_OR_RETURN(out->loss, ReadLoss(in.has_loss(), in.loss(), limits));
  const int num_data = in.data_size();
  if (num_data < 1 || num_data > limits.max_data) {
    return BadField(
        "data", absl::StrCat("has ", num_data, " sequences, must be in [1, ",
                             limits.max_data, "]"));
  }
  WEFT_RETURN_IF_ERROR(ReadCustomLoss(in.loss(), num_data, &out->loss));
  out->data.reserve(static_cast<size_t>(num_data));
  int64_t num_tokens = 0;
  for (int i = 0; i < num_data; ++i) {
    WEFT_ASSIGN_OR_RETURN(Datum datum,
                          ReadDatum(in.data(i), i, out->loss.function, limits));
    WEFT_RETURN_IF_ERROR(ReadCustomInputs(in.data(i), i, out->loss, &datum));
    num_tokens += datum.num_tokens() + out->teacher_tokens_of(datum);
    if (num_tokens > limits.max_tokens) {
      return BadField(
          "data",
          absl::StrCat("has more than ", limits.max_tokens, " tokens at data[",
                       i, "], must be at most that many: split it"));
    }
    out->data.push_back(std::move(datum));
  }
  return ReadReplay(in.data(), in.loss(), limits, out);
}

constexpr Interval kRate = {.high = 1e3};
constexpr Interval kBeta = {.high = 1, .high_open = true};

absl::StatusOr<AdamWConfig> ReadAdamW(const v1::AdamWConfig& in) {
  // Limits eps to normal f32 numbers. With a smaller eps, AdamW could divide
  // zero by zero.
  constexpr Interval kEps = {.low = 1e-37, .high = 1e6};
  AdamWConfig out;
  if (in.has_learning_rate()) out.learning_rate = in.learning_rate();
  if (in.has_beta1()) out.beta1 = in.beta1();
  if (in.has_beta2()) out.beta2 = in.beta2();
  if (in.has_eps()) out.eps = in.eps();
  if (in.has_weight_decay()) out.weight_decay = in.weight_decay();
  if (in.has_max_grad_norm()) out.max_grad_norm = in.max_grad_norm();
  WEFT_RETURN_IF_ERROR(
      CheckReal("adamw.learning_rate", out.learning_rate, kRate));
  WEFT_RETURN_IF_ERROR(CheckReal("adamw.beta1", out.beta1, kBeta));
  WEFT_RETURN_IF_ERROR(CheckReal("adamw.beta2", out.beta2, kBeta));
  WEFT_RETURN_IF_ERROR(CheckReal("adamw.eps", out.eps, kEps));
  WEFT_RETURN_IF_ERROR(
      CheckReal("adamw.weight_decay", out.weight_decay, kRate));
  WEFT_RETURN_IF_ERROR(CheckReal("adamw.max_grad_norm", out.max_grad_norm, {}));
  return out;
}

absl::StatusOr<MuonConfig> ReadMuon(const v1::MuonConfig& in) {
  // With more steps the rounding error of an eigenvalue near 0 could show
  // (src/loss/muon.h).
  constexpr uint64_t kMaxNsSteps = 10;
  MuonConfig out;
  if (in.has_learning_rate()) out.learning_rate = in.learning_rate();
  if (in.has_momentum()) out.momentum = in.momentum();
  if (in.has_nesterov()) out.nesterov = in.nesterov();
  if (in.has_weight_decay()) out.weight_decay = in.weight_decay();
  if (in.has_max_grad_norm()) out.max_grad_norm = in.max_grad_norm();
  WEFT_RETURN_IF_ERROR(
      CheckReal("muon.learning_rate", out.learning_rate, kRate));
  WEFT_RETURN_IF_ERROR(CheckReal("muon.momentum", out.momentum, kBeta));
  WEFT_RETURN_IF_ERROR(CheckReal("muon.weight_decay", out.weight_decay, kRate));
  WEFT_RETURN_IF_ERROR(CheckReal("muon.max_grad_norm", out.max_grad_norm, {}));
  if (!in.has_ns_steps()) return out;
  WEFT_RETURN_IF_ERROR(
      CheckCount("muon.ns_steps", in.ns_steps(), 1, kMaxNsSteps));
  out.ns_steps = static_cast<int>(in.ns_steps());
  return out;
}

}  // namespace

absl::Status CheckRouting(absl::string_view field, bool asked,
                          const RequestLimits& limits) {
  if (!asked || limits.expert_layers > 0) return absl::OkStatus();
  return BadField(field, "is set, but the model has no experts");
}

absl::StatusOr<TrainRequest> Validate(const v1::ForwardBackwardRequest& request,
                                      const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  TrainRequest out;
  WEFT_RETURN_IF_ERROR(ReadData(request, limits, &out));
  return out;
}

absl::StatusOr<TrainRequest> Validate(const v1::ForwardRequest& request,
                                      const RequestLimits& limits) {
  if (request.adapter_id().empty()) {
    if (request.step() != 0) {
      return BadField("step", absl::StrCat("is ", request.step(),
                                           ", must be 0 for the base model"));
    }
  } else {
    WEFT_RETURN_IF_ERROR(CheckAdapterId("adapter_id", request.adapter_id(),
                                        limits.engine_names));
  }
  if (request.unnumbered() && request.step() != 0) {
    return BadField("step", absl::StrCat("is ", request.step(),
                                         ", must be 0 when unnumbered"));
  }
  if (!request.snapshot().empty()) {
    if (!request.unnumbered() || request.adapter_id().empty()) {
      return BadField("snapshot", "wants an adapter and `unnumbered`");
    }
    WEFT_RETURN_IF_ERROR(CheckName("snapshot", request.snapshot()));
  }
  TrainRequest out;
  out.backward = false;
  out.unnumbered = request.unnumbered();
  out.snapshot = request.snapshot();
  WEFT_RETURN_IF_ERROR(ReadData(request, limits, &out));
  return out;
}

absl::StatusOr<OptimStepRequest> Validate(const v1::OptimStepRequest& request,
                                          const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  OptimStepRequest out;
  out.adapter_id = request.adapter_id();
  out.step = request.step();
  out.epoch = request.epoch();
  out.discard = request.discard();
  if (out.discard && (request.has_adamw() || request.has_muon())) {
    return BadField("discard", "is set beside ",
                    request.has_muon() ? "muon" : "adamw",
                    ": leave one of them out");
  }
  if (request.has_muon()) {
    if (request.has_adamw()) {
      return BadField("muon", "is set beside adamw: leave one of them out");
    }
    WEFT_ASSIGN_OR_RETURN(out.muon, ReadMuon(request.muon()));
    return out;
  }
  WEFT_ASSIGN_OR_RETURN(out.adamw, ReadAdamW(request.adamw()));
  return out;
}

absl::StatusOr<MetricReport> Validate(const v1::ReportMetricsRequest& request,
                                      const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  WEFT_RETURN_IF_ERROR(CheckCount("the number of metrics",
                                  static_cast<uint64_t>(request.metrics_size()),
                                  1, kMaxMetricCurves));
  for (const auto& [name, value] : request.metrics()) {
    WEFT_RETURN_IF_ERROR(CheckName("metrics", name));
  }
  MetricReport out{
      .adapter_id = request.adapter_id(),
      .metrics = {request.metrics().begin(), request.metrics().end()}};
  if (request.has_optim_steps()) out.optim_steps = request.optim_steps();
  return out;
}

}  // namespace weft::server
