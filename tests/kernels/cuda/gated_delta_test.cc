// Compares the CUDA kernels of the gated delta rule with the rule in f64.
#include "kernels/cuda/delta/gated_delta.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/cpu/gated_delta_reference.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

namespace reference = weft::kernels::cpu::reference;
using reference::DeltaHead;
using reference::DeltaOutput;

// The largest relative error of f32 sums of a few hundred terms.
constexpr double kF32Error = 8 * 20 * kEpsilonF32;
// Returns that of `products` products in a row on tensor cores. Each rounds two
// operands to half an epsilon of bf16, independently.
double TensorError(int products) {
  return kEpsilonBf16 / 2 * std::sqrt(2 * products);
}

double StoredError(DType dtype) {
  return kF32Error + (dtype == DType::kBf16 ? kEpsilonBf16 : 0);
}

void ExpectClose(const std::vector<double>& actual,
                 const std::vector<double>& expected, double error,
                 const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  double norm = 0, difference = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    norm += expected[i] * expected[i];
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
  }
  EXPECT_LE(std::sqrt(difference), error * std::sqrt(norm)) << name;
}

// Returns `count` columns from `column` on of rows [begin, end).
std::vector<double> Columns(const std::vector<float>& x, int64_t stride,
                            int64_t begin, int64_t end, int64_t column,
                            int64_t count) {
  std::vector<double> values;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(x[row * stride + column + i]);
    }
  }
  return values;
}

struct Node {
  int64_t begin;
  int64_t end;
  int64_t parent;
};

// The rows of the rule, in numbers that bf16 has.
struct Rule {
  Rule(int64_t rows, int64_t key_heads, int64_t value_heads, int64_t keys,
       int64_t values)
      : num_rows(rows), width(2 * key_heads * keys + value_heads * values) {
    shape.num_key_heads = key_heads;
    shape.num_value_heads = value_heads;
    shape.key_features = keys;
    shape.value_features = values;
    mixed = RandomFloats(rows * width, 1);
    const auto length = std::sqrt(static_cast<float>(keys));
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < 2 * key_heads * keys; ++i) {
        mixed[t * width + i] /= i < key_heads * keys ? length * length : length;
      }
    }
    mixed = Rounded(DType::kBf16, mixed);
    beta = RandomFloats(rows * value_heads, 2);
    g = RandomFloats(rows * value_heads, 3);
    for (float& x : beta) x = 1 / (1 + std::exp(-x));
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = i % 41 == 7 ? -90 : -std::abs(g[i]) / 4;
    }
  }

  // Returns a head's rows [begin, end).
  DeltaHead Head(int64_t h, int64_t begin, int64_t end,
                 const std::vector<double>& start) const {
    const int64_t keys = shape.key_features, values = shape.value_features;
    const int64_t all = shape.num_key_heads * keys;
    const int64_t heads = shape.num_value_heads;
    const int64_t q = h / (heads / shape.num_key_heads) * keys;
    const auto columns = [&](const std::vector<float>& x, int64_t stride,
                             int64_t column, int64_t count) {
      return Columns(x, stride, begin, end, column, count);
    };
    return {.num_rows = end - begin,
            .key_features = keys,
            .value_features = values,
            .q = columns(mixed, width, q, keys),
            .k = columns(mixed, width, all + q, keys),
            .v = columns(mixed, width, 2 * all + h * values, values),
            .beta = columns(beta, heads, h, 1),
            .g = columns(g, heads, h, 1),
            .start = start};
  }

  int64_t num_rows, width;
  DeltaRuleRows shape;
  std::vector<float> mixed, beta, g;
};

class CudaGatedDeltaTest : public CudaDtypeTest {};

TEST_P(CudaGatedDeltaTest, StepsMatchTheRule) {
  for (const auto& [keys, values] :
       {std::pair<int64_t, int64_t>{128, 128}, {5, 7}, {33, 40}}) {
    // The last rows are padding.
    Rule rule(5, 2, 4, keys, values);
    const int64_t heads = 4, size = keys * values;
    const std::vector<float> states = RandomFloats(6 * heads * size, 4);
    const std::vector<int64_t> slots = {4, 0, 3, 1, 1};
    const DeviceArray mixed(GetParam(), rule.mixed);
    const DeviceBuffer<float> beta(rule.beta), g(rule.g), state(states);
    const DeviceBuffer<int64_t> slots_device(slots);
    const DeviceArray out(GetParam(),
                          std::vector<float>(5 * heads * values, kNan));
    rule.shape.mixed_TW = mixed.data();
    rule.shape.beta_TH = beta.data();
    rule.shape.g_TH = g.data();
    ASSERT_EQ(DeltaStep(rule.shape, 5, slots_device.data(), /*padding_slot=*/1,
                        state.data(), GetParam(), out.data(), nullptr),
              cudaSuccess);
    const std::vector<float> got = out.Read(), after = state.Read();
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = slots[t] * heads + h;
        const DeltaOutput want = reference::RunDelta(
            rule.Head(h, t, t + 1, Columns(states, size, at, at + 1, 0, size)));
        ExpectClose(
            Columns(got, values, t * heads + h, t * heads + h + 1, 0, values),
            want.out, StoredError(GetParam()), "out");
        ExpectClose(Columns(after, size, at, at + 1, 0, size), want.stop,
                    kF32Error, "state");
      }
    }
    EXPECT_EQ(Slice(after, heads * size, heads * size),
              Slice(states, heads * size, heads * size));
    EXPECT_EQ(Slice(got, 3 * heads * values, 2 * heads * values),
              std::vector<float>(2 * heads * values));
  }
}

// The convolution of rows of x over earlier rows, in f64.
struct MixProblem {
  static constexpr int64_t kTaps = 4, kKeyHeads = 2, kHeads = 2;

  MixProblem(DType dtype, int64_t rows, int64_t key_features)
      : num_rows(rows),
        keys(key_features),
        width(2 * kKeyHeads * keys + kHeads * 152),
        // Whole packs of 16 bytes, if the heads have them.
        stride(width + (keys % 8 == 0 ? 8 : 3)),
        x(Rounded(dtype, RandomFloats(rows * stride, 1))),
        history(Rounded(dtype, RandomFloats(3 * width, 2))),
        weight(Rounded(dtype, RandomFloats(kTaps * width, 3, 0.5F))),
        bias(Rounded(dtype, RandomFloats(width, 4))),
        gates(Rounded(dtype, RandomFloats(rows * 2 * kHeads, 5, 10))),
        a_log(RandomFloats(kHeads, 6)),
        dt_bias(RandomFloats(kHeads, 7)) {
    // Row t follows row t - 1, but the last row follows row 0, and row 0
    // follows the history.
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t own = t == rows - 1 ? 1 : t;
      for (int64_t r = 0; r < kTaps - 1; ++r) {
        const int64_t row = own - (kTaps - 1) + r;
        earlier.push_back(row >= 0 ? row : rows + kTaps - 1 + row);
      }
    }
    earlier.front() = -1;
  }

  std::vector<double> Conv(int64_t t, const std::vector<float>& of) const {
    std::vector<double> conv(bias.begin(), bias.end());
    for (int64_t r = 0; r < kTaps; ++r) {
      const int64_t row = r + 1 == kTaps ? t : earlier[t * (kTaps - 1) + r];
      if (row < 0) continue;
      const float* tap = row < num_rows ? &of[row * stride]
                                        : &history[(row - num_rows) * width];
      for (int64_t i = 0; i < width; ++i) {
        conv[i] += double{weight[r * width + i]} * tap[i];
      }
    }
    return conv;
  }

  std::vector<double> Mix(const std::vector<double>& conv) const {
    return reference::MixRow(conv, 2 * kKeyHeads, keys, 1e-3F, 0.25);
  }

  int64_t num_rows, keys, width, stride;
  std::vector<float> x, history, weight, bias, gates, a_log, dt_bias;
  std::vector<int64_t> earlier;
};

// The problem on the device.
struct MixDevice {
  MixDevice(DType dtype, const MixProblem& p)
      : x(dtype, p.x),
        history(dtype, p.history),
        weight(dtype, p.weight),
        bias(dtype, p.bias),
        gates(dtype, p.gates),
        a_log(p.a_log),
        dt_bias(p.dt_bias),
        earlier(p.earlier) {
    rows = {.dtype = dtype,
            .weight_dtype = dtype,
            .num_rows = p.num_rows,
            .num_features = p.width,
            .num_taps = MixProblem::kTaps,
            .num_key_heads = MixProblem::kKeyHeads,
            .key_features = p.keys,
            .num_value_heads = MixProblem::kHeads,
            .l2_eps = 1e-3F,
            .query_scale = 0.25F,
            .x_TW = x.data(),
            .x_stride = p.stride,
            .earlier_TR = earlier.data(),
            .history_W = history.data(),
            .weight_RW = weight.data(),
            .bias_W = bias.data(),
            .beta_TH = gates.data(),
            .beta_stride = 2 * MixProblem::kHeads,
            .alpha_TH = gates.at(MixProblem::kHeads),
            .alpha_stride = 2 * MixProblem::kHeads,
            .a_log_H = a_log.data(),
            .dt_bias_H = dt_bias.data()};
  }

  DeviceArray x, history, weight, bias, gates;
  DeviceBuffer<float> a_log, dt_bias;
  DeviceBuffer<int64_t> earlier;
  DeltaMixRows rows;
};

TEST_P(CudaGatedDeltaTest, MixedRowsMatchTheReference) {
  for (const int64_t keys : {5, 32, 128, 272, 300}) {
    const MixProblem p(GetParam(), 7, keys);
    const MixDevice device(GetParam(), p);
    const DeviceArray mixed(GetParam(), std::vector<float>(7 * p.width, kNan));
    const DeviceBuffer<float> beta(std::vector<float>(14, kNan)),
        g(std::vector<float>(14, kNan));
    ASSERT_EQ(
        MixDeltaRows(device.rows, mixed.data(), beta.data(), g.data(), nullptr),
        cudaSuccess);
    const std::vector<float> rows = mixed.Read(), betas = beta.Read(),
                             gs = g.Read();
    for (int64_t t = 0; t < 7; ++t) {
      ExpectClose(Columns(rows, p.width, t, t + 1, 0, p.width),
                  p.Mix(p.Conv(t, p.x)), StoredError(GetParam()), "mixed");
      for (int64_t h = 0; h < 2; ++h) {
        const double b = p.gates[t * 4 + h];
        const double a = double{p.gates[t * 4 + 2 + h]} + p.dt_bias[h];
        const double want_beta = 1 / (1 + std::exp(-b));
        const double want_g = -std::exp(p.a_log[h]) * std::log1p(std::exp(a));
        EXPECT_NEAR(betas[t * 2 + h], want_beta, kF32Error * want_beta);
        EXPECT_NEAR(gs[t * 2 + h], want_g, -kF32Error * want_g);
      }
    }
  }
}

TEST_P(CudaGatedDeltaTest, StepsReadTheirHistory) {
  const MixProblem p(GetParam(), 1, 16);
  MixDevice device(GetParam(), p);
  device.rows.earlier_TR = nullptr;
  const DeviceArray mixed(GetParam(), std::vector<float>(p.width, kNan));
  const DeviceBuffer<float> beta(std::vector<float>(2)),
      g(std::vector<float>(2));
  ASSERT_EQ(
      MixDeltaRows(device.rows, mixed.data(), beta.data(), g.data(), nullptr),
      cudaSuccess);
  MixProblem whole = p;
  whole.earlier = {1, 2, 3};
  ExpectClose(Columns(mixed.Read(), p.width, 0, 1, 0, p.width),
              p.Mix(whole.Conv(0, p.x)), StoredError(GetParam()), "mixed");
}

TEST_P(CudaGatedDeltaTest, MixedRowsPassTheirGradients) {
  for (const int64_t keys : {5, 32, 272}) {
    MixProblem p(GetParam(), 7, keys);
    // The backward pass has no history.
    for (int64_t& row : p.earlier) row = row < p.num_rows ? row : -1;
    const MixDevice device(GetParam(), p);
    const std::vector<float> d = RandomFloats(7 * p.width, 8);
    std::vector<int64_t> offsets = {0};
    std::vector<DeltaLaterRow> later;
    for (int64_t t = 0; t < 7; ++t) {
      for (int32_t i = 0; i < 7 * 3; ++i) {
        if (p.earlier[i] == t) later.push_back({i / 3, i % 3});
      }
      offsets.push_back(std::ssize(later));
    }
    const DeviceBuffer<int64_t> offsets_device(offsets);
    const DeviceBuffer<DeltaLaterRow> later_device(later);
    const DeviceBuffer<float> d_device(d);
    const DeviceArray dx(GetParam(), std::vector<float>(7 * p.stride, kNan));
    ASSERT_EQ(MixDeltaRowsBackward(device.rows, d_device.data(), nullptr),
              cudaSuccess);
    ASSERT_EQ(DeltaConvBackward(device.rows,
                                {offsets_device.data(), later_device.data()},
                                d_device.data(), dx.data(), p.stride, nullptr),
              cudaSuccess);
    std::vector<double> want(7 * p.width, 0.0);
    for (int64_t t = 0; t < 7; ++t) {
      const std::vector<double> dconv = reference::Differences(
          [&](const std::vector<double>& conv) { return p.Mix(conv); },
          p.Conv(t, p.x), Slice(d, t * p.width, p.width));
      for (int64_t r = 0; r < 4; ++r) {
        const int64_t row = r == 3 ? t : p.earlier[t * 3 + r];
        if (row < 0) continue;
        for (int64_t i = 0; i < p.width; ++i) {
          want[row * p.width + i] += p.weight[r * p.width + i] * dconv[i];
        }
      }
    }
    ExpectClose(Columns(dx.Read(), p.stride, 0, 7, 0, p.width), want,
                StoredError(GetParam()), "dx");
  }
}

TEST_P(CudaGatedDeltaTest, GatedNormAndItsGradientsMatchTheReference) {
  constexpr int64_t kRows = 3, kHeads = 5;
  for (const int64_t features : {7, 64, 128}) {
    const int64_t stride = kHeads * features + 9;
    const auto make = [&](uint32_t seed) {
      return Rounded(GetParam(), RandomFloats(kRows * stride, seed));
    };
    const std::vector<float> x = make(1), z = make(2), dy = make(3);
    const std::vector<float> weight =
        Rounded(GetParam(), RandomFloats(features, 4));
    const DeviceArray x_device(GetParam(), x), z_device(GetParam(), z);
    const DeviceArray dy_device(GetParam(), dy), w_device(GetParam(), weight);
    const DeviceArray y(GetParam(), x), dx(GetParam(), x), dz(GetParam(), x);
    const auto heads = [&](const DeviceArray& array) {
      return DeltaHeads{array.data(), stride, features};
    };
    const GatedNormHeads args{.dtype = GetParam(),
                              .weight_dtype = GetParam(),
                              .num_rows = kRows,
                              .num_heads = kHeads,
                              .features = features,
                              .eps = 1e-3F,
                              .x = heads(x_device),
                              .z = heads(z_device),
                              .weight_V = w_device.data()};
    ASSERT_EQ(GatedNorm(args, heads(y), nullptr), cudaSuccess);
    ASSERT_EQ(GatedNormBackward(args, heads(dy_device), heads(dx), heads(dz),
                                nullptr),
              cudaSuccess);
    const auto read = [&](const std::vector<float>& from, int64_t i) {
      return Columns(from, stride, i / kHeads, i / kHeads + 1,
                     i % kHeads * features, features);
    };
    for (int64_t i = 0; i < kRows * kHeads; ++i) {
      const std::vector<double> xs = read(x, i), zs = read(z, i);
      const std::vector<double> dys = read(dy, i);
      const std::vector<float> d(dys.begin(), dys.end());
      const auto of_x = [&](const std::vector<double>& v) {
        return reference::GatedNormRow(v, zs, weight, 1e-3F);
      };
      const auto of_z = [&](const std::vector<double>& v) {
        return reference::GatedNormRow(xs, v, weight, 1e-3F);
      };
      const double error = StoredError(GetParam());
      ExpectClose(read(y.Read(), i), of_x(xs), error, "y");
      ExpectClose(read(dx.Read(), i), reference::Differences(of_x, xs, d),
                  error, "dx");
      ExpectClose(read(dz.Read(), i), reference::Differences(of_z, zs, d),
                  error, "dz");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaGatedDeltaTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

// A prompt of two chunks with two children, of which one has a child, and a
// sequence by itself that ends at row `num_rows`.
std::vector<Node> Nodes(int64_t num_rows) {
  return {
      {0, 70, -1}, {70, 80, 0}, {80, 83, 1}, {83, 148, 0}, {148, num_rows, -1}};
}

// The chunks of the nodes. If `keeps`, each chunk that another one follows has
// a state of its own, otherwise each node has one.
struct Plan {
  Plan(const std::vector<Node>& nodes, bool keeps) {
    std::vector<int64_t> stops(nodes.size(), -1);
    for (size_t n = 0; n < nodes.size(); ++n) {
      const Node& node = nodes[n];
      if (node.parent < 0) trees.push_back(std::ssize(chunks));
      int64_t start = node.parent < 0 ? -1 : stops[node.parent];
      int64_t own = -1;
      for (int64_t row = node.begin; row < node.end; row += 64) {
        DeltaChunkRange chunk{row, std::min(row + 64, node.end), start, -1};
        if (chunk.end < node.end || n < 2) {
          if (own < 0 || keeps) own = num_states++;
          chunk.stop = own;
        }
        chunks.push_back(chunk);
        start = chunk.stop;
      }
      stops[n] = start;
    }
    trees.push_back(std::ssize(chunks));
  }

  std::vector<DeltaChunkRange> chunks;
  std::vector<int64_t> trees;
  int64_t num_states = 0;
};

struct ChunkSizes {
  int64_t key_heads, value_heads, values, rows;
};

class CudaDeltaChunksTest : public CudaKernelTest,
                            public ::testing::WithParamInterface<ChunkSizes> {
 protected:
  static constexpr int64_t kKeys = 128;

  // The outputs of all nodes of a head by the rule.
  std::vector<DeltaOutput> Outputs(int64_t h) const {
    std::vector<DeltaOutput> outputs;
    for (const Node& node : nodes_) {
      outputs.push_back(reference::RunDelta(
          rule_.Head(h, node.begin, node.end,
                     node.parent < 0 ? zeros_ : outputs[node.parent].stop)));
    }
    return outputs;
  }

  // The gradients of all nodes' rows.
  std::vector<DeltaHead> Gradients(int64_t h,
                                   const std::vector<DeltaOutput>& outputs,
                                   const std::vector<float>& dout) const {
    std::vector<DeltaHead> gradients(nodes_.size());
    std::vector<std::vector<double>> dstops(nodes_.size(), zeros_);
    for (int64_t n = std::ssize(nodes_) - 1; n >= 0; --n) {
      const Node& node = nodes_[n];
      gradients[n] = reference::RunDeltaBackward(
          rule_.Head(h, node.begin, node.end,
                     node.parent < 0 ? zeros_ : outputs[node.parent].stop),
          HeadColumns(dout, node, h), dstops[n]);
      if (node.parent < 0) continue;
      for (size_t i = 0; i < zeros_.size(); ++i) {
        dstops[node.parent][i] += gradients[n].start[i];
      }
    }
    return gradients;
  }

  // Returns a head's columns of [T, H, V] for a node's rows.
  std::vector<double> HeadColumns(const std::vector<float>& x, const Node& node,
                                  int64_t h) const {
    return Columns(x, width_, node.begin, node.end, h * sizes_.values,
                   sizes_.values);
  }

  // Sums the slices of [V / 64, T, H, count] for rows of a head.
  std::vector<double> Slices(const std::vector<float>& x, int64_t count,
                             const Node& node, int64_t h) const {
    std::vector<double> sums((node.end - node.begin) * count, 0.0);
    for (int64_t slice = 0; slice < num_slices_; ++slice) {
      const std::vector<double> part = Columns(
          x, sizes_.value_heads * count, slice * sizes_.rows + node.begin,
          slice * sizes_.rows + node.end, h * count, count);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
    }
    return sums;
  }

  const ChunkSizes sizes_ = GetParam();
  const int64_t width_ = sizes_.value_heads * sizes_.values;
  const int64_t num_slices_ = sizes_.values / 64;
  const std::vector<Node> nodes_ = Nodes(sizes_.rows);
  const std::vector<double> zeros_ =
      std::vector<double>(kKeys * sizes_.values, 0.0);
  Rule rule_{sizes_.rows, sizes_.key_heads, sizes_.value_heads, kKeys,
             sizes_.values};
};

TEST_P(CudaDeltaChunksTest, MatchTheRuleOverPrefixTrees) {
  const Plan kept(nodes_, true), plan(nodes_, false);
  const DeviceArray mixed(DType::kBf16, rule_.mixed);
  const DeviceBuffer<float> beta(rule_.beta), g(rule_.g);
  rule_.shape.mixed_TW = mixed.data();
  rule_.shape.beta_TH = beta.data();
  rule_.shape.g_TH = g.data();
  const auto filled = [](int64_t count, float x) {
    return DeviceBuffer<float>(std::vector<float>(count, x));
  };
  const auto nans = [](int64_t count) {
    return DeviceArray(DType::kBf16, std::vector<float>(count, kNan));
  };
  const int64_t rows = sizes_.rows, heads = sizes_.value_heads;
  const int64_t state = heads * kKeys * sizes_.values;
  const DeviceBuffer<DeltaChunkRange> kept_chunks(kept.chunks),
      chunks(plan.chunks);
  const DeviceBuffer<int64_t> tree_chunks(plan.trees);
  const DeltaTrees kept_trees{kept_chunks.data(), tree_chunks.data(), 2,
                              std::ssize(kept.chunks)};
  DeltaTrees trees = kept_trees;
  trees.chunks = chunks.data();
  const int64_t size = rows * heads * 64;
  const DeviceArray w = nans(size), inverse = nans(size), rest = nans(size);
  const DeltaScores scores{w.data(), inverse.data(), rest.data(), rows};
  ASSERT_EQ(ScoreDeltaChunks(rule_.shape, trees, scores, nullptr), cudaSuccess);
  const auto states = filled(kept.num_states * state, kNan);
  const DeviceArray u = nans(rows * width_), out = nans(rows * width_);
  ASSERT_EQ(RunDeltaChunks(rule_.shape, kept_trees, scores,
                           {states.data(), u.data(), out.data()}, nullptr),
            cudaSuccess);

  const std::vector<float> dout =
      Rounded(DType::kBf16, RandomFloats(rows * width_, 9));
  const DeviceArray dout_device(DType::kBf16, dout);
  const auto dstates = filled(plan.num_states * state, 0);
  const DeviceArray dstops = nans(kept.num_states * state);
  const DeviceArray dr = nans(rows * width_);
  const auto dq = filled(num_slices_ * rows * heads * kKeys, kNan);
  const auto dk = filled(num_slices_ * rows * heads * kKeys, kNan);
  const auto dv = filled(rows * width_, kNan);
  const auto dbeta = filled(num_slices_ * rows * heads, kNan);
  const auto dg = filled(num_slices_ * rows * heads, kNan);
  const DeltaChunksGradient gradient{.kept_chunks = kept_chunks.data(),
                                     .states_SHKV = states.data(),
                                     .u_THV = u.data(),
                                     .dout_THV = dout_device.data(),
                                     .dstates_SHKV = dstates.data(),
                                     .dstops_SHKV = dstops.data(),
                                     .dr_THV = dr.data(),
                                     .dq = dq.data(),
                                     .dk = dk.data(),
                                     .dbeta = dbeta.data(),
                                     .dg = dg.data(),
                                     .dv_THV = dv.data()};
  ASSERT_EQ(
      RunDeltaStatesBackward(rule_.shape, trees, scores, gradient, nullptr),
      cudaSuccess);
  ASSERT_EQ(RunDeltaRowsBackward(rule_.shape, trees, scores, gradient, nullptr),
            cudaSuccess);
  const double error = TensorError(4), gradient_error = TensorError(8);
  for (int64_t h = 0; h < heads; ++h) {
    const std::vector<DeltaOutput> want = Outputs(h);
    const std::vector<DeltaHead> gradients = Gradients(h, want, dout);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      SCOPED_TRACE(::testing::Message() << "head " << h << ", node " << n);
      const Node& node = nodes_[n];
      ExpectClose(HeadColumns(out.Read(), node, h), want[n].out, error, "out");
      ExpectClose(HeadColumns(u.Read(), node, h), want[n].u, error, "u");
      const DeltaHead& d = gradients[n];
      ExpectClose(Slices(dq.Read(), kKeys, node, h), d.q, gradient_error, "dq");
      ExpectClose(Slices(dk.Read(), kKeys, node, h), d.k, gradient_error, "dk");
      ExpectClose(HeadColumns(dv.Read(), node, h), d.v, gradient_error, "dv");
      ExpectClose(Slices(dbeta.Read(), 1, node, h), d.beta, gradient_error,
                  "dbeta");
      ExpectClose(Slices(dg.Read(), 1, node, h), d.g, gradient_error, "dg");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaDeltaChunksTest,
                         ::testing::Values(ChunkSizes{1, 2, 128, 165},
                                           ChunkSizes{2, 6, 64, 340},
                                           ChunkSizes{2, 6, 192, 165}),
                         [](const auto& sizes) {
                           return "Heads" +
                                  std::to_string(sizes.param.value_heads) +
                                  "Values" + std::to_string(sizes.param.values);
                         });

class CudaDeltaSizesTest : public CudaKernelTest {};

// The entries of a repeated token's inverse are equal, so their roundings would
// add up.
TEST_F(CudaDeltaSizesTest, RowsOfARepeatedTokenAreExact) {
  constexpr int64_t kRows = 130, kKeys = 128, kValues = 64;
  Rule rule(kRows, 1, 1, kKeys, kValues);
  for (int64_t t = 1; t < kRows; ++t) {
    std::copy_n(rule.mixed.begin(), rule.width,
                rule.mixed.begin() + t * rule.width);
  }
  std::ranges::fill(rule.beta, 0.9F);
  std::ranges::fill(rule.g, 0.0F);
  const DeviceArray mixed(DType::kBf16, rule.mixed);
  const DeviceBuffer<float> beta(rule.beta), g(rule.g);
  rule.shape.mixed_TW = mixed.data();
  rule.shape.beta_TH = beta.data();
  rule.shape.g_TH = g.data();
  const std::vector<Node> nodes = {{0, kRows, -1}};
  const Plan plan(nodes, /*keeps=*/false);
  const DeviceBuffer<DeltaChunkRange> chunks(plan.chunks);
  const DeviceBuffer<int64_t> tree_chunks(plan.trees);
  const DeltaTrees trees{chunks.data(), tree_chunks.data(), 1,
                         std::ssize(plan.chunks)};
  const std::vector<float> nans(kRows * 64, kNan);
  const DeviceArray w(DType::kBf16, nans), inverse(DType::kBf16, nans),
      rest(DType::kBf16, nans), out(DType::kBf16, nans);
  const DeltaScores scores{w.data(), inverse.data(), rest.data(), kRows};
  const DeviceBuffer<float> states(
      std::vector<float>(plan.num_states * kKeys * kValues, kNan));
  ASSERT_EQ(ScoreDeltaChunks(rule.shape, trees, scores, nullptr), cudaSuccess);
  ASSERT_EQ(RunDeltaChunks(rule.shape, trees, scores,
                           {states.data(), nullptr, out.data()}, nullptr),
            cudaSuccess);
  const DeltaOutput want = reference::RunDelta(
      rule.Head(0, 0, kRows, std::vector<double>(kKeys * kValues, 0.0)));
  const std::vector<float> got = out.Read();
  for (int64_t t = 0; t < kRows; ++t) {
    const auto row = want.out.begin() + t * kValues;
    ExpectClose(Columns(got, kValues, t, t + 1, 0, kValues),
                std::vector<double>(row, row + kValues), TensorError(4), "out");
  }
}

TEST_F(CudaDeltaSizesTest, HeadsOfOtherSizesAreRefused) {
  DeltaRuleRows shape{
      .num_key_heads = 1, .num_value_heads = 2, .value_features = 128};
  shape.key_features = 64;
  EXPECT_EQ(ScoreDeltaChunks(shape, {}, {}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RunDeltaChunks(shape, {}, {}, {}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RunDeltaStatesBackward(shape, {}, {}, {}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(RunDeltaRowsBackward(shape, {}, {}, {}, nullptr),
            cudaErrorInvalidValue);
  shape.key_features = kMaxDeltaStepKeys + 1;
  EXPECT_EQ(
      DeltaStep(shape, 1, nullptr, -1, nullptr, DType::kF32, nullptr, nullptr),
      cudaErrorInvalidValue);
}

}  // namespace
}  // namespace weft::kernels::cuda
