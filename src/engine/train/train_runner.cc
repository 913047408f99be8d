#include "src/engine/train/train_runner.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/profile.h"
#include "src/base/status_macros.h"
#include "src/engine/train/activation_budget.h"
#include "src/loss/run_loss_graph.h"
#include "src/model_config/model_shard.h"
#include "src/request/loss_graph.h"

namespace weft::engine {
namespace {

// Returns the experts of the datum's tokens. `experts_TE` has the experts of
// all rows of the batch.
std::vector<uint16_t> RoutingOf(const PackedDatum& packed,
                                const at::Tensor& experts_TE) {
  const int64_t width = experts_TE.size(1);
  std::vector<uint16_t> routing;
  routing.reserve(packed.datum->tokens.size() * static_cast<size_t>(width));
  for (const RowSpan& span : packed.spans) {
    const int32_t* first =
        experts_TE.const_data_ptr<int32_t>() + span.begin * width;
    routing.insert(routing.end(), first, first + span.count * width);
  }
  return routing;
}

// Computes the losses of a micro-batch's data, request by request.
class BatchLosses {
 public:
  explicit BatchLosses(bool backward) : backward_(backward) {}

  // How long the custom losses of each request took.
  std::map<const TrainRequest*, absl::Duration> TakeTime() {
    return std::move(time_);
  }

  // Computes the losses of a datum from result->logprobs, and dLoss/dlogprob.
  // Errors: those of RunLossGraph, which name the datum.
  absl::Status Compute(const PackedDatum& packed, DatumResult* result,
                       absl::Span<float> gradients, loss::MetricSums* metrics) {
    const LossConfig& config = packed.request->loss;
    const absl::Span<float> losses = absl::MakeSpan(result->losses);
    if (config.function != LossFunction::kCustom) {
      loss::ComputeTokenLosses(config, *packed.datum, result->logprobs, losses,
                               gradients, metrics);
      return absl::OkStatus();
    }
    const absl::Time start = SteadyNow();
    if (packed.request != request_) {
      WEFT_ASSIGN_OR_RETURN(graph_, ReadLossGraph(config.custom));
      request_ = packed.request;
    }
    std::optional<GraphLimits> limits;
    if (!request_->again) {
      limits = GraphLimitsOf(static_cast<int64_t>(losses.size()),
                             request_->data.size());
    }
    const absl::Status run = loss::RunLossGraph(
        graph_, config.custom, *packed.datum, limits, result->logprobs,
        backward_, losses, gradients, metrics);
    time_[request_] += SteadyNow() - start;
    if (run.ok()) return run;
    return absl::Status(
        run.code(),
        absl::StrCat("data[", packed.datum - packed.request->data.data(),
                     "]: ", run.message()));
  }

 private:
  const bool backward_;
  const TrainRequest* request_ = nullptr;  // Whose graph graph_ is.
  LossGraph graph_;
  std::map<const TrainRequest*, absl::Duration> time_;
};

// Returns the result of one datum. `scores` has the scores of all data of the
// datum's replica. Writes dLoss/dlogprob of the datum's entries to
// `gradients_E`, which has all E entries. Adds to `metrics`. Errors: those of
// BatchLosses.
absl::StatusOr<DatumResult> ScatterDatum(const PackedDatum& packed,
                                         const executor::TrainScores& scores,
                                         BatchLosses* losses,
                                         float* gradients_E,
                                         loss::MetricSums* metrics) {
  const Datum& datum = *packed.datum;
  const LossConfig& config = packed.request->loss;
  const size_t size = datum.targets.size();
  DatumResult result{.targets_per_token = datum.targets_per_token};
  result.logprobs.assign(size, 0.0f);
  result.losses.assign(size, 0.0f);
  if (config.return_entropy) result.entropies.assign(datum.tokens.size(), 0.0f);
  if (config.return_routing) {
    result.routing = RoutingOf(packed, scores.experts_TE);
  }

  const float* logprobs = scores.logprobs_E.const_data_ptr<float>();
  std::vector<size_t> scored;  // Index of each entry's target in the datum.
  scored.reserve(size);
  size_t row = 0;
  for (int64_t i = 0; i < datum.num_tokens(); ++i) {
    const size_t before = scored.size();
    const TargetSpan own = datum.targets_of(i);
    for (int64_t t = own.begin; t < own.end; ++t) {
      if (!IsScored(config, datum, t)) continue;
      result.logprobs[t] = logprobs[packed.entries[scored.size()]];
      scored.push_back(t);
    }
    if (scored.size() == before) continue;
    if (config.return_entropy) {
      result.entropies[i] =
          scores.entropies_R.const_data_ptr<float>()[packed.rows[row]];
    }
    ++row;
  }

  std::vector<float> gradients(size, 0.0f);
  if (HasTeacher(config.function)) {
    // Entries with a teacher follow those without one.
    const int64_t first =
        scores.logprobs_E.numel() - scores.divergences_D.numel();
    std::vector<float> divergences(size, 0.0f);
    for (size_t entry = 0; entry < scored.size(); ++entry) {
      divergences[scored[entry]] =
          scores.divergences_D
              .const_data_ptr<float>()[packed.entries[entry] - first];
    }
    loss::ComputeTeacherLosses(datum, divergences,
                               absl::MakeSpan(result.losses),
                               absl::MakeSpan(gradients), metrics);
  } else {
    WEFT_RETURN_IF_ERROR(
        losses->Compute(packed, &result, absl::MakeSpan(gradients), metrics));
  }
  for (size_t entry = 0; entry < scored.size(); ++entry) {
    gradients_E[packed.entries[entry]] = gradients[scored[entry]];
  }
  return result;
}

// Calls DropPending at the end of Run. If Backward was not called, DropPending
// frees the tensors that Forward kept for Backward.
class PassGuard {
 public:
  explicit PassGuard(executor::Executor* executor) : executor_(*executor) {}
  ~PassGuard() { executor_.DropPending(); }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;

 private:
  executor::Executor& executor_;
};

// Returns BatchRows::support_ids for chunks of `chunk` rows.
int64_t SupportIds(const loss::RowSupports& supports, int64_t chunk) {
  int64_t most = 0;
  for (size_t m = 0; m < supports.rows.size(); ++m) {
    most = std::max(most, supports.offsets[m + 1] - supports.offsets[m]);
  }
  return most * std::min(chunk, static_cast<int64_t>(supports.rows.size()));
}

// Returns whether the field is true in the loss config of any request.
bool Wants(const std::vector<TrainPiece>& pieces, bool LossConfig::*field) {
  return std::ranges::any_of(pieces, [field](const TrainPiece& piece) {
    return piece.request->loss.*field;
  });
}

}  // namespace

absl::StatusOr<int> TrainRunner::NumRecomputed(const Part& part, bool backward,
                                               int64_t copy_bytes) const {
  const model_config::ModelConfig config = model_config::LargestConfig(
      executor_.decoder().config(), executor_.decoder().tensor_size());
  int max_rank = 0;
  int64_t head_rank = 0;
  for (const TrainPiece& piece : part.pieces) {
    for (const lora::AdapterVersionPtr& version :
         {piece.version, piece.teacher}) {
      if (version == nullptr) continue;
      const lora::AdapterLayout& layout = *version->layout;
      max_rank = std::max(max_rank, layout.max_rank());
      head_rank = std::max<int64_t>(
          head_rank,
          layout.group(config.num_layers, lora::ProjectionGroup::kLmHead)
              .total_rank);
    }
  }
  const PackedTrain& packed = part.packed;
  const executor::DistillPlan& distill = packed.distill;
  const auto compared = static_cast<int64_t>(distill.rows.divergences.size());
  const auto scored =
      static_cast<int64_t>(packed.rows.temperatures.size()) + compared;
  const bool is_cpu = executor_.decoder().device().is_cpu();
  const int64_t chunk =
      loss::HeadChunkRows(executor_.head(), scored, config.vocab, is_cpu);
  const auto element_bytes =
      static_cast<int64_t>(at::elementSize(executor_.decoder().dtype()));
  ActivationBytes bytes = ActivationsOf(
      config, element_bytes, is_cpu, max_rank,
      {.rows = packed.batch.tokens_T.size(0),
       .scored = scored,
       .entries = static_cast<int64_t>(packed.rows.targets.size()) + compared,
       .compared = compared,
       .chunk = chunk,
       .head_rank = head_rank,
       .support_ids = SupportIds(packed.rows.supports, chunk),
       .nodes = static_cast<int64_t>(packed.batch.nodes.size())});
  if (!distill.empty()) {
    // The teachers pass through the layers before anything is kept.
    const int64_t teachers =
        ActivationsOf(
            config, element_bytes, is_cpu, max_rank,
            {.rows = distill.batch.tokens_T.size(0),
             .nodes = static_cast<int64_t>(distill.batch.nodes.size())})
            .forward;
    bytes.working = std::max(bytes.working, teachers);
    bytes.forward = std::max(bytes.forward, teachers);
  }
  bytes.working += copy_bytes;
  bytes.forward += copy_bytes;
  if (!backward) {
    return ChooseRecomputed(GradientCheckpointing::kAll,
                            {.working = bytes.forward}, /*num_layers=*/0,
                            options_.memory_budget_bytes);
  }
  return ChooseRecomputed(options_.checkpointing, bytes, config.num_layers,
                          options_.memory_budget_bytes);
}

std::vector<lora::LoraGradients> TrainRunner::GradientsOf(
    const std::vector<Part>& parts, const lora::LoraGradients& gradients) {
  std::vector<lora::LoraGradients> of_parts;
  for (const Part& part : parts) {
    lora::LoraGradients& own = of_parts.emplace_back();
    for (const lora::LoraGradient& gradient : gradients) {
      if (std::ranges::any_of(part.pieces, [&](const TrainPiece& piece) {
            return piece.version == gradient.version;
          })) {
        own.push_back(gradient);
      }
    }
  }
  return of_parts;
}

TrainOutcome TrainRunner::Scatter(
    const std::vector<TrainPiece>& pieces, const std::vector<Part>& parts,
    const std::vector<executor::TrainScores>& scores,
    std::vector<loss::MetricSums> metrics, bool backward,
    std::vector<at::Tensor>* gradients_E) {
  const profile::Span span("losses");
  TrainOutcome outcome{.metrics = std::move(metrics)};
  // The parts have the data of the pieces in order.
  size_t piece = 0;
  int64_t left = pieces.front().num_data;
  BatchLosses losses(backward);
  for (size_t i = 0; i < parts.size(); ++i) {
    gradients_E->push_back(at::zeros_like(scores[i].logprobs_E));
    if (i == 0) {
      outcome.expert_rows_LE = scores[i].expert_rows_LE;
    } else if (outcome.expert_rows_LE.defined()) {
      outcome.expert_rows_LE.add_(scores[i].expert_rows_LE);
    }
    for (const PackedDatum& packed : parts[i].packed.data) {
      while (left == 0) left = pieces[++piece].num_data;
      --left;
      if (outcome.failed.contains(packed.request)) {
        outcome.data.emplace_back();
        continue;
      }
      absl::StatusOr<DatumResult> result =
          ScatterDatum(packed, scores[i], &losses,
                       gradients_E->back().mutable_data_ptr<float>(),
                       &outcome.metrics[piece]);
      if (!result.ok()) {
        outcome.failed.try_emplace(packed.request, result.status());
      }
      outcome.data.push_back(std::move(result).value_or(DatumResult()));
    }
  }
  outcome.loss_time = losses.TakeTime();
  return outcome;
}

absl::StatusOr<TrainOutcome> TrainRunner::Run(
    const std::vector<TrainPiece>& pieces, const lora::LoraGradients* gradients,
    std::vector<loss::MetricSums> metrics, Recompute recompute,
    int64_t copy_bytes) {
  const at::InferenceMode no_autograd;
  const bool backward = gradients != nullptr;
  const int num_layers = executor_.decoder().config().num_layers;
  bool kept_layers = false;
  kept_layers_ = false;
  std::vector<Part> parts;
  std::vector<executor::TrainPlan> plans;
  for (std::vector<TrainPiece>& own :
       SplitPieces(pieces, executor_.num_replicas())) {
    Part part{.pieces = std::move(own)};
    {
      const profile::Span span("pack");
      part.packed = PackTrain(part.pieces, options_.share_prompts);
    }
    int num_recomputed = 0;
    if (backward && recompute == Recompute::kAll) {
      num_recomputed = num_layers;
    } else {
      WEFT_ASSIGN_OR_RETURN(num_recomputed,
                            NumRecomputed(part, backward, copy_bytes));
    }
    kept_layers |= options_.checkpointing == GradientCheckpointing::kAuto &&
                   backward && num_recomputed < num_layers;
    plans.push_back(
        {.batch = std::move(part.packed.batch),
         .score_index_R = part.packed.score_index_R,
         .rows = std::move(part.packed.rows),
         .distill = std::move(part.packed.distill),
         .backward = backward,
         .wants_entropy = Wants(pieces, &LossConfig::return_entropy),
         .wants_routing = Wants(pieces, &LossConfig::return_routing),
         .num_recomputed = num_recomputed});
    parts.push_back(std::move(part));
  }
  kept_layers_ = kept_layers;
  const PassGuard pass(&executor_);
  const std::vector<executor::TrainScores> scores =
      executor_.Forward(std::move(plans));

  std::vector<at::Tensor> gradients_E;
  TrainOutcome outcome = Scatter(pieces, parts, scores, std::move(metrics),
                                 backward, &gradients_E);
  if (backward && outcome.failed.empty()) {
    executor_.Backward(gradients_E, GradientsOf(parts, *gradients));
  }
  return outcome;
}

}  // namespace weft::engine
