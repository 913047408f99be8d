// Compares the kernels of the gated delta rule with the rule in f64, for every
// instruction set that this processor has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "tests/kernels/cpu/gated_delta_reference.h"
#include "tests/kernels/cpu/kernel_test.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cpu::gated_delta_kernels_test {
namespace {

using reference::DeltaHead;
using reference::DeltaOutput;

using Floats = std::vector<float>;

// The gap between rows reveals a wrong stride.
constexpr int64_t kGap = 3;

Floats RandomFloats(int64_t count, std::mt19937* generator, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  Floats values(count);
  for (float& x : values) x = normal(*generator);
  return values;
}

std::vector<double> Wide(const Floats& x) { return {x.begin(), x.end()}; }

// Returns `count` columns from `column` on of rows with a stride.
std::vector<double> Columns(const Floats& rows, int64_t stride, int64_t column,
                            int64_t count) {
  std::vector<double> values;
  for (size_t row = 0; row + stride <= rows.size(); row += stride) {
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(rows[row + column + i]);
    }
  }
  return values;
}

void ExpectNear(const std::vector<double>& actual,
                const std::vector<double>& expected, int64_t terms,
                const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  double norm = 0, error = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    norm += expected[i] * expected[i];
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
  }
  EXPECT_LE(std::sqrt(error), Tolerance(kEpsilonF32, terms, std::sqrt(norm)))
      << name;
}

// The rows of a head: q, k and v beside each other, and beta and g.
struct Problem {
  Problem(int64_t rows, int64_t keys, int64_t values)
      : num_rows(rows),
        key_features(keys),
        value_features(values),
        stride(2 * keys + values + kGap) {
    std::mt19937 generator(7);
    data = RandomFloats(rows * stride, &generator);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t half = 0; half < 2; ++half) {
        float* x = &data[t * stride + half * keys];
        float squares = 0;
        for (int64_t i = 0; i < keys; ++i) squares += x[i] * x[i];
        for (int64_t i = 0; i < keys; ++i) x[i] /= std::sqrt(squares);
      }
    }
    gates = RandomFloats(2 * rows, &generator);
    for (int64_t t = 0; t < rows; ++t) {
      gates[2 * t] = 1 / (1 + std::exp(-gates[2 * t]));
      // A few decays are so strong that nothing of the state is left.
      gates[2 * t + 1] = t % 17 == 5 ? -90 : -std::abs(gates[2 * t + 1]);
    }
    start = RandomFloats(keys * values, &generator);
    dout = RandomFloats(rows * (values + kGap), &generator);
    dstop = RandomFloats(keys * values, &generator);
    workspace.resize(DeltaWorkspaceFloats(keys, values), std::nanf(""));
  }

  DeltaChunkRows Rows(bool has_start) const {
    return {.q = data.data(),
            .k = data.data() + key_features,
            .v = data.data() + 2 * key_features,
            .row_stride = stride,
            .beta = gates.data(),
            .g = gates.data() + 1,
            .gate_stride = 2,
            .num_rows = num_rows,
            .key_features = key_features,
            .value_features = value_features,
            .start_KV = has_start ? start.data() : nullptr};
  }

  DeltaHead Head(bool has_start) const {
    DeltaHead h{.num_rows = num_rows,
                .key_features = key_features,
                .value_features = value_features,
                .q = Columns(data, stride, 0, key_features),
                .k = Columns(data, stride, key_features, key_features),
                .v = Columns(data, stride, 2 * key_features, value_features),
                .beta = Columns(gates, 2, 0, 1),
                .g = Columns(gates, 2, 1, 1),
                .start = Wide(start)};
    if (!has_start) h.start.assign(h.start.size(), 0.0);
    return h;
  }

  int64_t num_rows, key_features, value_features, stride;
  Floats data, gates, start, dout, dstop, workspace;
};

class GatedDeltaKernelsTest : public KernelTest {
 protected:
  // Runs a chunk and compares it. Returns u [C, V].
  Floats CheckChunk(Problem* p, bool has_start, bool in_place) {
    const int64_t values = p->value_features, stride = values + kGap;
    const DeltaOutput want = reference::RunDelta(p->Head(has_start));
    Floats out(p->num_rows * stride), u(p->num_rows * values);
    Floats stop = in_place ? p->start : Floats(p->start.size());
    DeltaChunkRows rows = p->Rows(has_start);
    if (in_place) rows.start_KV = stop.data();
    table_->delta_chunk({.rows = rows,
                         .out = out.data(),
                         .out_stride = stride,
                         .u = u.data(),
                         .u_stride = values,
                         .stop_KV = stop.data(),
                         .workspace = p->workspace.data()});
    const int64_t terms = p->num_rows + p->key_features;
    ExpectNear(Columns(out, stride, 0, values), want.out, terms, "out");
    ExpectNear(Wide(u), want.u, terms, "u");
    ExpectNear(Wide(stop), want.stop, terms, "stop");
    return u;
  }

  void CheckBackward(Problem* p, const Floats& u, bool has_start,
                     bool has_stop) {
    const int64_t keys = p->key_features, values = p->value_features;
    std::vector<double> dstop = Wide(p->dstop);
    if (!has_stop) dstop.assign(dstop.size(), 0.0);
    const DeltaHead want = reference::RunDeltaBackward(
        p->Head(has_start), Columns(p->dout, values + kGap, 0, values), dstop);
    Floats d(p->num_rows * p->stride), gates(2 * p->num_rows);
    Floats dstart = has_stop ? p->dstop : Floats(p->start.size(), 0);
    table_->delta_chunk_backward(
        {.rows = p->Rows(has_start),
         .u = u.data(),
         .u_stride = values,
         .dout = p->dout.data(),
         .dout_stride = values + kGap,
         .dstop_KV = has_stop ? dstart.data() : nullptr,
         .dstart_KV = has_start ? dstart.data() : nullptr,
         .dq = d.data(),
         .dk = d.data() + keys,
         .dv = d.data() + 2 * keys,
         .dbeta = gates.data(),
         .dg = gates.data() + 1,
         .workspace = p->workspace.data()});
    const int64_t terms = 4 * (p->num_rows + keys + values);
    ExpectNear(Columns(d, p->stride, 0, keys), want.q, terms, "dq");
    ExpectNear(Columns(d, p->stride, keys, keys), want.k, terms, "dk");
    ExpectNear(Columns(d, p->stride, 2 * keys, values), want.v, terms, "dv");
    ExpectNear(Columns(gates, 2, 0, 1), want.beta, terms, "dbeta");
    ExpectNear(Columns(gates, 2, 1, 1), want.g, terms, "dg");
    if (has_start) ExpectNear(Wide(dstart), want.start, terms, "dstart");
  }
};

TEST_P(GatedDeltaKernelsTest, ChunksMatchTheRule) {
  for (const auto& [keys, values] : {std::pair<int64_t, int64_t>{128, 128},
                                     {5, 7},
                                     {64, 32},
                                     {1, 1},
                                     {33, 160}}) {
    for (const int64_t rows : {1, 2, 15, 16, 17, 33, 63, 64}) {
      Problem p(rows, keys, values);
      for (const bool has_start : {false, true}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows of " << keys << ", "
                                          << values << ", " << has_start);
        const Floats u = CheckChunk(&p, has_start, /*in_place=*/false);
        if (has_start) CheckChunk(&p, has_start, /*in_place=*/true);
        CheckBackward(&p, u, has_start, /*has_stop=*/false);
        CheckBackward(&p, u, has_start, /*has_stop=*/true);
      }
    }
  }
}

TEST_P(GatedDeltaKernelsTest, StepsMatchTheRule) {
  for (const int64_t values : {1, 7, 16, 33, 128, 300}) {
    const Problem p(9, 20, values);
    const DeltaOutput want = reference::RunDelta(p.Head(true));
    Floats state = p.start, out(9 * values);
    for (int64_t t = 0; t < 9; ++t) {
      const float* row = p.data.data() + t * p.stride;
      table_->delta_step({.q = row,
                          .k = row + 20,
                          .v = row + 40,
                          .beta = p.gates[2 * t],
                          .decay = std::exp(p.gates[2 * t + 1]),
                          .key_features = 20,
                          .value_features = values,
                          .state_KV = state.data(),
                          .out = out.data() + t * values});
    }
    ExpectNear(Wide(out), want.out, 20 + 9, "out");
    ExpectNear(Wide(state), want.stop, 20 + 9, "state");
  }
}

TEST_P(GatedDeltaKernelsTest, MixedRowsAndTheirGradientsMatchTheReference) {
  std::mt19937 generator(3);
  for (const int64_t keys : {1, 5, 16, 40}) {
    const int64_t heads = 4, features = heads * keys + 21;
    const Floats x = RandomFloats(4 * features, &generator);
    const Floats weights = RandomFloats(4 * features, &generator, 0.5);
    const Floats bias = RandomFloats(features, &generator);
    DeltaMixRow row{.num_taps = 4,
                    .weights = weights.data(),
                    .bias = bias.data(),
                    .num_features = features,
                    .num_key_heads = heads / 2,
                    .key_features = keys,
                    .l2_eps = 1e-2F,
                    .query_scale = 0.25F};
    // The row before last does not exist.
    std::vector<double> conv = Wide(bias);
    for (int64_t tap : {0, 1, 3}) {
      row.taps[tap] = x.data() + tap * features;
      for (int64_t i = 0; i < features; ++i) {
        conv[i] += double{weights[tap * features + i]} * x[tap * features + i];
      }
    }
    const auto mix = [&](const std::vector<double>& c) {
      return reference::MixRow(c, heads, keys, row.l2_eps, row.query_scale);
    };
    Floats mixed(features);
    table_->delta_mix_row(row, mixed.data());
    ExpectNear(Wide(mixed), mix(conv), keys + 4, "mixed");
    const Floats d = RandomFloats(features, &generator);
    Floats gradient = d;
    table_->delta_mix_backward_row(row, gradient.data());
    ExpectNear(Wide(gradient), reference::Differences(mix, conv, d), keys + 4,
               "gradient");
  }
}

TEST_P(GatedDeltaKernelsTest, GatedNormAndItsGradientsMatchTheReference) {
  std::mt19937 generator(4);
  for (const int64_t features : {2, 7, 16, 33, 128}) {
    const Floats x = RandomFloats(features, &generator);
    const Floats z = RandomFloats(features, &generator);
    const Floats weight = RandomFloats(features, &generator);
    const Floats dy = RandomFloats(features, &generator);
    const double eps = 1e-2;
    const auto of_x = [&](const std::vector<double>& v) {
      return reference::GatedNormRow(v, Wide(z), weight, eps);
    };
    const auto of_z = [&](const std::vector<double>& v) {
      return reference::GatedNormRow(Wide(x), v, weight, eps);
    };
    Floats y(features), dx(features), dz(features);
    table_->gated_norm_row(x.data(), z.data(), weight.data(), features, 1e-2F,
                           y.data());
    table_->gated_norm_backward_row(dy.data(), x.data(), z.data(),
                                    weight.data(), features, 1e-2F, dx.data(),
                                    dz.data());
    ExpectNear(Wide(y), of_x(Wide(x)), features, "y");
    ExpectNear(Wide(dx), reference::Differences(of_x, Wide(x), dy), features,
               "dx");
    ExpectNear(Wide(dz), reference::Differences(of_z, Wide(z), dy), features,
               "dz");
  }
}

TEST_P(GatedDeltaKernelsTest, ProductsOfRowsAddOrReplace) {
  std::mt19937 generator(5);
  for (const int64_t count : {1, 15, 16, 67}) {
    const Floats x = RandomFloats(count, &generator);
    const Floats weight = RandomFloats(count, &generator);
    Floats y(count, std::nanf(""));
    table_->multiply_row(x.data(), weight.data(), count, false, y.data());
    table_->multiply_row(x.data(), weight.data(), count, true, y.data());
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_NEAR(y[i], 2.0 * x[i] * weight[i], 1e-6 * std::abs(y[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, GatedDeltaKernelsTest, kEveryIsa,
                         CaseOfIsa);

}  // namespace
}  // namespace weft::kernels::cpu::gated_delta_kernels_test
