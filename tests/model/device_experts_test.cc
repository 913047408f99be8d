// Compares the CUDA code of a layer of experts with the layer on the CPU in
// f64. The CUDA code runs on the device of tests/support/host_device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "src/model/experts.h"
#include "src/ops/int8_weight.h"
#include "tests/model/device_decoder.h"
#include "tests/ops/quantized.h"
#include "tests/support/host_device/host_device.h"

namespace weft::testing {
namespace {

const at::TensorOptions kExact = at::kDouble;
const at::TensorOptions kBf16OnDevice =
    at::TensorOptions(at::kBFloat16).device(at::kCUDA);

constexpr int64_t kTokens = 64;
constexpr int kExperts = 6;

// The forward pass rounds products, sums and intermediate values when it stores
// them in bf16. A gradient has these roundings, and about twice as many of its
// own.
constexpr int64_t kForwardRoundings = 16;
constexpr int64_t kBackwardRoundings = 3 * kForwardRoundings;

// What distinguishes the layers of these tests.
struct Variant {
  std::string name;
  int64_t ffn = 16;
  int64_t shared_ffn = 0;
  bool has_biases = false;
  bool is_int8 = false;
  parallel::Range own = {.begin = 0, .end = kExperts};
  int compute_capability = 9;
};

std::vector<Variant> Variants() {
  return {{.name = "all at once"},
          {.name = "biases and a shared expert",
           .shared_ffn = 24,
           .has_biases = true},
          {.name = "widths of no vectors", .ffn = 9, .has_biases = true},
          {.name = "8 bits", .is_int8 = true},
          {.name = "a part of the experts", .has_biases = true, .own = {1, 4}},
          {.name = "a device without grouped products",
           .has_biases = true,
           .compute_capability = 8}};
}

class DeviceExpertsTest : public ::testing::Test {
 protected:
  DeviceExpertsTest() {
    at::set_num_threads(1);
    at::manual_seed(41);
  }
  ~DeviceExpertsTest() override { SetComputeCapability(9); }

  static void SetComputeCapability(int major) {
    cuda_on_host::compute_capability_major = major;
  }

  static model_config::ModelConfig ConfigOf(const Variant& variant) {
    model_config::ModelConfig config = TinyConfig(/*num_layers=*/2);
    config.hidden = 32;
    config.moe.shape = {.count = kExperts,
                        .per_token = 2,
                        .ffn = variant.ffn,
                        .shared_ffn = variant.shared_ffn,
                        .layers = {false, true},
                        .own = variant.own};
    config.moe.normalizes_weights = true;
    return config;
  }

  // Makes weights that are bf16 numbers.
  static model::ExpertWeights WeightsOf(const Variant& variant) {
    model_config::ModelConfig config = ConfigOf(variant);
    const model_config::ExpertShape& experts = config.moe.shape;
    const int64_t num_own = experts.num_own();
    model::ExpertWeights w = TinyExperts(config, at::kBFloat16);
    w.router_EH = w.router_EH / 4;
    w.gate_up_GH = w.gate_up_GH.narrow(0, 0, num_own * 2 * experts.ffn);
    w.down_DF = w.down_DF.narrow(0, 0, num_own * config.hidden);
    if (variant.has_biases) {
      w.gate_up_bias_G =
          RandomTensor({num_own * 2 * experts.ffn}, 0.5, at::kBFloat16);
      // The large bias makes expert outputs large. So the gradients of the
      // routing weights contribute visibly to dx.
      w.down_bias_D = RandomTensor({num_own * config.hidden}, 3, at::kBFloat16);
    }
    if (variant.is_int8) {
      w.gate_up_GH = QuantizedRows(w.gate_up_GH);
      w.down_DF = QuantizedRows(w.down_DF);
    }
    return w;
  }

  static model::ExpertWeights MovedTo(model::ExpertWeights w,
                                      const at::TensorOptions& options) {
    for (at::Tensor* tensor :
         {&w.router_EH, &w.gate_up_GH, &w.gate_up_bias_G, &w.down_DF,
          &w.down_bias_D, &w.shared_gate_up_S2H, &w.shared_down_HS,
          &w.shared_gate_1H}) {
      if (!tensor->defined()) continue;
      *tensor = ops::IsInt8(*tensor) ? Int8To(*tensor, options.device())
                                     : tensor->to(options);
    }
    return w;
  }

  // Makes two adapters of different ranks and modules, one that adapts no
  // expert, and rows without adapter.
  static lora::LoraRouting MakeRouting(
      const model_config::ModelConfig& config) {
    using enum TargetModule;
    const auto version = [&](const LoraConfig& lora) {
      return TinyVersion(config, lora, at::kBFloat16);
    };
    return {
        {.begin = 0, .end = 24, .version = version({.rank = 4, .alpha = 8})},
        {.begin = 26,
         .end = 50,
         .version = version({.rank = 20,
                             .alpha = 20,
                             .target_modules = {kQProj, kUpProj, kDownProj}})},
        {.begin = 50,
         .end = 58,
         .version =
             version({.rank = 3, .alpha = 3, .target_modules = {kQProj}})}};
  }

  // Gives expert 1 every token, expert 3 none, and the others the rest. So
  // some segments have too many rows for lora_few_rows.h, and some do not.
  static at::Tensor GivenExperts() {
    std::vector<int64_t> experts;
    for (int64_t token = 0; token < kTokens; ++token) {
      constexpr int64_t kOthers[] = {0, 2, 4, 5};
      experts.push_back(1);
      experts.push_back(kOthers[token % 4]);
    }
    return at::tensor(experts).view({kTokens, 2});
  }

  struct Results {
    at::Tensor y_TH;
    at::Tensor dx_TH;
    std::vector<at::Tensor> gradients;
  };
  // Runs a training step of layer 1. If `recomputes` is true, the backward pass
  // uses a recomputed tape.
  static Results Train(const model_config::ModelConfig& config,
                       const model::ExpertWeights& weights,
                       const at::TensorOptions& options, bool recomputes,
                       lora::LoraRouting routing) {
    at::manual_seed(43);
    const at::Tensor x_TH =
        RandomTensor({kTokens, config.hidden}, 1, at::kBFloat16).to(options);
    const at::Tensor dy_TH =
        RandomTensor({kTokens, config.hidden}, 1, at::kBFloat16).to(options);
    const model::ExpertWeights moved = MovedTo(weights, options);
    const model_config::ModelShape shape = config.shape();
    const model::ExpertLayer layer = {
        .layer = 1, .weights = moved, .config = config, .shape = shape};
    routing = BatchTo({.tokens_T = x_TH,
                       .positions_T = x_TH,
                       .routing = std::move(routing)},
                      options)
                  .routing;
    const lora::LoraGradients gradients = TinyGradients(routing);
    at::Tensor experts_TK = GivenExperts().to(options.device());
    model::ExpertTape tape;
    Results results;
    const auto table = [&](const lora::LoraGradients& of) {
      return lora::MakeRoutingTable(routing, of, shape, x_TH.scalar_type(),
                                    x_TH.device());
    };
    {
      const lora::RoutingTablePtr forward = table({});
      const lora::LoraPass pass = {routing, shape, forward.get()};
      results.y_TH =
          model::ForwardExperts(layer, x_TH, pass, experts_TK, &tape);
    }
    const lora::RoutingTablePtr backward = table(gradients);
    const lora::LoraPass pass = {routing, shape, backward.get()};
    if (recomputes) {
      tape = {};
      model::RecomputeExperts(layer, x_TH, pass, experts_TK, tape);
    }
    results.dx_TH =
        model::BackwardExperts(layer, dy_TH, x_TH, pass, gradients, tape);
    for (const lora::LoraGradient& gradient : gradients) {
      results.gradients.push_back(gradient.gradient_N);
    }
    return results;
  }

  static void ExpectSame(const Results& actual, const Results& expected) {
    ExpectNearInAll(actual.y_TH, expected.y_TH, kForwardRoundings, "y");
    ExpectNearInAll(actual.dx_TH, expected.dx_TH, kBackwardRoundings, "dx");
    for (size_t i = 0; i < expected.gradients.size(); ++i) {
      ExpectNearInAll(actual.gradients[i], expected.gradients[i],
                      kBackwardRoundings, "gradient " + std::to_string(i));
    }
  }

  const c10::InferenceMode no_autograd_;
};

TEST_F(DeviceExpertsTest, TrainsAsInF64) {
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    SetComputeCapability(variant.compute_capability);
    const model_config::ModelConfig config = ConfigOf(variant);
    const model::ExpertWeights weights = WeightsOf(variant);
    for (const bool has_adapters : {true, false}) {
      const lora::LoraRouting routing =
          has_adapters ? MakeRouting(config) : lora::LoraRouting{};
      const Results expected = Train(config, weights, kExact, false, routing);
      const Results actual =
          Train(config, weights, kBf16OnDevice, false, routing);
      ExpectSame(actual, expected);
      if (!has_adapters) continue;
      // A recomputed tape gives the same bits.
      const Results again =
          Train(config, weights, kBf16OnDevice, true, routing);
      EXPECT_TRUE(at::equal(again.dx_TH.cpu(), actual.dx_TH.cpu()));
      for (size_t i = 0; i < actual.gradients.size(); ++i) {
        EXPECT_TRUE(
            at::equal(again.gradients[i].cpu(), actual.gradients[i].cpu()));
      }
    }
  }
}

// A pass of decoding, which sorts the rows on the device, gives the bits of a
// pass for which the host sorts them. It does not wait, unless experts must be
// computed one by one or are on another rank.
TEST_F(DeviceExpertsTest, DecodesAsIfTheHostSortedTheRows) {
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    SetComputeCapability(variant.compute_capability);
    const model_config::ModelConfig config = ConfigOf(variant);
    const model::ExpertWeights weights =
        MovedTo(WeightsOf(variant), kBf16OnDevice);
    const model_config::ModelShape shape = config.shape();
    const model::ExpertLayer layer = {
        .layer = 1, .weights = weights, .config = config, .shape = shape};
    const at::Tensor x_TH =
        RandomTensor({kTokens, config.hidden}, 1, at::kBFloat16)
            .to(kBf16OnDevice);
    for (const bool has_adapters : {true, false}) {
      const lora::LoraRouting routing =
          has_adapters ? BatchTo({.tokens_T = x_TH,
                                  .positions_T = x_TH,
                                  .routing = MakeRouting(config)},
                                 kBf16OnDevice)
                             .routing
                       : lora::LoraRouting();
      const auto forward = [&](bool decode, model::ExpertTape* tape,
                               at::Tensor& experts_TK) {
        const lora::RoutingTablePtr table = lora::MakeRoutingTable(
            routing, {}, shape, at::kBFloat16, x_TH.device(), decode);
        return model::ForwardExperts(layer, x_TH, {routing, shape, table.get()},
                                     experts_TK, tape);
      };
      at::Tensor experts_TK, expected_experts_TK;
      model::ExpertTape tape;
      const at::Tensor expected_TH =
          forward(/*decode=*/false, &tape, expected_experts_TK);
      const DeviceRecording recording;
      const at::Tensor y_TH = forward(/*decode=*/true, nullptr, experts_TK);
      EXPECT_EQ(recording.events().waits.empty(), model::SortsOnDevice(layer));
      EXPECT_TRUE(at::equal(y_TH.cpu(), expected_TH.cpu()));
      EXPECT_TRUE(at::equal(experts_TK.cpu(), expected_experts_TK.cpu()));
    }
  }
}

// The host must count rows unless grouped products compute all experts.
TEST_F(DeviceExpertsTest, SortsOnTheDeviceIfThatIsEnough) {
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    SetComputeCapability(variant.compute_capability);
    const model_config::ModelConfig config = ConfigOf(variant);
    const model::ExpertWeights weights = WeightsOf(variant);
    const model_config::ModelShape shape = config.shape();
    const auto sorts = [&](const at::TensorOptions& options) {
      const model::ExpertWeights moved = MovedTo(weights, options);
      return model::SortsOnDevice(
          {.layer = 1, .weights = moved, .config = config, .shape = shape});
    };
    EXPECT_EQ(sorts(kBf16OnDevice),
              variant.name == "all at once" ||
                  variant.name == "biases and a shared expert");
    EXPECT_FALSE(sorts(kBf16OnDevice.dtype(at::kFloat)));
    EXPECT_FALSE(sorts(at::kBFloat16));
  }
}

// A rank may have none of the experts that a batch's tokens chose.
TEST_F(DeviceExpertsTest, ARankWithoutRowsAddsNothing) {
  const Variant variant = {.has_biases = true, .own = {3, 4}};
  const model_config::ModelConfig config = ConfigOf(variant);
  const Results results = Train(config, WeightsOf(variant), kBf16OnDevice,
                                false, MakeRouting(config));
  EXPECT_EQ(results.y_TH.abs().max().item<double>(), 0);
  for (const at::Tensor& gradient_N : results.gradients) {
    EXPECT_EQ(gradient_N.abs().max().item<double>(), 0);
  }
}

}  // namespace
}  // namespace weft::testing
