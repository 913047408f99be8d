#include "src/model/decoder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/model/decoder_fixture.h"
#include "tests/model/reference_decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tolerance.h"

namespace weft::model {
namespace {

using ::weft::testing::Families;
using ::weft::testing::Family;
using ::weft::testing::kRows;
using ::weft::testing::MakeBatch;
using ::weft::testing::MakeDecoder;
using ::weft::testing::PathLength;
using ::weft::testing::ReferenceResult;
using ::weft::testing::RunReference;
using ::weft::testing::Train;
using ::weft::testing::TrainResult;
using ::weft::testing::UpstreamGradient;

at::Tensor Evaluate(const Decoder& decoder, const PackedBatch& batch) {
  return decoder.ForwardLayers(Mode::kEval, batch, /*tape=*/nullptr,
                               /*num_recomputed=*/0, /*kv=*/nullptr);
}

TEST(DecoderTest, MatchesDenseAutogradInF64) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const double epsilon = dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
    for (const Family& family : Families()) {
      SCOPED_TRACE(family.name);
      const Decoder decoder = MakeDecoder(family, dtype);
      const PackedBatch batch = MakeBatch(decoder);
      const ReferenceResult expected =
          RunReference(decoder.config(), decoder.weights(), batch,
                       UpstreamGradient(decoder));
      const TrainResult actual = Train(decoder, batch, /*num_recomputed=*/0);
      const int64_t path = PathLength(decoder.config());
      EXPECT_EQ(actual.y_TH.scalar_type(), dtype);
      ExpectNear(actual.y_TH, expected.y_TH, epsilon, path, "y");
      ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
      for (size_t i = 0; i < actual.gradients.size(); ++i) {
        // A gradient has the roundings of a forward and a backward pass.
        ExpectNear(actual.gradients[i], expected.gradients[i], epsilon,
                   2 * path, "gradient " + std::to_string(i));
      }
    }
  }
}

TEST(DecoderTest, GivesEveryAdaptedMatrixAGradient) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  const PackedBatch batch = MakeBatch(decoder);
  const TrainResult result = Train(decoder, batch, /*num_recomputed=*/0);
  for (size_t i = 0; i < batch.routing.size(); ++i) {
    const lora::AdapterVersion& version = *batch.routing[i].version;
    for (const lora::LoraFactor& factor : version.layout->factors()) {
      const at::Tensor& flat = result.gradients[i];
      EXPECT_GT(MaxAbs(version.A(flat, factor)), 0) << lora::ModulePath(factor);
      EXPECT_GT(MaxAbs(version.B(flat, factor)), 0) << lora::ModulePath(factor);
    }
  }
}

TEST(DecoderTest, RecomputedLayersGiveTheSameBits) {
  for (const Family& family : Families()) {
    SCOPED_TRACE(family.name);
    const Decoder decoder = MakeDecoder(family, at::kFloat, /*num_layers=*/3);
    const PackedBatch batch = MakeBatch(decoder);
    const TrainResult kept = Train(decoder, batch, /*num_recomputed=*/0);
    for (const int num_recomputed : {1, 2, 3}) {
      const TrainResult again = Train(decoder, batch, num_recomputed);
      EXPECT_TRUE(at::equal(again.x_TH, kept.x_TH));
      for (size_t i = 0; i < kept.gradients.size(); ++i) {
        EXPECT_TRUE(at::equal(again.gradients[i], kept.gradients[i]))
            << num_recomputed << " recomputed, segment " << i;
      }
    }
  }
}

TEST(DecoderTest, RecomputedLayersKeepTheirInputAlone) {
  const Decoder decoder = MakeDecoder(Families()[2], at::kFloat);
  const PackedBatch batch = MakeBatch(decoder);
  Tape tape;
  (void)decoder.ForwardLayers(Mode::kTrain, batch, &tape, /*num_recomputed=*/1,
                              /*kv=*/nullptr);
  ASSERT_EQ(tape.layers.size(), 2u);
  EXPECT_TRUE(tape.layers[0].x_in_TH.defined());
  EXPECT_FALSE(tape.layers[0].qkv_TW.defined());
  EXPECT_FALSE(tape.layers[0].qk_raw_TW.defined());
  EXPECT_FALSE(tape.layers[0].attention.out_THC.defined());
  EXPECT_FALSE(tape.layers[0].gate_up_T2F.defined());
  EXPECT_TRUE(tape.layers[0].shrunk_qkv.empty());
  EXPECT_TRUE(tape.layers[1].qkv_TW.defined());
  EXPECT_TRUE(tape.layers[1].gate_up_T2F.defined());
}

TEST(DecoderTest, TheBackwardPassFreesTheTape) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  const PackedBatch batch = MakeBatch(decoder);
  Tape tape;
  const at::Tensor x = decoder.ForwardLayers(Mode::kTrain, batch, &tape,
                                             /*num_recomputed=*/1, nullptr);
  decoder.BackwardLayers(batch, tape, at::ones_like(x), /*gradients=*/{});
  for (const LayerTape& layer : tape.layers) {
    EXPECT_FALSE(layer.x_in_TH.defined());
    EXPECT_FALSE(layer.qkv_TW.defined());
    EXPECT_TRUE(layer.shrunk_down.empty());
    EXPECT_FALSE(layer.mlp_raw_TH.defined());
  }
}

TEST(DecoderTest, EvaluatesExactlyWhatItTrains) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Family& family : Families()) {
      const Decoder decoder = MakeDecoder(family, dtype);
      const PackedBatch batch = MakeBatch(decoder);
      Tape tape;
      EXPECT_TRUE(at::equal(
          Evaluate(decoder, batch),
          decoder.ForwardLayers(Mode::kTrain, batch, &tape, 0, nullptr)));
    }
  }
}

// On a CPU, the decoder stores weights in bf16 but computes in f32.
TEST(DecoderTest, Bf16WeightsGiveTheBitsOfTheirWidenedValues) {
  const Decoder narrow = MakeDecoder(Families()[0], at::kBFloat16);
  DecoderWeights widened = narrow.weights();
  widened.embedding_VH = widened.embedding_VH.to(at::kFloat);
  widened.head_VH = widened.head_VH.to(at::kFloat);
  for (LayerWeights& layer : widened.layers) {
    for (lora::BaseLinear* linear :
         {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
      EXPECT_EQ(linear->weight_OI.scalar_type(), at::kBFloat16);
      linear->weight_OI = linear->weight_OI.to(at::kFloat);
    }
  }
  const Decoder wide(narrow.config(), std::move(widened),
                     narrow.config().max_positions);
  const TrainResult actual =
      Train(narrow, MakeBatch(narrow), /*num_recomputed=*/0);
  const TrainResult expected =
      Train(wide, MakeBatch(narrow), /*num_recomputed=*/0);
  EXPECT_EQ(actual.y_TH.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(actual.y_TH, expected.y_TH));
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(actual.gradients[i], expected.gradients[i]));
  }
}

TEST(DecoderTest, KeepsNanOfOneAdapterFromTheOthers) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  PackedBatch batch = MakeBatch(decoder);
  const TrainResult before = Train(decoder, batch, /*num_recomputed=*/0);
  auto bad = std::make_shared<lora::AdapterVersion>(*batch.routing[1].version);
  bad->compute_N = at::full_like(bad->compute_N, NAN);
  batch.routing[1].version = bad;
  const TrainResult after = Train(decoder, batch, /*num_recomputed=*/0);
  EXPECT_TRUE(after.y_TH.slice(0, 12).isnan().all().item<bool>());
  EXPECT_TRUE(
      at::equal(before.y_TH.slice(0, 0, 12), after.y_TH.slice(0, 0, 12)));
  EXPECT_TRUE(at::equal(before.gradients[0], after.gradients[0]));
}

TEST(DecoderTest, SequencesDoNotSeeEachOther) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  PackedBatch batch = MakeBatch(decoder);
  const at::Tensor before = Evaluate(decoder, batch);
  // Changes the first sequence and the prompt's second completion.
  for (const int64_t row : {0, 1, 2, 3, 4, 21, 22, 23, 24}) {
    batch.tokens_T[row] = (batch.tokens_T[row] + 1) % decoder.config().vocab;
  }
  const at::Tensor after = Evaluate(decoder, batch);
  EXPECT_TRUE(at::equal(before.slice(0, 5, 21), after.slice(0, 5, 21)));
  EXPECT_TRUE(at::equal(before.slice(0, 25), after.slice(0, 25)));
  EXPECT_FALSE(at::equal(before.slice(0, 21, 25), after.slice(0, 21, 25)));
}

TEST(DecoderTest, AModelWithoutLayersIsItsEmbedding) {
  const Decoder decoder =
      MakeDecoder(Families()[0], at::kFloat, /*num_layers=*/0);
  const PackedBatch batch = MakeBatch(decoder);
  const TrainResult result = Train(decoder, batch, /*num_recomputed=*/0);
  const ReferenceResult expected = RunReference(
      decoder.config(), decoder.weights(), batch, UpstreamGradient(decoder));
  const int64_t path = 2 * decoder.config().hidden + kRows;
  ExpectNear(result.gradients[0], expected.gradients[0], kEpsilonF32, path,
             "gradient");
  EXPECT_EQ(result.gradients[1].numel(), 0);
  const at::Tensor base =
      decoder.weights().embedding_VH.index_select(0, batch.tokens_T);
  const at::Tensor x_TH = Evaluate(decoder, batch);
  EXPECT_TRUE(at::equal(x_TH.slice(0, 9), base.slice(0, 9)));
  EXPECT_FALSE(at::equal(x_TH.slice(0, 0, 9), base.slice(0, 0, 9)));
}

}  // namespace
}  // namespace weft::model
