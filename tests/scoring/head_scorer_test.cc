// Compares HeadScorer with a dense log-softmax in f64.
#include "src/scoring/head_scorer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tolerance.h"
#include "tests/weights/files.h"

namespace weft::scoring {
namespace {

constexpr int64_t kHidden = 2304;
constexpr int64_t kVocab = 101;

// A Gemma 2 config whose softcap bends most logits. The checkpoint has no
// layers.
constexpr char kConfig[] =
    R"({"model_type": "gemma2", "vocab_size": 101, "num_hidden_layers": 26,
        "final_logit_softcapping": 2.5})";

class HeadScorerTest : public ::testing::Test {
 protected:
  HeadScorerTest() {
    at::manual_seed(3);
    head_ = at::randn({kVocab, kHidden}) * 0.05;
    (void)folder_.Write("config.json", kConfig);
    const auto* bytes = static_cast<const std::byte*>(head_.const_data_ptr());
    (void)folder_.Write("model.safetensors",
                        weights::WriteSafetensors(
                            {{{.name = "model.embed_tokens.weight",
                               .view = {.dtype = weights::ScalarType::kF32,
                                        .shape = {kVocab, kHidden},
                                        .bytes = {bytes, head_.nbytes()}}}}}));
  }

  at::Tensor head_;
  weights::TempFolder folder_;
};

TEST_F(HeadScorerTest, ScoresLikeADenseLogSoftmax) {
  const auto scorer = HeadScorer::Load(folder_.path(), {.chunk_rows = 16});
  ASSERT_THAT(scorer, IsOk());
  EXPECT_TRUE(at::equal(scorer->weights().embedding_VH, head_));
  constexpr int64_t kRows = 50;
  const at::Tensor hidden = at::randn({kRows, kHidden}, at::kDouble);
  std::vector<int64_t> targets;
  for (int64_t row = 0; row < kRows; ++row) {
    targets.push_back(row * 7 % kVocab);
  }
  const at::Tensor logits =
      at::tanh(at::mm(hidden, head_.to(at::kDouble).t()) / 2.5) * 2.5 / 0.7;
  const at::Tensor all = at::log_softmax(logits, -1);
  const at::Tensor expected =
      all.gather(1, at::tensor(targets).unsqueeze(1)).squeeze(1);
  const auto scores = scorer->Score(hidden, targets,
                                    {.temperature = 0.7, .want_entropy = true});
  ASSERT_THAT(scores, IsOk());
  // Allows for the rounding of a dot product of kHidden terms and of its
  // exponential.
  const double bound =
      testing::Tolerance(testing::kEpsilonF32, kHidden, 2.5 / 0.7);
  EXPECT_LE((scores->logprobs_R - expected).abs().max().item<double>(), bound);
  const at::Tensor entropies = -(all.exp() * all).sum(-1);
  EXPECT_LE((scores->entropies_R - entropies).abs().max().item<double>(),
            bound);
}

TEST_F(HeadScorerTest, RefusesWhatDoesNotFit) {
  const auto scorer = HeadScorer::Load(folder_.path(), {});
  ASSERT_THAT(scorer, IsOk());
  const at::Tensor hidden = at::zeros({2, kHidden});
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(scorer->Score(hidden, {1}, {}),
              IsStatus(kInvalid, "shape [2, 2304]; expected"));
  EXPECT_THAT(scorer->Score(at::zeros({2, 5}), {1, 2}, {}),
              IsStatus(kInvalid, "shape [2, 5]; expected"));
  EXPECT_THAT(scorer->Score(hidden, {1, 101}, {}),
              IsStatus(kInvalid,
                       "targets[1] is 101; expected is a token in "
                       "[0, 101)"));
  EXPECT_THAT(scorer->Score(hidden, {1, 2}, {.temperature = 0}),
              IsStatus(kInvalid, "temperature is 0"));
  EXPECT_THAT(HeadScorer::Load("/nonexistent", {}),
              IsStatus(absl::StatusCode::kNotFound, "config.json"));
}

TEST_F(HeadScorerTest, AcceptsNoRows) {
  const auto scorer = HeadScorer::Load(folder_.path(), {});
  ASSERT_THAT(scorer, IsOk());
  EXPECT_EQ(scorer->Score(at::zeros({0, kHidden}), {}, {})->logprobs_R.numel(),
            0);
}

}  // namespace
}  // namespace weft::scoring
