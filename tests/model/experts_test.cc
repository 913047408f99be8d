// Compares a layer of experts with the weighted sum of single experts, and the
// results of different batches with each other. tests/model compares the layer
// with autograd.
#include "src/model/experts.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "src/ops/gated_product.h"
#include "tests/ops/quantized.h"
#include "tests/support/tolerance.h"

namespace weft::model::experts_test {
namespace {

constexpr int64_t kHidden = 48;
constexpr int64_t kFfn = 20;
constexpr int kExperts = 6;

at::Tensor Stored(const at::Tensor& weight_OI, at::ScalarType dtype) {
  return dtype == at::kChar ? QuantizedRows(weight_OI) : weight_OI.to(dtype);
}

class ExpertsTest : public ::testing::Test {
 protected:
  ExpertsTest() {
    at::manual_seed(7);
    config_.num_layers = 1;
    config_.hidden = kHidden;
    config_.moe.shape = {
        .count = kExperts, .per_token = 2, .ffn = kFfn, .layers = {true}};
    config_.moe.normalizes_weights = true;
    shape_ = config_.shape();
    weights_.router_EH = at::randn({kExperts, kHidden});
    weights_.gate_up_GH = at::randn({kExperts * 2 * kFfn, kHidden}) * 0.2;
    weights_.down_DF = at::randn({kExperts * kHidden, kFfn}) * 0.2;
    version_ = std::make_shared<lora::AdapterVersion>();
    version_->layout = std::make_shared<lora::AdapterLayout>(
        shape_, LoraConfig{.rank = 3, .alpha = 6});
    version_->compute_N = at::randn({version_->layout->num_parameters()}) * 0.2;
  }

  at::Tensor Forward(const at::Tensor& x_TH, at::Tensor experts_TK = {}) const {
    return ForwardExperts(
        {.weights = weights_, .config = config_, .shape = shape_}, x_TH,
        {{{0, x_TH.size(0), version_}}, shape_}, experts_TK,
        /*tape=*/nullptr);
  }

  // Returns the output of one expert for all rows.
  at::Tensor One(const at::Tensor& x_TH, int expert) const {
    const lora::LoraRouting routing = {{0, x_TH.size(0), version_}};
    const model_config::ModelShape shape = shape_.OfExpert(expert);
    const at::Tensor gate_up = lora::LoraLinear(
        x_TH, {weights_.gate_up_GH.narrow(0, expert * 2 * kFfn, 2 * kFfn), {}},
        {routing, shape}, {0, lora::ProjectionGroup::kGateUp, expert}, nullptr);
    return lora::LoraLinear(
        ops::GatedProduct(ops::Activation::kSilu, gate_up),
        {weights_.down_DF.narrow(0, expert * kHidden, kHidden), {}},
        {routing, shape}, {0, lora::ProjectionGroup::kDown, expert}, nullptr);
  }

  model_config::ModelConfig config_;
  model_config::ModelShape shape_;
  ExpertWeights weights_;
  std::shared_ptr<lora::AdapterVersion> version_;
};

TEST_F(ExpertsTest, AllTokensMayGoToTheSameExperts) {
  const at::Tensor x_TH = at::randn({40, kHidden});
  const at::Tensor experts_TK =
      at::tensor(std::vector<int64_t>{4, 1}).repeat({40, 1});
  const Routing routing =
      Route(x_TH, {weights_.router_EH, weights_.router_bias_E}, config_.moe,
            experts_TK);
  const at::Tensor expected =
      One(x_TH, 4) * routing.weights_TK.narrow(1, 0, 1) +
      One(x_TH, 1) * routing.weights_TK.narrow(1, 1, 1);
  const double bound = Tolerance(kEpsilonF32, kHidden + kFfn,
                                 expected.abs().max().item<double>());
  EXPECT_LE((Forward(x_TH, experts_TK) - expected).abs().max().item<double>(),
            bound);
}

// Products of at most 32 rows use other kernels than products of more rows. The
// results differ only by rounding.
TEST_F(ExpertsTest, ATokenDoesNotDependOnTheOthersBeyondRounding) {
  const at::Tensor x_TH = at::randn({300, kHidden});
  const at::Tensor all_TH = Forward(x_TH);
  const double bound =
      Tolerance(kEpsilonF32, kHidden + kFfn, all_TH.abs().max().item<double>());
  for (const int64_t begin : {0, 17, 120}) {
    const at::Tensor few_TH = x_TH.narrow(0, begin, 9).contiguous();
    EXPECT_LE((Forward(few_TH) - all_TH.narrow(0, begin, 9))
                  .abs()
                  .max()
                  .item<double>(),
              bound);
  }
}

// If every expert has few rows, one kernel computes all products row by row.
TEST_F(ExpertsTest, AmongFewRowsATokenHasTheSameBitsInEveryBatch) {
  const at::Tensor x_TH = at::randn({12, kHidden});
  const at::Tensor all_TH = Forward(x_TH);
  for (int64_t row = 0; row < 12; ++row) {
    EXPECT_TRUE(at::equal(Forward(x_TH.narrow(0, row, 1).contiguous())[0],
                          all_TH[row]));
  }
}

// A tape needs tensors for every expert. Without a tape, few rows pass through
// the same kernels on raw memory.
TEST_F(ExpertsTest, FewRowsHaveTheSameBitsWithATape) {
  const auto bias = [](int64_t features) {
    return at::randn({kExperts * features});
  };
  for (const at::ScalarType stored : {at::kFloat, at::kBFloat16, at::kChar}) {
    for (const bool has_bias : {false, true}) {
      ExpertWeights weights = weights_;
      weights.gate_up_GH = Stored(weights_.gate_up_GH, stored);
      weights.down_DF = Stored(weights_.down_DF, stored);
      if (has_bias) {
        weights.gate_up_bias_G = bias(2 * kFfn);
        weights.down_bias_D = bias(kHidden);
      }
      const ExpertLayer layer = {
          .weights = weights, .config = config_, .shape = shape_};
      for (const int64_t tokens : {1, 4, 30}) {
        const at::Tensor x_TH = at::randn({tokens, kHidden});
        // The last row has no adapter.
        const lora::LoraRouting routing = {{0, tokens - 1, version_}};
        at::Tensor experts_TK, tape_experts_TK;
        ExpertTape tape;
        const at::Tensor with_tape = ForwardExperts(
            layer, x_TH, {routing, shape_}, tape_experts_TK, &tape);
        const at::Tensor without =
            ForwardExperts(layer, x_TH, {routing, shape_}, experts_TK, nullptr);
        // LibTorch may fuse the addition of the bias, which changes rounding.
        const double bound =
            has_bias ? Tolerance(kEpsilonF32, 4,
                                 with_tape.abs().max().item<double>())
                     : 0;
        EXPECT_LE((without - with_tape).abs().max().item<double>(), bound)
            << stored << ", bias " << has_bias << ", " << tokens << " tokens";
        EXPECT_TRUE(at::equal(experts_TK, tape_experts_TK));
      }
    }
  }
}

// Every expert and every segment has many rows.
TEST_F(ExpertsTest, AmongManyRowsATokenHasTheSameBitsInEveryBatch) {
  const at::Tensor x_TH = at::randn({150, kHidden});
  std::vector<int64_t> experts;
  for (int64_t token = 0; token < 150; ++token) {
    experts.push_back(token % 3);
    experts.push_back(3 + token % 2);
  }
  const at::Tensor experts_TK = at::tensor(experts).view({150, 2});
  const at::Tensor all_TH = Forward(x_TH, experts_TK);
  for (const int64_t count : {102, 120, 149}) {
    EXPECT_TRUE(at::equal(Forward(x_TH.narrow(0, 0, count).contiguous(),
                                  experts_TK.narrow(0, 0, count).contiguous()),
                          all_TH.narrow(0, 0, count)));
  }
}

}  // namespace
}  // namespace weft::model::experts_test
