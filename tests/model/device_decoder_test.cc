// Compares the decoder's CUDA code with the decoder on the CPU in f64. The CUDA
// code consists of all kernels and the code that passes tensors to them. The
// CUDA code runs on the device of tests/support/host_device.
#include "tests/model/device_decoder.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/model/decoder_fixture.h"
#include "tests/model/int8_weights.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/support/cuda_on_host/cuda_runtime_api.h"
#include "tests/support/host_device/host_device.h"

namespace weft::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

using model::Decoder;
using model::KvAccess;
using model::KvStore;
using model::Mode;
using model::PackedBatch;

const at::TensorOptions kExact = at::kDouble;
const at::TensorOptions kF32OnDevice =
    at::TensorOptions(at::kFloat).device(at::kCUDA);
const at::TensorOptions kBf16OnDevice =
    at::TensorOptions(at::kBFloat16).device(at::kCUDA);

// A layer rounds products, norms, sums and intermediate values when it stores
// them in bf16.
constexpr int64_t kRoundingsPerLayer = 16;
// A gated delta rule over chunks rounds the two operands of each of its four
// products in a row.
constexpr int64_t kRoundingsPerRule = 8;

int64_t RoundingsUpTo(const model_config::ModelConfig& config, int num_layers) {
  int64_t roundings = num_layers * kRoundingsPerLayer;
  for (int layer = 0; layer < num_layers; ++layer) {
    if (config.delta.InLayer(layer)) roundings += kRoundingsPerRule;
  }
  return roundings;
}

class DeviceDecoderTest : public ::testing::Test {
 protected:
  static constexpr int kLayers = 3;
  static constexpr int64_t kPageTokens = 4;

  DeviceDecoderTest() {
    at::set_num_threads(1);
    at::manual_seed(31);
  }

  // Two decoders with the same bf16 weights: one in f64, and one on the device.
  struct Pair {
    Pair()
        : Pair(WideConfig(kLayers),
               TinyWeights(WideConfig(kLayers), at::kBFloat16)) {}
    Pair(const model_config::ModelConfig& config,
         const model::DecoderWeights& weights)
        : Pair(config, weights, weights) {}
    // `stored` has the same numbers as `weights`, maybe in 8 bits.
    Pair(const model_config::ModelConfig& config,
         const model::DecoderWeights& weights,
         const model::DecoderWeights& stored)
        : exact(config, WeightsTo(weights, kExact), config.max_positions),
          on_device(config, WeightsTo(stored, kBf16OnDevice),
                    config.max_positions) {}
    Decoder exact;
    Decoder on_device;
  };

  // Makes a pair whose decoder on the device has matrices in 8 bits.
  static Pair Int8Pair() {
    const model_config::ModelConfig config = WideConfig(kLayers);
    const model::DecoderWeights stored =
        Quantized(TinyWeights(config, at::kBFloat16));
    return {config, Widened(stored), stored};
  }

  // Makes rows of two adapters and rows without one. One rank fits in a tile,
  // the other does not. The second adapter leaves out projections and gives one
  // projection another rank.
  static lora::LoraRouting MakeRouting(
      int64_t rows,
      const model_config::ModelConfig& config = WideConfig(kLayers)) {
    using enum TargetModule;
    const auto version = [&](const LoraConfig& lora) {
      return TinyVersion(config, lora, at::kBFloat16);
    };
    return {
        {.begin = 0,
         .end = rows / 4,
         .version = version({.rank = 8, .alpha = 4})},
        {.begin = rows / 4 + 1,
         .end = rows,
         .version = version(
             {.rank = 24,
              .alpha = 6,
              .target_modules = {kQProj, kVProj, kOProj, kUpProj, kDownProj},
              .overrides = {{1, kVProj, {.rank = 5, .alpha = 2}}}})}};
  }

  // Makes two prompts with continuations, and a single sequence.
  static PackedBatch MakeTrainBatch() {
    return {.tokens_T = at::randint(53, {40}, at::kLong),
            .positions_T =
                at::cat({at::arange(12), at::arange(8, 16), at::arange(20)})
                    .to(at::kInt),
            .nodes = {{0, 8, -1, 20},
                      {8, 12, 0, 12},
                      {12, 20, 0, 20},
                      {20, 40, -1, 40}},
            .routing = MakeRouting(40)};
  }

  static std::vector<at::Tensor> GradientsOf(const Decoder& decoder,
                                             const PackedBatch& batch,
                                             const at::Tensor& dx_TH,
                                             at::Tensor* x_TH) {
    model::Tape tape;
    *x_TH = decoder.ForwardLayers(Mode::kTrain, batch, &tape,
                                  /*num_recomputed=*/1, nullptr);
    std::vector<at::Tensor> result;
    const lora::LoraGradients gradients = TinyGradients(batch.routing);
    decoder.BackwardLayers(batch, tape, dx_TH.to(x_TH->options(), false, true),
                           gradients);
    for (const lora::LoraGradient& gradient : gradients) {
      result.push_back(gradient.gradient_N);
    }
    return result;
  }

  // Compares a training step in f64 with one on the device.
  static void ExpectSameStep(const Pair& pair, const PackedBatch& batch,
                             const at::Tensor& dx_TH) {
    at::Tensor expected_TH, actual_TH;
    const auto expected =
        GradientsOf(pair.exact, BatchTo(batch, kExact), dx_TH, &expected_TH);
    const auto actual = GradientsOf(
        pair.on_device, BatchTo(batch, kBf16OnDevice), dx_TH, &actual_TH);
    const model_config::ModelConfig& config = pair.exact.config();
    const int64_t forward = RoundingsUpTo(config, config.num_layers);
    ExpectNearInAll(actual_TH, expected_TH, forward, "x");
    // The backward pass has about twice as many roundings as the forward pass.
    for (size_t i = 0; i < expected.size(); ++i) {
      ExpectNearInAll(actual[i], expected[i], 3 * forward, "gradient");
    }
  }

  // Compares the same pass in f64 and on the device: its result, and what it
  // leaves in the pages and states.
  static void ExpectSamePass(const Pair& pair, const PackedBatch& batch,
                             const KvAccess& kv) {
    const model_config::ModelConfig& config = pair.exact.config();
    const int num_layers = config.num_layers;
    const KvStore store = RandomStore(config, /*num_pages=*/24, kPageTokens);
    KvStore exact_store = StoreTo(store, kExact);
    KvStore device_store = StoreTo(store, kBf16OnDevice);
    KvAccess exact_kv = AccessTo(kv, &exact_store, at::kCPU);
    KvAccess device_kv = AccessTo(kv, &device_store, at::kCUDA);
    const at::Tensor expected = pair.exact.ForwardLayers(
        Mode::kEval, BatchTo(batch, kExact), nullptr, 0, &exact_kv);
    const at::Tensor actual = pair.on_device.ForwardLayers(
        Mode::kEval, BatchTo(batch, kBf16OnDevice), nullptr, 0, &device_kv);
    ExpectNearInAll(actual, expected, RoundingsUpTo(config, num_layers), "x");
    for (int layer = 0; layer < num_layers; ++layer) {
      const int64_t roundings = RoundingsUpTo(config, layer + 1);
      if (config.delta.InLayer(layer)) {
        ExpectNearInAll(device_store.conv_NRW[layer],
                        exact_store.conv_NRW[layer], roundings, "conv rows");
        ExpectNearInAll(device_store.delta_NHKV[layer],
                        exact_store.delta_NHKV[layer], roundings, "states");
        continue;
      }
      ExpectNearInAll(device_store.k_pages_PSKC[layer],
                      exact_store.k_pages_PSKC[layer], roundings, "keys");
      ExpectNearInAll(device_store.v_pages_PSKC[layer],
                      exact_store.v_pages_PSKC[layer], roundings, "values");
    }
  }
  // Compares decoding for sequences of different lengths.
  static void ExpectSameDecoding(const Pair& pair, lora::LoraRouting routing) {
    const std::vector<int32_t> positions = {0, 4, 9, 2, 7, 15};
    const at::Tensor positions_T = at::tensor(positions, at::kInt);
    ExpectSamePass(pair,
                   {.tokens_T = at::arange(6) * 3 + 1,
                    .positions_T = positions_T,
                    .routing = std::move(routing)},
                   {.slots_T = at::arange(6) * 4 * kPageTokens + positions_T,
                    .decode = true,
                    .page_table_TL = at::arange(24, at::kInt).view({6, 4}),
                    .lengths_T = positions_T + 1,
                    .state_slots_Q = at::arange(6, 0, -1)});
  }

  const c10::InferenceMode no_autograd_;
};

TEST_F(DeviceDecoderTest, Trains) {
  const Pair pair;
  ExpectSameStep(pair, MakeTrainBatch(),
                 RandomTensor({40, 128}, 1, at::kBFloat16));
}

// The projections q, k and v have more than 64 ranks together. Their kernels
// must fit the compute capabilities 8.6, 8.9 and 12.0, too.
TEST_F(DeviceDecoderTest, TrainsHighRanksWithLittleSharedMemory) {
  cuda_on_host::max_shared_bytes = 99 << 10;
  const Pair pair;
  PackedBatch batch = MakeTrainBatch();
  batch.routing = {
      {.begin = 0,
       .end = 40,
       .version = TinyVersion(pair.exact.config(), {.rank = 40, .alpha = 8},
                              at::kBFloat16)}};
  ExpectSameStep(pair, batch, RandomTensor({40, 128}, 1, at::kBFloat16));
  cuda_on_host::max_shared_bytes = cuda_on_host::kSharedBytesOfHopper;
}

// qwen3 adds head norms and can use flash attention. gemma3 has windows, which
// flash attention does not support.
TEST_F(DeviceDecoderTest, TrainsOtherFamilies) {
  for (const Family& family : Families()) {
    if (family.name != "qwen3" && family.name != "gemma3") continue;
    SCOPED_TRACE(family.name);
    const Decoder decoder = MakeDecoder(family, at::kBFloat16);
    ExpectSameStep(Pair(decoder.config(), decoder.weights()),
                   MakeBatch(decoder), UpstreamGradient(decoder));
  }
}

TEST_F(DeviceDecoderTest, TrainsEveryFamilyInF32) {
  for (const Family& family : Families()) {
    SCOPED_TRACE(family.name);
    const Decoder exact = MakeDecoder(family, at::kDouble);
    const Decoder on_device(exact.config(),
                            WeightsTo(exact.weights(), kF32OnDevice),
                            exact.config().max_positions);
    const PackedBatch batch = MakeBatch(exact);
    at::Tensor dx_TH = UpstreamGradient(exact), expected_TH, actual_TH;
    const auto expected =
        GradientsOf(exact, BatchTo(batch, kExact), dx_TH, &expected_TH);
    const auto actual =
        GradientsOf(on_device, BatchTo(batch, kF32OnDevice), dx_TH, &actual_TH);
    const int64_t length = PathLength(exact.config());
    ExpectNear(actual_TH.cpu(), expected_TH, kEpsilonF32, length, "x");
    for (size_t i = 0; i < expected.size(); ++i) {
      ExpectNear(actual[i].cpu(), expected[i], kEpsilonF32, length, "gradient");
    }
  }
}

TEST_F(DeviceDecoderTest, Decodes) {
  const Pair pair;
  ExpectSameDecoding(pair, {});
  ExpectSameDecoding(pair, MakeRouting(6));
}

TEST_F(DeviceDecoderTest, DecodesAndTrainsWithWeightsOf8Bits) {
  const Pair pair = Int8Pair();
  ExpectSameDecoding(pair, {});
  ExpectSameDecoding(pair, MakeRouting(6));
  ExpectSameStep(pair, MakeTrainBatch(),
                 RandomTensor({40, 128}, 1, at::kBFloat16));
}

// The heads of the rule have the sizes for which a device has kernels over
// chunks.
class DeviceHybridTest : public DeviceDecoderTest {
 protected:
  static Pair HybridPair() {
    model_config::ModelConfig config = WideConfig(kLayers);
    config.delta = WideDelta();
    config.max_positions = 256;
    const model::DecoderWeights weights = HybridWeights(config, at::kBFloat16);
    return {config, weights};
  }

  static lora::LoraRouting Routing(const Pair& pair, int64_t rows) {
    using enum TargetModule;
    return {{.begin = rows / 3,
             .end = rows,
             .version = TinyVersion(
                 pair.exact.config(),
                 {.rank = 8,
                  .alpha = 4,
                  .target_modules = {kQProj, kInProjQkv, kOutProj, kDownProj}},
                 at::kBFloat16)}};
  }
};

// A prompt of a chunk is shared at its edge and inside of a chunk.
TEST_F(DeviceHybridTest, TrainsOverChunks) {
  const Pair pair = HybridPair();
  const at::Tensor positions = at::cat({at::arange(74), at::arange(74, 77),
                                        at::arange(64, 150), at::arange(70)})
                                   .to(at::kInt);
  const int64_t rows = positions.numel();
  const DeviceRecording recording;
  ExpectSameStep(pair,
                 {.tokens_T = at::randint(53, {rows}, at::kLong),
                  .positions_T = positions,
                  .nodes = {{0, 64, -1, 163},
                            {64, 74, 0, 77},
                            {74, 77, 1, 77},
                            {77, 163, 0, 163},
                            {163, rows, -1, rows}},
                  .routing = Routing(pair, rows)},
                 RandomTensor({rows, 128}, 1, at::kBFloat16));
  EXPECT_THAT(recording.events().launches,
              Contains(HasSubstr("DeltaRowsBackwardKernel")));
}

// The first sequence continues from a state, and the second one begins.
TEST_F(DeviceHybridTest, PrefillsOverChunks) {
  const Pair pair = HybridPair();
  const PackedBatch batch{
      .tokens_T = at::arange(75) * 3 % 53,
      .positions_T = at::cat({at::arange(5, 73), at::arange(7)}).to(at::kInt),
      .nodes = {{0, 68, -1, 68}, {68, 75, -1, 75}},
      .routing = Routing(pair, 75)};
  ExpectSamePass(pair, batch,
                 {.slots_T = at::cat({at::arange(5, 73), at::arange(80, 87)}),
                  .suffixes = {{0, 68, 0, 73}, {68, 7, 73, 7}},
                  .key_slots_S = at::cat({at::arange(73), at::arange(80, 87)}),
                  .state_slots_Q = at::tensor({3L, 1L})});
}

TEST_F(DeviceHybridTest, DecodesByTheRulesSteps) {
  const Pair pair = HybridPair();
  ExpectSameDecoding(pair, {});
  ExpectSameDecoding(pair, Routing(pair, 6));
}

TEST_F(DeviceDecoderTest, DecodesHighRanks) {
  const Pair pair;
  ExpectSameDecoding(pair, {{.begin = 1,
                             .end = 5,
                             .version = TinyVersion(pair.exact.config(),
                                                    {.rank = 129, .alpha = 64},
                                                    at::kBFloat16)}});
}

// The families have biases, norms of heads, windows, and norms after the
// projections o and down. Their widths are those of TinyConfig.
TEST_F(DeviceDecoderTest, DecodesOtherFamilies) {
  for (const Family& family : Families()) {
    const Decoder decoder = MakeDecoder(family, at::kBFloat16);
    if (decoder.config().shape().experts.count > 0) continue;
    SCOPED_TRACE(family.name);
    const Pair pair(decoder.config(), decoder.weights());
    ExpectSameDecoding(pair, {});
    ExpectSameDecoding(pair, MakeRouting(6, decoder.config()));
  }
}

// Prefills the last 9 of 14 tokens of one prompt, and a whole prompt of 7.
TEST_F(DeviceDecoderTest, Prefills) {
  const PackedBatch batch{
      .tokens_T = at::arange(16) * 3,
      .positions_T = at::cat({at::arange(5, 14), at::arange(7)}).to(at::kInt),
      .nodes = {{0, 9, -1, 9}, {9, 16, -1, 16}},
      .routing = MakeRouting(16)};
  ExpectSamePass(
      Pair(), batch,
      {.slots_T = at::cat({at::arange(5, 14), at::arange(40, 47)}),
       .suffixes = {{0, 9, 0, 14}, {9, 7, 14, 7}},
       .key_slots_S = at::cat({at::arange(14), at::arange(40, 47)})});
}

}  // namespace
}  // namespace weft::testing
