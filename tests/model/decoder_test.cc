#include "src/model/decoder.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/reference_decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tolerance.h"

namespace weft::model {
namespace {

using ::weft::testing::kEpsilonF32;
using ::weft::testing::kEpsilonF64;
using ::weft::testing::ReferenceResult;
using ::weft::testing::RunReference;
using ::weft::testing::TinyConfig;
using ::weft::testing::TinyVersion;
using ::weft::testing::TinyWeights;
using ::weft::testing::Tolerance;

constexpr int64_t kRows = 26;

struct Family {
  std::string name;
  void (*change)(ModelConfig&);  // What makes it of TinyConfig.
};

// Of the tiny batch's paths some are longer than the windows, and a window ends
// inside the shared prompt.
void SlideEvenLayers(ModelConfig& config, int64_t window) {
  for (size_t i = 0; i < config.attention.size(); i += 2) {
    config.attention[i].rule.window = window;
  }
}

void MakeGemma(ModelConfig& config) {
  config.output_norms = true;
  config.scaled_embeddings = true;
  config.activation = ops::Activation::kGeluTanh;
  for (LayerAttention& layer : config.attention) layer.rule.scale = 0.25;
}

std::vector<Family> Families() {
  return {{"llama", [](ModelConfig&) {}},
          {"llama with biases",
           [](ModelConfig& config) {
             config.qkv_bias = config.o_bias = config.mlp_bias = true;
           }},
          {"qwen3", [](ModelConfig& config) { config.qk_norm = true; }},
          {"qwen2 with windows",
           [](ModelConfig& config) {
             config.qkv_bias = true;
             SlideEvenLayers(config, 4);
           }},
          {"gemma2",
           [](ModelConfig& config) {
             MakeGemma(config);
             SlideEvenLayers(config, 5);
             for (LayerAttention& layer : config.attention) {
               layer.rule.softcap = 2;
             }
           }},
          {"gemma3", [](ModelConfig& config) {
             MakeGemma(config);
             config.qk_norm = true;
             SlideEvenLayers(config, 3);
             config.attention.front().rope_table = 1;
           }}};
}

Decoder MakeDecoder(const Family& family, at::ScalarType dtype,
                    int num_layers = 2) {
  // On a model of this size threads wait for each other, no more.
  at::set_num_threads(1);
  at::manual_seed(17);
  ModelConfig config = TinyConfig(num_layers);
  if (num_layers > 0) family.change(config);
  DecoderWeights weights = TinyWeights(config, dtype);
  return {config, std::move(weights), config.max_positions};
}

// Rows 0-8 adapter 1 (two sequences; embedding and layers), 9-11 base model,
// 12-25 adapter 2: a prompt of 6 tokens with two completions, then a sequence
// of one token.
PackedBatch MakeBatch(const Decoder& decoder) {
  at::manual_seed(19);
  const ModelConfig& config = decoder.config();
  const std::vector<int32_t> positions = {0, 1, 2, 3, 4, 0, 1, 2, 3,
                                          0, 1, 2, 0, 1, 2, 3, 4, 5,
                                          6, 7, 8, 6, 7, 8, 9, 0};
  PackedBatch batch{.tokens_T = at::randint(config.vocab, {kRows}, at::kLong),
                    .positions_T = at::tensor(positions, at::kInt),
                    .nodes = {{0, 5, -1, 5},
                              {5, 9, -1, 9},
                              {9, 12, -1, 12},
                              {12, 18, -1, 25},
                              {18, 21, 3, 21},
                              {21, 25, 3, 25},
                              {25, 26, -1, 26}}};
  // A token twice in a segment.
  batch.tokens_T[7] = batch.tokens_T[0];
  LoraConfig most = {.rank = 3,
                     .alpha = 6,
                     .overrides = {{1, TargetModule::kVProj, {2, 5}},
                                   {1, TargetModule::kUpProj, {}}}};
  if (config.num_layers == 0) most.overrides.clear();
  most.target_modules.push_back(TargetModule::kEmbedTokens);
  const LoraConfig some = {
      .rank = 5,
      .alpha = 5,
      .target_modules = {TargetModule::kQProj, TargetModule::kUpProj}};
  const lora::AdapterVersionPtr versions[] = {
      TinyVersion(config, most, decoder.dtype()),
      TinyVersion(config, some, decoder.dtype())};
  batch.routing = {{.begin = 0, .end = 9, .version = versions[0]},
                   {.begin = 12, .end = 26, .version = versions[1]}};
  return batch;
}

struct Result {
  at::Tensor x_TH;  // The residual stream.
  at::Tensor y_TH;  // After the final norm.
  std::vector<at::Tensor> gradients;
};

// The loss weighs all features of all rows.
at::Tensor UpstreamGradient(const Decoder& decoder) {
  at::manual_seed(23);
  return at::randn({kRows, decoder.config().hidden}, at::kDouble)
      .to(decoder.dtype());
}

Result Train(const Decoder& decoder, PackedBatch batch, int num_recomputed) {
  for (lora::LoraSegment& segment : batch.routing) {
    segment.gradient_N = at::zeros_like(
        segment.version->compute_N,
        decoder.dtype() == at::kDouble ? at::kDouble : at::kFloat);
  }
  Tape tape;
  Result result;
  result.x_TH = decoder.ForwardLayers(Mode::kTrain, batch, &tape,
                                      num_recomputed, /*kv=*/nullptr);
  result.y_TH = decoder.FinalNorm(result.x_TH);
  decoder.BackwardLayers(
      batch, tape,
      decoder.FinalNormBackward(UpstreamGradient(decoder), result.x_TH));
  for (const lora::LoraSegment& segment : batch.routing) {
    result.gradients.push_back(segment.gradient_N);
  }
  return result;
}

at::Tensor Evaluate(const Decoder& decoder, const PackedBatch& batch) {
  return decoder.ForwardLayers(Mode::kEval, batch, /*tape=*/nullptr,
                               /*num_recomputed=*/0, /*kv=*/nullptr);
}

double MaxAbs(const at::Tensor& x) { return x.abs().max().item<double>(); }

// Roundings along the longest path: every reduction of every layer.
int64_t PathLength(const ModelConfig& config) {
  const lora::ModelShape shape = config.shape();
  return config.num_layers * (4 * config.hidden + shape.q_width + shape.ffn +
                              2 * config.head_dim + kRows);
}

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                double epsilon, int64_t reduction, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double tolerance =
      Tolerance(epsilon, reduction, std::max(1.0, MaxAbs(expected)));
  EXPECT_LE(MaxAbs(actual.to(at::kDouble) - expected), tolerance) << what;
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
      const Result actual = Train(decoder, batch, /*num_recomputed=*/0);
      const int64_t path = PathLength(decoder.config());
      EXPECT_EQ(actual.y_TH.scalar_type(), dtype);
      ExpectNear(actual.y_TH, expected.y_TH, epsilon, path, "y");
      ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
      for (size_t i = 0; i < actual.gradients.size(); ++i) {
        // There and back again.
        ExpectNear(actual.gradients[i], expected.gradients[i], epsilon,
                   2 * path, "gradient " + std::to_string(i));
      }
    }
  }
}

TEST(DecoderTest, GivesEveryAdaptedMatrixAGradient) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  const PackedBatch batch = MakeBatch(decoder);
  const Result result = Train(decoder, batch, /*num_recomputed=*/0);
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
    const Result kept = Train(decoder, batch, /*num_recomputed=*/0);
    for (const int num_recomputed : {1, 2, 3}) {
      const Result again = Train(decoder, batch, num_recomputed);
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
  EXPECT_FALSE(tape.layers[0].q_raw_TQC.defined());
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
  decoder.BackwardLayers(batch, tape, at::ones_like(x));
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

// On a CPU bf16 weights are stored, not computed with.
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
  const Result actual = Train(narrow, MakeBatch(narrow), /*num_recomputed=*/0);
  const Result expected = Train(wide, MakeBatch(narrow), /*num_recomputed=*/0);
  EXPECT_EQ(actual.y_TH.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(actual.y_TH, expected.y_TH));
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(actual.gradients[i], expected.gradients[i]));
  }
}

TEST(DecoderTest, KeepsNanOfOneAdapterFromTheOthers) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  PackedBatch batch = MakeBatch(decoder);
  const Result before = Train(decoder, batch, /*num_recomputed=*/0);
  auto bad = std::make_shared<lora::AdapterVersion>(*batch.routing[1].version);
  bad->compute_N = at::full_like(bad->compute_N, NAN);
  batch.routing[1].version = bad;
  const Result after = Train(decoder, batch, /*num_recomputed=*/0);
  EXPECT_TRUE(after.y_TH.slice(0, 12).isnan().all().item<bool>());
  EXPECT_TRUE(
      at::equal(before.y_TH.slice(0, 0, 12), after.y_TH.slice(0, 0, 12)));
  EXPECT_TRUE(at::equal(before.gradients[0], after.gradients[0]));
}

TEST(DecoderTest, SequencesDoNotSeeEachOther) {
  const Decoder decoder = MakeDecoder(Families()[0], at::kFloat);
  PackedBatch batch = MakeBatch(decoder);
  const at::Tensor before = Evaluate(decoder, batch);
  // Another first sequence, and another second completion of the prompt.
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
  const Result result = Train(decoder, batch, /*num_recomputed=*/0);
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
