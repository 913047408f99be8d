#include "src/scoring/head_scorer.h"

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/model_config/model_config.h"
#include "src/weights/checkpoint.h"
#include "src/weights/tensor_types.h"

namespace weft::scoring {
namespace {

absl::Status Check(const at::Tensor& hidden_RH,
                   const std::vector<int64_t>& targets,
                   const ScoreOptions& options, const at::Tensor& head_VH) {
  const auto num_rows = static_cast<int64_t>(targets.size());
  const auto sizes = hidden_RH.sizes();
  if (sizes.size() != 2 || sizes[0] != num_rows ||
      sizes[1] != head_VH.size(1) || !hidden_RH.is_floating_point()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hidden states have shape ",
        weights::ShapeString(absl::MakeConstSpan(sizes.data(), sizes.size())),
        "; expected are floating-point numbers of shape ",
        weights::ShapeString({num_rows, head_VH.size(1)})));
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] >= 0 && targets[i] < head_VH.size(0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("targets[", i, "] is ", targets[i],
                     "; expected is a token in [0, ", head_VH.size(0), ")"));
  }
  if (!(options.temperature > 0) || !std::isfinite(options.temperature)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "temperature is ", options.temperature, "; it must be > 0 and finite"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HeadScorer> HeadScorer::Load(const std::string& model_dir,
                                            const HeadScorerOptions& options) {
  WEFT_ASSIGN_OR_RETURN(const model::ModelConfig config,
                        model::ReadModelConfig(model_dir));
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(model_dir));
  WEFT_ASSIGN_OR_RETURN(model::HeadWeights head,
                        model::LoadHeadWeights(*checkpoint, config,
                                               options.dtype, options.device));
  return HeadScorer(std::move(head), {.chunk_rows = options.chunk_rows,
                                      .softcap = config.final_softcap});
}

absl::StatusOr<HeadScores> HeadScorer::Score(
    const at::Tensor& hidden_RH, const std::vector<int64_t>& targets,
    const ScoreOptions& options) const {
  WEFT_RETURN_IF_ERROR(Check(hidden_RH, targets, options, weights_.head_VH));
  loss::ScoreRows rows{.targets = targets};
  rows.row_offsets.resize(targets.size() + 1);
  std::iota(rows.row_offsets.begin(), rows.row_offsets.end(), 0);
  rows.temperatures.assign(targets.size(), options.temperature);
  loss::HeadResult result = loss::ScoreHead(
      hidden_RH.detach().to(weights_.head_VH.options()).contiguous(),
      weights_.head_VH, rows, head_, /*want_gradient=*/false,
      options.want_entropy);
  return HeadScores{std::move(result.logprobs_E),
                    std::move(result.entropies_R)};
}

}  // namespace weft::scoring
