#include "src/moe/router.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>

#include "tests/support/tolerance.h"

namespace weft::moe {
namespace {

constexpr int kTokens = 11;
constexpr int kHidden = 16;
constexpr int kExperts = 9;
constexpr int kPerToken = 3;

model::MoeConfig Config(bool normalizes) {
  model::MoeConfig config;
  config.shape.count = kExperts;
  config.shape.per_token = kPerToken;
  config.normalizes_weights = normalizes;
  return config;
}

at::Tensor Random(int64_t rows, int64_t columns) {
  return at::randn({rows, columns}, at::kDouble);
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

    const model::MoeConfig config = Config(normalizes);
    const Routing routing = Route(x_TH.detach(), router_EH, config, {});
    const at::Tensor actual =
        RouteBackward(d_weights_TK, routing, router_EH, config);
    const int64_t reduction = kHidden + 2 * kExperts;
    const double bound =
        testing::Tolerance(testing::kEpsilonF64, reduction, 1.0);
    EXPECT_LE(
        (routing.weights_TK - weights_TK.detach()).abs().max().item<double>(),
        bound);
    EXPECT_LE((actual - expected).abs().max().item<double>(),
              bound * expected.abs().max().item<double>());
  }
}

TEST(RouteTest, TakesTheExpertsThatItIsGiven) {
  at::manual_seed(5);
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor x_TH = Random(kTokens, kHidden);
  const model::MoeConfig config = Config(/*normalizes=*/true);
  const Routing own = Route(x_TH, router_EH, config, {});
  const Routing again = Route(x_TH, router_EH, config, own.experts_TK);
  EXPECT_TRUE(at::equal(again.weights_TK, own.weights_TK));
  const at::Tensor others_TK = (own.experts_TK + 1) % kExperts;
  const Routing other = Route(x_TH, router_EH, config, others_TK);
  EXPECT_TRUE(at::equal(other.experts_TK, others_TK));
  const at::Tensor wanted = own.probs_TE.gather(1, others_TK);
  EXPECT_TRUE(
      at::allclose(other.weights_TK, wanted / wanted.sum(1, true), 1e-12));
  const Routing known = RouteTo(x_TH, router_EH, config, others_TK);
  EXPECT_TRUE(at::equal(known.weights_TK, other.weights_TK));
}

TEST(RouteTest, ChoosesForTheRowsWithoutGivenExperts) {
  at::manual_seed(6);
  const at::Tensor router_EH = Random(kExperts, kHidden);
  const at::Tensor x_TH = Random(kTokens, kHidden);
  const model::MoeConfig config = Config(/*normalizes=*/true);
  const Routing own = Route(x_TH, router_EH, config, {});
  at::Tensor given_TK = (own.experts_TK + 1) % kExperts;
  given_TK[1].fill_(-1);
  const Routing mixed = Route(x_TH, router_EH, config, given_TK);
  EXPECT_TRUE(at::equal(mixed.experts_TK[0], given_TK[0]));
  EXPECT_TRUE(at::equal(mixed.experts_TK[1], own.experts_TK[1]));
  EXPECT_TRUE(at::equal(mixed.weights_TK[1], own.weights_TK[1]));
}

}  // namespace
}  // namespace weft::moe
