#include "src/ops/gated_delta.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/ops/tree_pack.h"
#include "tests/support/tolerance.h"

namespace weft::ops::gated_delta_test {
namespace {

using weft::testing::Pack;
using weft::testing::Tree;

std::vector<Pack> Packs() {
  return {Tree("OneRow", {{1, -1}}),
          Tree("TwoRows", {{2, -1}}),
          Tree("ThreeRows", {{3, -1}}),
          Tree("FiveRows", {{5, -1}}),
          Tree("OneLessThanAChunk", {{63, -1}}),
          Tree("OneChunk", {{64, -1}}),
          Tree("OneMoreThanAChunk", {{65, -1}}),
          Tree("ManyChunks", {{300, -1}}),
          Tree("Sequences", {{17, -1}, {1, -1}, {80, -1}, {16, -1}}),
          Tree("MoreLengths", {{7, -1},
                               {31, -1},
                               {33, -1},
                               {127, -1},
                               {128, -1},
                               {129, -1},
                               {200, -1}}),
          Tree("ForkInsideAChunk", {{40, -1}, {30, 0}, {9, 0}}),
          Tree("ForkAtTheEdgeOfAChunk", {{64, -1}, {70, 0}, {64, 0}}),
          Tree("ForksOfOneRow", {{1, -1}, {1, 0}, {1, 1}, {2, 1}, {1, 0}}),
          Tree("ForksOfForks", {{70, -1},
                                {2, 0},
                                {1, 1},
                                {66, 2},
                                {5, 2},
                                {3, 1},
                                {90, 0},
                                {33, -1}})};
}

struct Shape {
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_features;
  int64_t value_features;
  int64_t taps = 4;
  bool has_bias = false;
};

DeltaParameters MakeParameters(const Shape& s, at::ScalarType dtype) {
  const int64_t features =
      2 * s.key_heads * s.key_features + s.value_heads * s.value_features;
  const auto narrow = [&](const at::Tensor& x) {
    return x.to(dtype).to(dtype == at::kDouble ? at::kDouble : at::kFloat);
  };
  DeltaParameters p;
  p.conv_WR1 = (at::randn({features, s.taps}, at::kDouble) * 0.5).to(dtype);
  if (s.has_bias) {
    p.conv_bias_W = (at::randn({features}, at::kDouble) * 0.3).to(dtype);
  }
  p.a_log_H = narrow(at::rand({s.value_heads}, at::kDouble) * 2 - 1);
  p.dt_bias_H = narrow(at::randn({s.value_heads}, at::kDouble));
  p.num_key_heads = s.key_heads;
  p.num_value_heads = s.value_heads;
  p.key_features = s.key_features;
  p.value_features = s.value_features;
  return p;
}

DeltaParameters InDouble(DeltaParameters p) {
  p.conv_WR1 = p.conv_WR1.to(at::kDouble);
  if (p.conv_bias_W.defined()) p.conv_bias_W = p.conv_bias_W.to(at::kDouble);
  p.a_log_H = p.a_log_H.to(at::kDouble);
  p.dt_bias_H = p.dt_bias_H.to(at::kDouble);
  return p;
}

// Views of one matrix, so the row stride is not the number of features.
DeltaInputs ViewsOf(const at::Tensor& fused, const DeltaParameters& p) {
  const int64_t features = p.conv_WR1.size(0), heads = p.num_value_heads;
  return {fused.narrow(1, 0, features), fused.narrow(1, features + 3, heads),
          fused.narrow(1, features + 3 + heads, heads)};
}

at::Tensor MakeFused(int64_t num_rows, const DeltaParameters& p,
                     at::ScalarType dtype) {
  return at::randn({num_rows, p.conv_WR1.size(0) + 2 * p.num_value_heads + 5},
                   at::kDouble)
      .to(dtype);
}

// The state of one path of the oracle.
struct OracleState {
  at::Tensor conv_RW;
  at::Tensor state_HKV;
};

OracleState ZeroState(const DeltaParameters& p) {
  return {at::zeros({p.conv_WR1.size(1) - 1, p.conv_WR1.size(0)}, at::kDouble),
          at::zeros({p.num_value_heads, p.key_features, p.value_features},
                    at::kDouble)};
}

// The definition, row by row, in f64. Returns the output [H, V] of one row, and
// replaces the state.
at::Tensor OracleRow(const at::Tensor& qkv_W, const at::Tensor& beta_H,
                     const at::Tensor& alpha_H, const DeltaParameters& p,
                     OracleState& state) {
  const at::Tensor rows = at::cat({state.conv_RW, qkv_W.unsqueeze(0)});
  state.conv_RW = rows.slice(0, 1);
  at::Tensor x = (rows * p.conv_WR1.t()).sum(0);
  if (p.conv_bias_W.defined()) x = x + p.conv_bias_W;
  x = at::silu(x);
  const int64_t keys = p.num_key_heads * p.key_features;
  const int64_t repeats = p.num_value_heads / p.num_key_heads;
  const auto unit = [&](int64_t column) {
    const at::Tensor h =
        x.narrow(0, column, keys).view({p.num_key_heads, p.key_features});
    return (h * (h.square().sum(1, true) + p.l2_eps).rsqrt())
        .repeat_interleave(repeats, 0);
  };
  const at::Tensor q = unit(0) / std::sqrt(double(p.key_features));
  const at::Tensor k = unit(keys);
  const at::Tensor v = x.narrow(0, 2 * keys, x.size(0) - 2 * keys)
                           .view({p.num_value_heads, p.value_features});
  const at::Tensor g =
      -p.a_log_H.exp() * at::log1p((alpha_H + p.dt_bias_H).exp());
  const at::Tensor decayed = g.exp().view({-1, 1, 1}) * state.state_HKV;
  const at::Tensor u =
      beta_H.sigmoid().unsqueeze(1) * (v - (decayed * k.unsqueeze(2)).sum(1));
  state.state_HKV = decayed + k.unsqueeze(2) * u.unsqueeze(1);
  return (state.state_HKV * q.unsqueeze(2)).sum(1);
}

// The outputs of all rows by the definition. `states` has the start state of
// each root if it is not null, and gets the end states of all nodes.
at::Tensor Oracle(const DeltaInputs& in, const DeltaParameters& p,
                  const std::vector<AttentionNode>& nodes,
                  std::vector<OracleState>* starts = nullptr) {
  std::vector<OracleState> ends;
  std::vector<at::Tensor> out;
  for (size_t n = 0; n < nodes.size(); ++n) {
    OracleState state = nodes[n].parent >= 0 ? ends[nodes[n].parent]
                        : starts             ? (*starts)[n]
                                             : ZeroState(p);
    for (int64_t t = nodes[n].begin; t < nodes[n].end; ++t) {
      out.push_back(
          OracleRow(in.qkv_TW[t], in.beta_TH[t], in.alpha_TH[t], p, state));
    }
    ends.push_back(state);
  }
  if (starts) *starts = ends;
  return at::stack(out);
}

// Returns |a - b| / |b| in f64.
double RelativeError(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor want = b.to(at::kDouble);
  const double norm = want.norm().item<double>();
  const double error = (a.to(at::kDouble) - want).norm().item<double>();
  return norm > 0 ? error / norm : error;
}

// The largest relative error of a correct computation. The rule multiplies the
// state of each row by factors of at most 1, so rounding errors of rows add up
// like those of a sum; 300 rows and sums of 128 terms in a row of products.
double Bound(at::ScalarType dtype) {
  constexpr double kSafety = 8;
  const double sums = kSafety * std::sqrt(300.0 + 128.0);
  if (dtype == at::kDouble) return sums * kEpsilonF64;
  return sums * kEpsilonF32 + (dtype == at::kBFloat16 ? kEpsilonBf16 : 0);
}

struct Case {
  at::ScalarType dtype;
  Shape shape;
};

std::vector<Case> Cases() {
  return {{at::kDouble, {2, 2, 8, 8}},    {at::kDouble, {1, 3, 5, 7, 3, true}},
          {at::kFloat, {2, 4, 16, 32}},   {at::kFloat, {1, 1, 5, 7, 2, true}},
          {at::kFloat, {1, 2, 128, 128}}, {at::kBFloat16, {2, 2, 16, 16}}};
}

class GatedDeltaTest : public ::testing::TestWithParam<Case> {};

TEST_P(GatedDeltaTest, MatchesTheDefinitionAndItsGradients) {
  const auto& [dtype, shape] = GetParam();
  at::manual_seed(1);
  for (const Pack& pack : Packs()) {
    SCOPED_TRACE(pack.name);
    const DeltaParameters p = MakeParameters(shape, dtype);
    const int64_t num_rows = pack.num_rows();
    const at::Tensor fused = MakeFused(num_rows, p, dtype);
    const at::Tensor leaf =
        fused.to(at::kDouble).detach().clone().requires_grad_(true);
    const DeltaParameters wide = InDouble(p);
    const at::Tensor want = Oracle(ViewsOf(leaf, wide), wide, pack.nodes);
    const at::Tensor dout = at::randn(want.sizes(), at::kDouble).to(dtype);
    (want * dout.to(at::kDouble)).sum().backward();

    const c10::InferenceMode no_grad;
    const DeltaInputs inputs = ViewsOf(fused, p);
    const double bound = Bound(dtype);
    const DeltaTrees trees(pack.nodes);
    DeltaTape tape;
    const at::Tensor out = GatedDelta(inputs, p, trees, &tape);
    EXPECT_EQ(out.scalar_type(), dtype);
    EXPECT_LE(RelativeError(out, want.detach()), bound);
    EXPECT_LE(RelativeError(GatedDelta(inputs, p, trees, nullptr), out), bound);
    for (DeltaTape kept : {tape, DeltaTape{}}) {
      const at::Tensor into = at::full_like(fused, 7);
      GatedDeltaBackward(dout, inputs, p, trees, kept, ViewsOf(into, p));
      EXPECT_FALSE(kept.u_THV.defined());
      const DeltaInputs got = ViewsOf(into, p);
      const DeltaInputs gradient = ViewsOf(leaf.grad(), p);
      // A gradient goes through the rule forward and backward.
      EXPECT_LE(RelativeError(got.qkv_TW, gradient.qkv_TW), 4 * bound);
      EXPECT_LE(RelativeError(got.beta_TH, gradient.beta_TH), 4 * bound);
      EXPECT_LE(RelativeError(got.alpha_TH, gradient.alpha_TH), 4 * bound);
    }
  }
}

// Returns states of `num_slots` sequences; all slots but those of new sequences
// have other numbers.
DeltaStates MakeStates(const DeltaParameters& p, at::ScalarType dtype,
                       int64_t num_slots, const std::vector<int64_t>& slots) {
  const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {at::randn({num_slots, p.conv_WR1.size(1) - 1, p.conv_WR1.size(0)},
                    at::kDouble)
              .to(dtype),
          at::randn(
              {num_slots, p.num_value_heads, p.key_features, p.value_features},
              at::kDouble)
              .to(wide),
          at::tensor(slots, at::kLong)};
}

TEST_P(GatedDeltaTest, ContinuesSequencesInTheirSlots) {
  const auto& [dtype, shape] = GetParam();
  at::manual_seed(2);
  const DeltaParameters p = MakeParameters(shape, dtype);
  const DeltaParameters wide = InDouble(p);
  const std::vector<int64_t> slots{4, 0, 2};
  const DeltaStates states = MakeStates(p, dtype, 6, slots);
  std::vector<OracleState> oracle;
  for (const int64_t slot : slots) {
    oracle.push_back({states.conv_NRW[slot].to(at::kDouble),
                      states.state_NHKV[slot].to(at::kDouble)});
  }
  const at::Tensor untouched = states.state_NHKV[3].clone();
  const double bound = Bound(dtype);
  const std::vector<Pack> packs = {
      Tree("LongAndShort", {{70, -1}, {1, -1}, {2, -1}}),
      Tree("Steps", {{1, -1}, {1, -1}, {1, -1}}),
      Tree("MoreSteps", {{1, -1}, {1, -1}, {1, -1}}),
      Tree("AChunk", {{3, -1}, {64, -1}, {65, -1}})};
  const c10::InferenceMode no_grad;
  for (const Pack& pack : packs) {
    SCOPED_TRACE(pack.name);
    const int64_t num_rows = pack.num_rows();
    const at::Tensor fused = MakeFused(num_rows, p, dtype);
    const at::Tensor want =
        Oracle(ViewsOf(fused.to(at::kDouble), p), wide, pack.nodes, &oracle);
    const DeltaInputs inputs = ViewsOf(fused, p);
    const at::Tensor out =
        num_rows == 3
            ? GatedDeltaStep(inputs, p, states)
            : GatedDeltaPrefill(inputs, p,
                                DeltaTrees(pack.nodes, states.slots_Q), states);
    EXPECT_LE(RelativeError(out, want), bound);
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_LE(RelativeError(states.state_NHKV[slots[i]], oracle[i].state_HKV),
                bound);
      EXPECT_TRUE(at::equal(states.conv_NRW[slots[i]].to(at::kDouble),
                            oracle[i].conv_RW));
    }
  }
  EXPECT_TRUE(at::equal(states.state_NHKV[3], untouched));
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  const Shape& s = info.param.shape;
  return std::string(c10::toString(info.param.dtype)) + "_" +
         std::to_string(s.key_heads) + "of" + std::to_string(s.value_heads) +
         "_" + std::to_string(s.key_features) + "x" +
         std::to_string(s.value_features);
}

INSTANTIATE_TEST_SUITE_P(Cases, GatedDeltaTest, ::testing::ValuesIn(Cases()),
                         CaseName);

TEST(GatedRmsNorm, MatchesAutograd) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const int64_t features : {5, 16, 128}) {
      const auto make = [&] {
        return at::randn({9, 3, features}, at::kDouble).to(dtype);
      };
      // z is a view of a wider matrix.
      const at::Tensor x = make(), dy = make();
      const at::Tensor z = at::randn({9, 3 * features + 4}, at::kDouble)
                               .to(dtype)
                               .narrow(1, 2, 3 * features)
                               .view({9, 3, features});
      const at::Tensor weight = at::randn({features}, at::kDouble).to(dtype);
      at::Tensor x64 = x.to(at::kDouble).clone().requires_grad_(true);
      at::Tensor z64 = z.to(at::kDouble).clone().requires_grad_(true);
      const at::Tensor want = weight.to(at::kDouble) * x64 *
                              (x64.square().mean(-1, true) + 1e-6).rsqrt() *
                              at::silu(z64);
      (want * dy.to(at::kDouble)).sum().backward();
      const c10::InferenceMode no_grad;
      const at::Tensor dx = at::empty_like(x);
      const at::Tensor dz = at::empty({9, 3 * features + 4}, x.options())
                                .narrow(1, 1, 3 * features)
                                .view({9, 3, features});
      GatedRmsNormBackward(dy, x, z, weight, 1e-6, dx, dz);
      const double bound = Bound(dtype);
      EXPECT_LE(RelativeError(GatedRmsNorm(x, z, weight, 1e-6), want.detach()),
                bound);
      EXPECT_LE(RelativeError(dx, x64.grad()), bound);
      EXPECT_LE(RelativeError(dz, z64.grad()), bound);
    }
  }
}

TEST(GatedDelta, RefusesShapesThatDoNotFit) {
  DeltaParameters p = MakeParameters({2, 2, 8, 8}, at::kFloat);
  const DeltaInputs inputs = ViewsOf(MakeFused(5, p, at::kFloat), p);
  const std::vector<AttentionNode> nodes{{0, 5, -1, 5}};
  const DeltaTrees trees(nodes);
  EXPECT_THROW(
      (void)GatedDelta(inputs, p, DeltaTrees({{0, 4, -1, 4}}), nullptr),
      c10::Error);
  const DeltaInputs mixed{inputs.qkv_TW, inputs.beta_TH,
                          inputs.alpha_TH.to(at::kDouble)};
  EXPECT_THROW((void)GatedDelta(mixed, p, trees, nullptr), c10::Error);
  // A slot for each of two sequences, but there is one.
  const DeltaStates two = MakeStates(p, at::kFloat, 3, {0, 1});
  EXPECT_THROW(
      (void)GatedDeltaPrefill(inputs, p, DeltaTrees(nodes, two.slots_Q), two),
      c10::Error);
  // Trees of other slots.
  const DeltaStates one = MakeStates(p, at::kFloat, 3, {1});
  EXPECT_THROW((void)GatedDeltaPrefill(
                   inputs, p, DeltaTrees(nodes, at::tensor({2L})), one),
               c10::Error);
  p.num_value_heads = 3;
  EXPECT_THROW((void)GatedDelta(inputs, p, trees, nullptr), c10::Error);
}

}  // namespace
}  // namespace weft::ops::gated_delta_test
