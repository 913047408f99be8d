// Tests which weights are loaded in 8 bits, and that a decoder computes with
// these weights in f32.
#include "tests/model/int8_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "src/model/decoder.h"
#include "src/model_config/weight_list.h"
#include "tests/model/checkpoint_of_config.h"
#include "tests/model/decoder_fixture.h"
#include "tests/model/shard_weights.h"
#include "tests/support/status_matchers.h"

namespace weft::model {
namespace {

using testing::CheckpointOfConfig;
using testing::Quantized;
using testing::Widened;

void ExpectSame(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  EXPECT_TRUE(!a.defined() || at::equal(a, b));
}

void ExpectSameMatrices(const DecoderWeights& a, const DecoderWeights& b) {
  std::vector<at::Tensor> of_a, of_b;
  const auto list = [](std::vector<at::Tensor>& into) {
    return [&into](const at::Tensor& matrix) {
      into.push_back(matrix);
      return matrix;
    };
  };
  static_cast<void>(testing::WithMatrices(a, list(of_a)));
  static_cast<void>(testing::WithMatrices(b, list(of_b)));
  ASSERT_EQ(of_a.size(), of_b.size());
  for (size_t i = 0; i < of_a.size(); ++i) ExpectSame(of_a[i], of_b[i]);
}

// The tiny batch has few rows. For few rows, the kernels for f32 weights and
// for 8-bit weights add in the same order.
TEST(Int8DecoderTest, HasTheBitsOfTheWidenedWeights) {
  for (const testing::Family& family : testing::Families()) {
    SCOPED_TRACE(family.name);
    const Decoder plain = testing::MakeDecoder(family, at::kFloat);
    const DecoderWeights stored = Quantized(plain.weights());
    const model_config::ModelConfig& config = plain.config();
    const Decoder narrow(config, stored, config.max_positions);
    const Decoder wide(config, Widened(stored), config.max_positions);
    EXPECT_EQ(narrow.dtype(), at::kFloat);
    const PackedBatch batch = testing::MakeBatch(narrow);
    const testing::TrainResult actual =
        testing::Train(narrow, batch, /*num_recomputed=*/1);
    const testing::TrainResult expected =
        testing::Train(wide, batch, /*num_recomputed=*/1);
    EXPECT_TRUE(at::equal(actual.y_TH, expected.y_TH));
    for (size_t i = 0; i < expected.gradients.size(); ++i) {
      EXPECT_TRUE(at::equal(actual.gradients[i], expected.gradients[i]));
    }
    EXPECT_FALSE(at::equal(
        testing::Train(plain, batch, /*num_recomputed=*/0).y_TH, actual.y_TH));
  }
}

class Int8LoadTest : public ::testing::Test {
 protected:
  Int8LoadTest() : config_(TinyConfig(/*num_layers=*/2)) {
    at::manual_seed(37);
    config_.qkv_bias = config_.o_bias = true;
    config_.qk_norm = model_config::QkNorm::kHead;
    config_.norms_from_one = true;
    config_.ffn = 136;  // Three groups, the last of which is short.
  }

  absl::StatusOr<DecoderWeights> Load(const weights::Checkpoint& checkpoint,
                                      model_config::MatrixFormat format,
                                      const parallel::Shard& shard = {}) const {
    return LoadDecoderWeights(checkpoint, config_, at::kFloat, at::kCPU, shard,
                              format);
  }

  model_config::ModelConfig config_;
};

TEST_F(Int8LoadTest, ARankQuantisesItsPartOfEveryMatrixAndReadsNoOtherByte) {
  for (const bool tied : {false, true}) {
    config_.tied_embeddings = tied;
    const CheckpointOfConfig files(config_);
    for (const int size : {1, 2}) {
      for (int rank = 0; rank < size; ++rank) {
        const parallel::Shard shard{.rank = rank, .size = size};
        const auto checkpoint = files.Open();
        const uint64_t before = checkpoint->bytes_read();
        const auto plain =
            Load(*checkpoint, model_config::MatrixFormat::kDtype, shard)
                .value();
        const uint64_t between = checkpoint->bytes_read();
        const auto narrow =
            Load(*checkpoint, model_config::MatrixFormat::kInt8, shard).value();
        EXPECT_EQ(checkpoint->bytes_read() - between, between - before);
        ExpectSameMatrices(narrow, Quantized(plain));
        EXPECT_EQ(narrow.head_VH.is_same(narrow.embedding_VH), tied);
        EXPECT_EQ(narrow.embedding_VH.stride(0),
                  ops::Int8RowStride(config_.hidden));
        ExpectSame(narrow.final_norm_H, plain.final_norm_H);
        ExpectSame(narrow.layers[1].qkv.bias_O, plain.layers[1].qkv.bias_O);
        EXPECT_EQ(static_cast<int64_t>(narrow.embedding_VH.storage().nbytes()),
                  model_config::WeightBytes(config_, /*element_bytes=*/4, shard,
                                            model_config::MatrixFormat::kInt8));
      }
    }
  }
}

TEST_F(Int8LoadTest, RefusesByNameWhatIsNotFinite) {
  for (const float bad : {INFINITY, NAN}) {
    CheckpointOfConfig files(config_);
    const std::string name = "model.layers.1.mlp.down_proj.weight";
    files.tensors.at(name)[3][100] = bad;
    const auto checkpoint = files.Open();
    EXPECT_THAT(Load(*checkpoint, model_config::MatrixFormat::kDtype), IsOk());
    EXPECT_THAT(Load(*checkpoint, model_config::MatrixFormat::kInt8),
                IsStatus(absl::StatusCode::kInvalidArgument,
                         "'" + name + "' has a number that is not finite"));
  }
}

TEST_F(Int8LoadTest, ATiedHeadMayBeThereOnlyWithTheSameValues) {
  CheckpointOfConfig files(config_);
  at::Tensor head = files.tensors.at("model.embed_tokens.weight").clone();
  files.tensors["lm_head.weight"] = head;
  EXPECT_THAT(Load(*files.Open(), model_config::MatrixFormat::kInt8), IsOk());
  head[3][2] += 1;
  EXPECT_THAT(Load(*files.Open(), model_config::MatrixFormat::kInt8),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "tensor 'lm_head.weight' differs"));
}

TEST(MakeDummyWeights, OfRanksAreTheirPartsInEightBits) {
  model_config::ModelConfig config = TinyConfig(/*num_layers=*/2);
  config.tied_embeddings = false;
  config.moe.shape = {.count = 7,
                      .per_token = 2,
                      .ffn = 9,
                      .shared_ffn = 20,
                      .layers = {true, false}};
  const auto make = [&](const parallel::Shard& shard,
                        model_config::MatrixFormat format) {
    return MakeDummyWeights(config, at::kFloat, at::kCPU, /*seed=*/3, shard,
                            format);
  };
  const DecoderWeights whole = make({}, model_config::MatrixFormat::kDtype);
  for (int rank = 0; rank < 3; ++rank) {
    const parallel::Shard shard{.rank = rank, .size = 3};
    ExpectSameMatrices(make(shard, model_config::MatrixFormat::kInt8),
                       Quantized(testing::ShardWeights(whole, config, shard)));
  }
  ExpectSameMatrices(make({}, model_config::MatrixFormat::kInt8),
                     Quantized(whole));
}

}  // namespace
}  // namespace weft::model
