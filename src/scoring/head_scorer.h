// Computes log-probabilities from given hidden states. Runs only the head of a
// model, and does not load the layers.
//
//   auto scorer = HeadScorer::Load("/models/Qwen3-8B", {});
//   auto scores = scorer->Score(hidden_RH, targets, {});
#ifndef WEFT_SRC_SCORING_HEAD_SCORER_H_
#define WEFT_SRC_SCORING_HEAD_SCORER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder_weights.h"

namespace weft::scoring {

struct HeadScorerOptions {
  at::ScalarType dtype = at::kFloat;  // Dtype of the weights: kFloat or
                                      // kBFloat16.
  at::Device device = at::kCPU;
  int64_t chunk_rows = 1024;  // As in loss::HeadOptions.
};

struct ScoreOptions {
  float temperature = 1;  // Divides the logits; > 0 and finite.
  bool want_entropy = false;
};

struct HeadScores {
  at::Tensor logprobs_R;   // [R] f32, in nats.
  at::Tensor entropies_R;  // [R] f32, in nats. Undefined if not wanted.
};

// Scores rows with one model's head.
// Threads: not thread-safe.
class HeadScorer {
 public:
  // Reads config.json, the embedding and the head from a Hugging Face folder,
  // or from a folder that `weftctl weights head` wrote. Errors: those of
  // ReadModelConfig, Checkpoint::Open and LoadHeadWeights.
  [[nodiscard]] static absl::StatusOr<HeadScorer> Load(
      const std::string& model_dir, const HeadScorerOptions& options);

  // Computes log p(targets[r] | hidden_RH[r]): multiplies hidden_RH by the head
  // and applies softcap, temperature and log-softmax.
  // Shapes: hidden_RH [R, H] is the final norm's output (transformers'
  // last_hidden_state), of any floating-point dtype and on any device; targets
  // [R] in [0, V).
  // Errors: INVALID_ARGUMENT, which names the argument, its value and the
  // limit; throws c10::Error if memory runs out.
  [[nodiscard]] absl::StatusOr<HeadScores> Score(
      const at::Tensor& hidden_RH, const std::vector<int64_t>& targets,
      const ScoreOptions& options) const;

  [[nodiscard]] const model::HeadWeights& weights() const { return weights_; }

 private:
  HeadScorer(model::HeadWeights weights, const loss::HeadOptions& head)
      : weights_(std::move(weights)), head_(head) {}

  model::HeadWeights weights_;
  loss::HeadOptions head_;
};

}  // namespace weft::scoring

#endif  // WEFT_SRC_SCORING_HEAD_SCORER_H_
