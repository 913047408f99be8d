#include "src/model/router.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>

#include "tests/support/dtype_name.h"
#include "tests/support/tensors_near.h"

namespace weft::model::router_test {
namespace {

constexpr int kTokens = 11;
constexpr int kHidden = 16;
constexpr int kExperts = 9;
constexpr int kPerToken = 3;

const at::Tensor none;  // A router without bias.

model_config::MoeConfig Config(bool normalizes) {
  model_config::MoeConfig config;
  config.shape.count = kExperts;
  config.shape.per_token = kPerToken;
  config.normalizes_weights = normalizes;
  return config;
}

at::Tensor Random(int64_t rows, int64_t columns) {
  return at::randn({rows, columns}, at::kDouble);
}

// The bound of the rounding errors of values up to `magnitude` in f64.
double Bound(double magnitude) {
  return Tolerance(kEpsilonF64, kHidden + 2 * kExperts, magnitude);
}

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                double bound) {
  EXPECT_LE(MaxAbs(actual - expected), bound);
}

TEST(RouteTest, GradientsAreThoseOfAutograd) {
  for (const bool normalizes : {false, true}) {
    at::manual_seed(3);
    const at::Tensor router_EH = Random(kExperts, kHidden);
    const at::Tensor d_weights_TK = Random(kTokens, kPerToken);
    const at::Tensor x_TH = Random(kTokens, kHidden).requires_grad_(true);
    at::Tensor weights_TK =
        std::get<0>(at::mm(x_TH, router_EH.t()).softmax(1).topk(kPerToken, 1));
    if (normalizes) weights_TK = weights_TK / weights_TK.sum(1, true);
    const at::Tensor expected =
        torch::autograd::grad({weights_TK}, {x_TH}, {d_weights_TK})[0];

    const model_config::MoeConfig config = Config(normalizes);
    const Routing routing = Route(x_TH.detach(), {router_EH, none}, config, {});
    ExpectNear(routing.weights_TK, weights_TK, Bound(1));
    ExpectNear(RouteBackward(d_weights_TK, routing, router_EH, config),
               expected, Bound(MaxAbs(expected)));
  }
}

// gpt-oss adds a bias to the logits, chooses experts by these logits, and takes
// the softmax of only the chosen logits.
// Otherwise a token's experts would depend on the tokens of other tenants.
TEST(RouteTest, AmongManyRowsATokenHasTheSameBitsInEveryBatch) {
  at::manual_seed(4);
  constexpr int64_t kRows = 300, kWidth = 200;
  const at::Tensor router_EH = at::randn({kExperts, kWidth});
  const at::Tensor gate_1H = at::randn({1, kWidth});
  const at::Tensor x_TH = at::randn({kRows, kWidth});
  const at::Tensor d_weights_TK = at::randn({kRows, kPerToken});
  const model_config::MoeConfig config = Config(/*normalizes=*/true);
  const auto results = [&](int64_t count) {
    const at::Tensor rows = x_TH.narrow(0, 0, count).contiguous();
    const Routing routing = Route(rows, {router_EH, none}, config, {});
    return std::tuple(routing.weights_TK, SharedWeight(rows, gate_1H),
                      RouteBackward(d_weights_TK.narrow(0, 0, count), routing,
                                    router_EH, config));
  };
  const auto [weights_TK, shared_T1, dx_TH] = results(kRows);
  for (const int64_t count : {33, 102, 150, 299}) {
    SCOPED_TRACE(count);
    const auto [weights, shared, dx] = results(count);
    EXPECT_TRUE(at::equal(weights, weights_TK.narrow(0, 0, count)));
    EXPECT_TRUE(at::equal(shared, shared_T1.narrow(0, 0, count)));
    EXPECT_TRUE(at::equal(dx, dx_TH.narrow(0, 0, count)));
  }
}

TEST(RouteTest, TheSoftmaxMayBeThatOfTheChosen) {
  at::manual_seed(4);
  model_config::MoeConfig config = Config(/*normalizes=*/false);
  config.softmax_of_chosen = true;
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor bias_E = at::randn({kExperts}, at::kDouble) * 3;
  const at::Tensor d_weights_TK = Random(kTokens, kPerToken);
  const at::Tensor x_TH = Random(kTokens, kHidden).requires_grad_(true);
  const auto [top_TK, experts_TK] =
      (at::mm(x_TH, router_EH.t()) + bias_E).topk(kPerToken, 1);
  const at::Tensor weights_TK = top_TK.softmax(1);
  const at::Tensor expected =
      torch::autograd::grad({weights_TK}, {x_TH}, {d_weights_TK})[0];

  const Routing routing = Route(x_TH.detach(), {router_EH, bias_E}, config, {});
  EXPECT_TRUE(at::equal(routing.experts_TK, experts_TK));
  ExpectNear(routing.weights_TK, weights_TK, Bound(1));
  ExpectNear(RouteBackward(d_weights_TK, routing, router_EH, config), expected,
             Bound(MaxAbs(expected)));
}

// GLM-4.5 chooses experts, first by groups, from corrected sigmoids. The
// weights are the sigmoids themselves, divided by their sum and scaled.
TEST(RouteTest, SigmoidsAreCorrectedOnlyForTheChoice) {
  at::manual_seed(5);
  model_config::MoeConfig config = Config(/*normalizes=*/true);
  config.sigmoid = true;
  config.weight_scale = 2.5;
  config.groups = 3;
  config.chosen_groups = 2;
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor correction_E = at::randn({kExperts}, at::kDouble);
  const at::Tensor d_weights_TK = Random(kTokens, kPerToken);
  const at::Tensor x_TH = Random(kTokens, kHidden).requires_grad_(true);
  const at::Tensor scores_TE = at::mm(x_TH, router_EH.t()).sigmoid();
  at::Tensor choice_TE = (scores_TE + correction_E).detach().clone();
  const at::Tensor by_group = choice_TE.view({kTokens, 3, 3});
  const at::Tensor worst = std::get<0>(by_group.topk(2, 2)).sum(2).argmin(1);
  for (int t = 0; t < kTokens; ++t) by_group[t][worst[t]] = -1e9;
  const at::Tensor experts_TK = std::get<1>(choice_TE.topk(kPerToken, 1));
  at::Tensor weights_TK = scores_TE.gather(1, experts_TK);
  weights_TK = weights_TK / weights_TK.sum(1, true) * 2.5;
  const at::Tensor expected =
      torch::autograd::grad({weights_TK}, {x_TH}, {d_weights_TK})[0];

  const Routing routing =
      Route(x_TH.detach(), {router_EH, none, correction_E}, config, {});
  EXPECT_TRUE(at::equal(routing.experts_TK, experts_TK));
  ExpectNear(routing.weights_TK, weights_TK, Bound(2.5));
  ExpectNear(RouteBackward(d_weights_TK, routing, router_EH, config), expected,
             2.5 * Bound(MaxAbs(expected)));
  const Routing given = Route(x_TH.detach(), {router_EH, none, correction_E},
                              config, experts_TK.flip(1), /*all_given=*/true);
  ExpectNear(given.weights_TK.flip(1), routing.weights_TK, Bound(2.5));
}

// transformers computes GLM-4.5's logits in f32, but MiniMax's in the model's
// dtype.
TEST(RouteTest, LogitsOfAModelInBf16MayBeWide) {
  at::manual_seed(9);
  model_config::MoeConfig config = Config(/*normalizes=*/true);
  config.sigmoid = true;
  const at::Tensor router_EH = Random(kExperts, kHidden).to(at::kBFloat16);
  const at::Tensor x_TH = Random(kTokens, kHidden).to(at::kBFloat16);
  const at::Tensor d_weights_TK = Random(kTokens, kPerToken).to(at::kBFloat16);
  const RouterWeights weights = {router_EH, none, at::zeros({kExperts})};
  const at::Tensor wide_x_TH = x_TH.to(at::kDouble).requires_grad_(true);
  const at::Tensor logits_TE = at::mm(wide_x_TH, router_EH.to(at::kDouble).t());
  const at::Tensor scores_TE = logits_TE.sigmoid();
  const at::Tensor rounded_TE = at::mm(x_TH, router_EH.t());
  EXPECT_TRUE(at::allclose(Route(x_TH, weights, config, {}).probs,
                           rounded_TE.to(at::kFloat).sigmoid()));

  config.wide_logits = true;
  const Routing routing = Route(x_TH, weights, config, {});
  const double bound = Tolerance(kEpsilonF32, kHidden,
                                 logits_TE.detach().abs().max().item<double>());
  EXPECT_LE((routing.probs - scores_TE.detach()).abs().max().item<double>(),
            bound);
  EXPECT_EQ(routing.weights_TK.scalar_type(), at::kBFloat16);
  const at::Tensor chosen_TK = scores_TE.gather(1, routing.experts_TK);
  const at::Tensor expected =
      torch::autograd::grad({chosen_TK / chosen_TK.sum(1, true)}, {wide_x_TH},
                            {d_weights_TK.to(at::kDouble)})[0];
  const at::Tensor actual =
      RouteBackward(d_weights_TK, routing, router_EH, config);
  EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
  // Only the result is rounded to bf16.
  const double largest = expected.abs().max().item<double>();
  EXPECT_LE((actual - expected).abs().max().item<double>(),
            StoredTolerance(kEpsilonBf16, kHidden, largest * kHidden, largest));
}

// GLM-4.5 divides by the sum of the sigmoids plus 1e-20.
TEST(RouteTest, WeightsOfScoresThatAreZeroAreZero) {
  model_config::MoeConfig config = Config(/*normalizes=*/true);
  config.sigmoid = true;
  config.sum_epsilon = 1e-20;
  const at::Tensor x_TH = at::full({1, kHidden}, -100.0F);
  const at::Tensor router_EH = at::ones({kExperts, kHidden});
  const Routing routing =
      Route(x_TH, {router_EH, none, at::zeros({kExperts})}, config, {});
  EXPECT_TRUE(at::equal(routing.weights_TK, at::zeros({1, kPerToken})));
  EXPECT_TRUE(at::equal(
      RouteBackward(at::ones({1, kPerToken}), routing, router_EH, config),
      at::zeros({1, kHidden})));
}

// Probabilities of experts far below the best one round to zero.
TEST(RouteTest, GivenExpertsMayBeVeryImprobable) {
  model_config::MoeConfig config = Config(/*normalizes=*/false);
  config.shape.per_token = 2;
  config.softmax_of_chosen = true;
  const at::Tensor bias_E = at::arange(kExperts, at::kFloat) * 200;
  const Routing routing =
      Route(at::zeros({1, kHidden}), {at::zeros({kExperts, kHidden}), bias_E},
            config, at::arange(1, -1, -1).view({1, 2}));
  EXPECT_TRUE(at::allclose(routing.weights_TK, at::eye(1, 2)));
}

// For f32 on a CPU, the router has its own loop over the rows. For f64, it uses
// LibTorch's operators.
class RouteDtypeTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static at::Tensor Random(int64_t rows, int64_t columns) {
    return at::randn({rows, columns}, GetParam());
  }
};

TEST_P(RouteDtypeTest, TakesTheExpertsThatItIsGiven) {
  at::manual_seed(5);
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor x_TH = Random(kTokens, kHidden);
  const model_config::MoeConfig config = Config(/*normalizes=*/true);
  const Routing own = Route(x_TH, {router_EH, none}, config, {});
  const Routing again = Route(x_TH, {router_EH, none}, config, own.experts_TK);
  EXPECT_TRUE(at::equal(again.weights_TK, own.weights_TK));
  const at::Tensor others_TK = (own.experts_TK + 1) % kExperts;
  const Routing other = Route(x_TH, {router_EH, none}, config, others_TK);
  EXPECT_TRUE(at::equal(other.experts_TK, others_TK));
  const at::Tensor wanted = own.probs.gather(1, others_TK);
  EXPECT_TRUE(at::allclose(other.weights_TK, wanted / wanted.sum(1, true),
                           GetParam() == at::kDouble ? 1e-12 : 1e-6));
  const Routing known =
      Route(x_TH, {router_EH, none}, config, others_TK, /*all_given=*/true);
  EXPECT_TRUE(at::equal(known.weights_TK, other.weights_TK));
}

TEST_P(RouteDtypeTest, ChoosesForTheRowsWithoutGivenExperts) {
  at::manual_seed(6);
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor x_TH = Random(kTokens, kHidden);
  const model_config::MoeConfig config = Config(/*normalizes=*/true);
  const Routing own = Route(x_TH, {router_EH, none}, config, {});
  at::Tensor given_TK = (own.experts_TK + 1) % kExperts;
  given_TK[1].fill_(-1);
  const Routing mixed = Route(x_TH, {router_EH, none}, config, given_TK);
  EXPECT_TRUE(at::equal(mixed.experts_TK[0], given_TK[0]));
  EXPECT_TRUE(at::equal(mixed.experts_TK[1], own.experts_TK[1]));
  EXPECT_TRUE(at::equal(mixed.weights_TK[1], own.weights_TK[1]));
}

TEST_P(RouteDtypeTest, RefusesAGivenExpertThatDoesNotExist) {
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor given_TK = at::full({1, kPerToken}, kExperts, at::kLong);
  EXPECT_THROW((void)Route(Random(1, kHidden), {router_EH, none}, Config(true),
                           given_TK),
               c10::Error);
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, RouteDtypeTest,
                         ::testing::Values(at::kFloat, at::kDouble),
                         weft::testing::DtypeName);

// Returns the routing that LibTorch's operators compute from the logits.
Routing RouteOfLogits(const at::Tensor& logits_TE,
                      const model_config::MoeConfig& config) {
  const at::Tensor scores_TE =
      config.softmax_of_chosen ? logits_TE : logits_TE.softmax(1);
  auto [weights_TK, experts_TK] = scores_TE.topk(config.shape.per_token, 1);
  if (config.softmax_of_chosen) {
    weights_TK = weights_TK.softmax(1);
  } else if (config.normalizes_weights) {
    weights_TK = weights_TK / weights_TK.sum(1, true);
  }
  return {.experts_TK = experts_TK, .weights_TK = weights_TK, .probs = {}};
}

// The logits are small whole numbers, so most of them occur more than once in
// their row.
TEST(RouteTest, BreaksTiesAsTopKDoes) {
  at::manual_seed(8);
  for (const int num_experts : {8, 9, 64, 128, 512}) {
    for (const int per_token : {1, 2, 5, 8}) {
      for (const int form : {0, 1, 2}) {
        SCOPED_TRACE(::testing::Message()
                     << num_experts << " experts, " << per_token
                     << " per token, form " << form);
        model_config::MoeConfig config = Config(/*normalizes=*/form == 1);
        config.softmax_of_chosen = form == 2;
        config.shape.count = num_experts;
        config.shape.per_token = per_token;
        const at::Tensor logits_TE =
            at::randint(6, {40, num_experts}, at::kFloat);
        const Routing actual =
            Route(logits_TE, {at::eye(num_experts), none}, config, {});
        const Routing expected = RouteOfLogits(logits_TE, config);
        EXPECT_TRUE(at::equal(actual.experts_TK, expected.experts_TK));
        if (form == 1) {
          // The terms of a sum may be added in another order.
          EXPECT_LE((actual.weights_TK / expected.weights_TK - 1)
                        .abs()
                        .max()
                        .item<double>(),
                    per_token * kEpsilonF32);
        } else {
          EXPECT_TRUE(at::equal(actual.weights_TK, expected.weights_TK));
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::model::router_test
