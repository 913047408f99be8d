// Times the kernels that pass over rows once: norms, the rotation of the heads
// of a projection, the gated product, and the merge of attention results.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/rms_norm.h"
#include "kernels/cuda/rotary.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

namespace reference = cpu::reference;

constexpr int64_t kRows = 8192;
constexpr int64_t kHidden = 4096;
constexpr int64_t kHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kHeadFeatures = kHidden / kHeads;
constexpr float kEps = 1e-5F;
// The rows whose results are compared with loops in f64.
constexpr int64_t kCheckedRows[] = {0, kRows / 2 - 1, kRows - 1};

void CheckRow(const Bf16Buffer& actual, int64_t begin,
              const std::vector<double>& expected, int64_t terms,
              const char* what) {
  const std::vector<float> row =
      actual.Floats(begin, static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < row.size(); ++i) {
    CheckNear(row[i], expected[i], kEpsilonBf16, terms, 1, what);
  }
}

// Returns `before` plus `added`.
std::vector<double> Sum(const std::vector<float>& before,
                        std::vector<double> added) {
  for (size_t i = 0; i < added.size(); ++i) added[i] += before[i];
  return added;
}

// Compares y with the RMS norm of `sum`, in the rows kCheckedRows.
void CheckAdd(const Bf16Buffer& sum, const Bf16Buffer& y,
              const Bf16Buffer& weight) {
  const std::vector<float> w = weight.Floats(0, kHidden);
  for (const int64_t r : kCheckedRows) {
    CheckRow(y, r * kHidden,
             reference::RmsNormRow(sum.Floats(r * kHidden, kHidden), w, kEps),
             kHidden, "AddRmsNorm");
  }
}

void BenchNorms(const Device& device) {
  const Bf16Buffer x(kRows * kHidden), y(kRows * kHidden), weight(kHidden);
  const Bf16Buffer dy(kRows * kHidden), dx(kRows * kHidden);
  const Bf16Buffer sum(kRows * kHidden);
  const RmsNormRows rows = {.dtype = DType::kBf16,
                            .weight_dtype = DType::kBf16,
                            .num_rows = kRows,
                            .features = kHidden,
                            .eps = kEps,
                            .x_TD = x.data(),
                            .x_stride = kHidden,
                            .weight_D = weight.data()};
  const auto forward = [&] {
    Check(RmsNorm(rows, y.data(), kHidden, nullptr));
  };
  const auto backward = [&] {
    Check(
        RmsNormBackward(rows, dy.data(), kHidden, dx.data(), kHidden, nullptr));
  };
  const auto add = [&] {
    Check(AddRmsNorm(rows, sum.data(), kHidden, y.data(), kHidden, nullptr));
  };
  std::vector<std::vector<float>> before;
  for (const int64_t r : kCheckedRows) {
    before.push_back(dx.Floats(r * kHidden, kHidden));
  }
  add();
  CheckAdd(sum, y, weight);
  forward();
  backward();
  const std::vector<float> w = weight.Floats(0, kHidden);
  size_t i = 0;
  for (const int64_t r : kCheckedRows) {
    const std::vector<float> row = x.Floats(r * kHidden, kHidden);
    CheckRow(y, r * kHidden, reference::RmsNormRow(row, w, kEps), kHidden,
             "RmsNorm");
    CheckRow(
        dx, r * kHidden,
        Sum(before[i++], reference::RmsNormBackwardRow(
                             dy.Floats(r * kHidden, kHidden), row, w, kEps)),
        kHidden, "RmsNormBackward");
  }
  Line("RmsNorm").AddBytes(device, 4.0 * kRows * kHidden, forward).Print();
  Line("AddRmsNorm").AddBytes(device, 8.0 * kRows * kHidden, add).Print();
  Line("RmsNormBackward")
      .AddBytes(device, 8.0 * kRows * kHidden, backward)
      .Print();
}

void BenchGated(const Device& device) {
  const Bf16Buffer gate_up(2 * kRows * kHidden), dout(kRows * kHidden);
  const Bf16Buffer out(kRows * kHidden);
  const auto forward = [&] {
    Check(GatedProduct(DType::kBf16, GateActivation::kSilu, kRows, kHidden,
                       gate_up.data(), out.data(), nullptr));
  };
  const auto backward = [&] {
    Check(GatedProductBackward(DType::kBf16, GateActivation::kSilu, kRows,
                               kHidden, dout.data(), gate_up.data(), nullptr));
  };
  std::vector<std::vector<float>> gates, ups;
  for (const int64_t r : kCheckedRows) {
    gates.push_back(gate_up.Floats(2 * r * kHidden, kHidden));
    ups.push_back(gate_up.Floats((2 * r + 1) * kHidden, kHidden));
  }
  forward();
  backward();
  size_t i = 0;
  for (const int64_t r : kCheckedRows) {
    CheckRow(out, r * kHidden, reference::SwiGluRow(gates[i], ups[i]), 1,
             "GatedProduct");
    const reference::GatedGradient gradient = reference::SwiGluBackwardRow(
        dout.Floats(r * kHidden, kHidden), gates[i], ups[i]);
    CheckRow(gate_up, 2 * r * kHidden, gradient.gate, 1,
             "GatedProductBackward, gate");
    CheckRow(gate_up, (2 * r + 1) * kHidden, gradient.up, 1,
             "GatedProductBackward, up");
    ++i;
  }
  Line("GatedProduct").AddBytes(device, 6.0 * kRows * kHidden, forward).Print();
  Line("GatedProductBackward")
      .AddBytes(device, 10.0 * kRows * kHidden, backward)
      .Print();
}

constexpr int64_t kHalf = kHeadFeatures / 2;
constexpr int64_t kProjected = (kHeads + 2 * kKvHeads) * kHeadFeatures;

// A projection of queries, keys and values, and the pages of its tokens.
class Projection {
 public:
  Projection()
      : qkv_(kRows * kProjected),
        norm_(kHeadFeatures),
        k_pages_(kRows * kKvHeads * kHeadFeatures),
        v_pages_(kRows * kKvHeads * kHeadFeatures),
        angles_(Angles()),
        cos_(angles_.cos),
        sin_(angles_.sin),
        positions_(Counted<int32_t>()),
        slots_(Counted<int64_t>()) {}

  void Prepare(bool with_norms, bool with_pages) const {
    Check(Rotary(Rows(), with_norms ? Norms() : HeadNorms(),
                 with_pages ? Slots() : KvSlots(), nullptr));
  }
  void Backward() const {
    Check(RotaryBackward(Rows(), {},
                         {.q = Heads(0, kHeads), .k = Heads(kHeads, kKvHeads)},
                         nullptr));
  }
  // Runs Prepare once and checks the first head of some tokens.
  void CheckResults() const;

 private:
  struct Table {
    std::vector<float> cos, sin;
  };
  static Table Angles();
  template <typename T>
  static std::vector<T> Counted() {
    std::vector<T> numbers(static_cast<size_t>(kRows));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }
  HeadRows Heads(int64_t first, int64_t count) const {
    return {.data = qkv_.data() + first * kHeadFeatures,
            .num_heads = count,
            .token_stride = kProjected,
            .head_stride = kHeadFeatures};
  }
  RotaryRows Rows() const {
    return {.dtype = DType::kBf16,
            .num_tokens = kRows,
            .half_features = kHalf,
            .q = Heads(0, kHeads),
            .k = Heads(kHeads, kKvHeads),
            .positions_T = positions_.data(),
            .cos_PC = cos_.data(),
            .sin_PC = sin_.data()};
  }
  HeadNorms Norms() const {
    return {DType::kBf16, kEps, norm_.data(), norm_.data()};
  }
  KvSlots Slots() const {
    return {.v = Heads(kHeads + kKvHeads, kKvHeads),
            .slots_T = slots_.data(),
            .k_pages = k_pages_.data(),
            .v_pages = v_pages_.data()};
  }

  Bf16Buffer qkv_, norm_, k_pages_, v_pages_;
  Table angles_;
  FloatBuffer cos_, sin_;
  Buffer<int32_t> positions_;
  Buffer<int64_t> slots_;
};

Projection::Table Projection::Angles() {
  Table table;
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t c = 0; c < kHalf; ++c) {
      const double angle =
          static_cast<double>(t) *
          std::pow(1e4, -static_cast<double>(c) / static_cast<double>(kHalf));
      table.cos.push_back(static_cast<float>(std::cos(angle)));
      table.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

void Projection::CheckResults() const {
  std::vector<std::vector<double>> expected;
  for (const int64_t r : kCheckedRows) {
    const auto begin = static_cast<size_t>(r * kHalf);
    const auto angles = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + begin,
                                all.begin() + begin + kHalf);
    };
    expected.push_back(
        reference::RotaryHead(qkv_.Floats(r * kProjected, kHeadFeatures),
                              angles(angles_.cos), angles(angles_.sin),
                              /*inverse=*/false));
  }
  Prepare(/*with_norms=*/false, /*with_pages=*/true);
  size_t i = 0;
  for (const int64_t r : kCheckedRows) {
    CheckRow(qkv_, r * kProjected, expected[i++], 2, "Rotary");
  }
}

void BenchRotary(const Device& device) {
  const Projection projection;
  projection.CheckResults();
  constexpr double kTokenBytes =
      4.0 * (kHeads + kKvHeads) * kHeadFeatures + 2.0 * sizeof(float) * kHalf;
  // To write a token to the pages, the kernel reads v and writes k and v.
  constexpr double kPageBytes = 6.0 * kKvHeads * kHeadFeatures;
  for (const bool norms : {false, true}) {
    for (const bool pages : {false, true}) {
      Line("Rotary")
          .Add("norms", norms)
          .Add("pages", pages)
          .AddBytes(device, kRows * (kTokenBytes + (pages ? kPageBytes : 0)),
                    [&] { projection.Prepare(norms, pages); })
          .Print();
    }
  }
  Line("RotaryBackward")
      .AddBytes(device, kRows * kTokenBytes, [&] { projection.Backward(); })
      .Print();
}

void BenchMerge(const Device& device) {
  constexpr int64_t kMerged = kRows * kHeads;
  const Bf16Buffer part(kRows * kHidden), out(kRows * kHidden);
  const FloatBuffer part_lse(kMerged), lse(kMerged);
  std::vector<std::vector<double>> expected;
  for (const int64_t r : kCheckedRows) {
    const double own = lse.Floats(r, 1)[0];
    const double other = part_lse.Floats(r, 1)[0];
    const double both = std::log(std::exp(own) + std::exp(other));
    const std::vector<float> o = out.Floats(r * kHeadFeatures, kHeadFeatures);
    const std::vector<float> p = part.Floats(r * kHeadFeatures, kHeadFeatures);
    expected.emplace_back();
    for (size_t c = 0; c < o.size(); ++c) {
      expected.back().push_back(o[c] * std::exp(own - both) +
                                p[c] * std::exp(other - both));
    }
  }
  const auto run = [&] {
    Check(LseMergeRows(DType::kBf16, kMerged, kHeadFeatures, part.data(),
                       part_lse.data(), out.data(), lse.data(), nullptr));
  };
  run();
  size_t i = 0;
  for (const int64_t r : kCheckedRows) {
    CheckRow(out, r * kHeadFeatures, expected[i++], 2, "LseMergeRows");
  }
  Line("LseMergeRows")
      .AddBytes(device, 6.0 * kRows * kHidden + 12.0 * kMerged, run)
      .Print();
}

}  // namespace

void BenchRows(const Device& device) {
  BenchNorms(device);
  BenchGated(device);
  BenchRotary(device);
  BenchMerge(device);
}

}  // namespace weft::kernels::cuda::bench
