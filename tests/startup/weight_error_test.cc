// Tests how the error of 8-bit weights is measured. CompareWithCheckpoint reads
// the checkpoint again, layer by layer. It must compute what the whole model in
// f32 computes, and return the error as it is defined.
#include "src/startup/weight_error.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "src/loss/logits.h"
#include "src/model/decoder_weights.h"
#include "tests/model/checkpoint_of_config.h"
#include "tests/model/decoder_fixture.h"

namespace weft::engine {
namespace {

using model::MatrixFormat;
using ::weft::testing::CheckpointOfConfig;
using ::weft::testing::Family;

model::Decoder Load(const weights::Checkpoint& checkpoint,
                    const model::ModelConfig& config, MatrixFormat format) {
  auto weights = model::LoadDecoderWeights(checkpoint, config, at::kFloat,
                                           at::kCPU, /*shard=*/{}, format);
  EXPECT_THAT(weights, IsOk());
  return {config, *std::move(weights), config.max_positions};
}

at::Tensor LogprobsOf(const model::Decoder& decoder) {
  const std::vector<int64_t> text = FixedText(decoder.config().vocab);
  const auto count = static_cast<int64_t>(text.size());
  const at::Tensor x_TH = decoder.ForwardLayers(
      model::Mode::kEval,
      {.tokens_T = at::tensor(text),
       .positions_T = at::arange(count, at::kInt),
       .nodes = {{.begin = 0, .end = count, .subtree_end = count}}},
      /*tape=*/nullptr, /*num_recomputed=*/0, /*kv=*/nullptr);
  return at::log_softmax(
      loss::HeadLogits(decoder.FinalNorm(x_TH), decoder.weights().head_VH, {},
                       decoder.config().final_softcap)
          .to(at::kDouble),
      1);
}

TEST(WeightErrorTest, IsThatOfAllFamilies) {
  at::set_num_threads(1);
  for (const Family& family : testing::Families()) {
    SCOPED_TRACE(family.name);
    at::manual_seed(41);
    model::ModelConfig config = testing::TinyConfig();
    family.change(config);
    config.tied_embeddings = config.qk_norm;
    config.norms_from_one = config.output_norms;
    config.final_softcap = config.output_norms ? 5 : 0;
    const CheckpointOfConfig files(config);
    const auto checkpoint = files.Open();
    const model::Decoder plain =
        Load(*checkpoint, config, MatrixFormat::kDtype);
    const auto same = CompareWithCheckpoint(plain, *checkpoint);
    ASSERT_THAT(same, IsOk());
    EXPECT_EQ(same->num_tokens, 64);
    EXPECT_LE(std::abs(same->mean_kl), 1e-10);
    EXPECT_NEAR(same->top1, 1, 1e-12);

    const model::Decoder narrow =
        Load(*checkpoint, config, MatrixFormat::kInt8);
    const auto error = CompareWithCheckpoint(narrow, *checkpoint);
    ASSERT_THAT(error, IsOk());
    const at::Tensor p = LogprobsOf(plain), q = LogprobsOf(narrow);
    const double kl = (p.exp() * (p - q)).sum(1).mean().item<double>();
    EXPECT_GT(kl, 1e-8);
    EXPECT_NEAR(error->mean_kl, kl, 1e-3 * kl + 1e-10);
    EXPECT_NEAR(
        error->top1,
        p.argmax(1).eq(q.argmax(1)).to(at::kDouble).mean().item<double>(),
        1e-12);
  }
}

TEST(WeightErrorTest, TheTextIsSpreadOverTheVocabulary) {
  for (const int64_t vocab : {53, 49152, 262144}) {
    const std::vector<int64_t> text = FixedText(vocab);
    EXPECT_EQ(text, FixedText(vocab));
    EXPECT_GE(*std::ranges::min_element(text), 0);
    EXPECT_LT(*std::ranges::max_element(text), vocab);
    EXPECT_GE(std::set(text.begin(), text.end()).size(),
              std::min<size_t>(64, vocab) / 2);
  }
}

TEST(WeightErrorTest, ACheckpointThatIsCutShortIsAnError) {
  at::manual_seed(43);
  const model::ModelConfig config = testing::TinyConfig();
  CheckpointOfConfig files(config);
  const model::Decoder decoder =
      Load(*files.Open(), config, MatrixFormat::kInt8);
  files.tensors.erase("model.layers.1.mlp.up_proj.weight");
  EXPECT_THAT(CompareWithCheckpoint(decoder, *files.Open()),
              IsStatus(absl::StatusCode::kNotFound, "up_proj"));
}

}  // namespace
}  // namespace weft::engine
