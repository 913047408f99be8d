// Compares RunLoraHeads with loops in f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/reference.h"
#include "tests/kernels_cuda/lora_decode_problem.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::kEpsilonBf16;
namespace reference = weft::kernels::cpu::reference;

constexpr float kEps = 1e-5F;
constexpr int64_t kHidden = 300;
constexpr int64_t kPositions = 9;

// The heads of a layer.
struct Shape {
  int64_t num_q = 4;
  int64_t num_k = 2;
  int64_t features = 0;  // The features of one head.
  bool has_norms = false;
  bool has_bias = false;
};

std::vector<int64_t> WidthsOf(const Shape& shape) {
  return {shape.num_q * shape.features, shape.num_k * shape.features,
          shape.num_k * shape.features};
}

// A launch of RunLoraHeads. The base product's rows are `shift` elements wider
// than the heads.
struct Heads {
  Heads(const DecodeProblem& problem, const Shape& of_shape)
      : adapters(problem),
        shape(of_shape),
        rows(problem.num_rows),
        shift(problem.shift),
        half(shape.features / 2),
        width((shape.num_q + 2 * shape.num_k) * shape.features),
        in_values(Values(rows * stride() + shift, 1)),
        bias_values(shape.has_bias ? Values(shift + width, 2)
                                   : std::vector<float>(shift + width)),
        q_C(Values(shift + shape.features, 4)),
        k_C(Values(shift + shape.features, 5)),
        in(DType::kBf16, in_values),
        bias(DType::kBf16, bias_values),
        q_weight(DType::kBf16, q_C),
        k_weight(DType::kBf16, k_C),
        k_pages(DType::kBf16, Untouched()),
        v_pages(DType::kBf16, Untouched()) {
    for (int64_t i = 0; i < kPositions * half; ++i) {
      cos_values.push_back(std::cos(0.1F * static_cast<float>(i)));
      sin_values.push_back(std::sin(0.1F * static_cast<float>(i)));
    }
    for (int64_t row = 0; row < rows; ++row) {
      // Each fourth row is padding.
      slot_values.push_back(row % 4 == 3 ? -1 : (row * 7 + 3) % NumSlots());
      position_values.push_back(static_cast<int32_t>(row * 5 % kPositions));
      for (int64_t i = 0; i < LoraResidualParts(kHidden); ++i) {
        squares_values.push_back(static_cast<float>(100 + 10 * (row % 3 + i)));
      }
    }
    cos = std::make_unique<DeviceBuffer<float>>(cos_values);
    sin = std::make_unique<DeviceBuffer<float>>(sin_values);
    squares = std::make_unique<DeviceBuffer<float>>(squares_values);
    slots = std::make_unique<DeviceBuffer<int64_t>>(slot_values);
    positions = std::make_unique<DeviceBuffer<int32_t>>(position_values);
    MakeLaunch();
  }

  static std::vector<float> Values(int64_t count, uint32_t seed) {
    return Rounded(DType::kBf16, RandomFloats(count, seed));
  }
  [[nodiscard]] std::vector<float> Untouched() const {
    return std::vector<float>(shift + NumSlots() * shape.num_k * shape.features,
                              9);
  }
  [[nodiscard]] int64_t NumSlots() const { return rows * 7 + 4; }
  [[nodiscard]] int64_t stride() const { return width + shift; }
  // Returns the first column of a projection within a row's heads.
  [[nodiscard]] int64_t ColumnOf(size_t projection) const {
    return projection == 0
               ? 0
               : (shape.num_q + (projection == 2 ? shape.num_k : 0)) *
                     shape.features;
  }
  [[nodiscard]] HeadRows RowsOf(size_t projection) const {
    return {.data = in.at(shift + ColumnOf(projection)),
            .num_heads = projection == 0 ? shape.num_q : shape.num_k,
            .token_stride = stride(),
            .head_stride = shape.features};
  }
  void MakeLaunch() {
    launch = {
        .table = adapters.table(),
        .shrunk = adapters.shrunk(),
        .norm = {.squares_TP = squares->data(), .hidden = kHidden, .eps = kEps},
        .bias_W = shape.has_bias ? bias.at(shift) : nullptr,
        .rows = {.dtype = DType::kBf16,
                 .num_tokens = rows,
                 .half_features = half,
                 .q = RowsOf(0),
                 .k = RowsOf(1),
                 .positions_T = positions->data(),
                 .cos_PC = cos->data(),
                 .sin_PC = sin->data()},
        .slots = {.v = RowsOf(2),
                  .slots_T = slots->data(),
                  .k_pages = k_pages.at(shift),
                  .v_pages = v_pages.at(shift)}};
    for (size_t p = 0; p < 3; ++p) {
      launch.projections[p] = {.slot = 1 + static_cast<int64_t>(p),
                               .column = ColumnOf(p),
                               .features = WidthsOf(shape)[p]};
    }
    if (shape.has_norms) {
      launch.norms = {.dtype = DType::kBf16,
                      .eps = kEps,
                      .q_C = q_weight.at(shift),
                      .k_C = k_weight.at(shift)};
    }
  }
  void Run() const { ASSERT_EQ(RunLoraHeads(launch, nullptr), cudaSuccess); }

  // Returns the expected head of a projection. Heads of v get no norm and no
  // rotation.
  [[nodiscard]] std::vector<double> Expected(int64_t row, size_t projection,
                                             int64_t head) const {
    const int64_t parts = LoraResidualParts(kHidden);
    double sum = 0;
    for (int64_t i = 0; i < parts; ++i) sum += squares_values[row * parts + i];
    const double factor = 1 / std::sqrt(sum / kHidden + kEps);
    std::vector<float> y;
    for (int64_t c = 0; c < shape.features; ++c) {
      const int64_t feature = head * shape.features + c;
      const int64_t column = ColumnOf(projection) + feature;
      y.push_back(static_cast<float>(
          factor * (in_values[shift + row * stride() + column] +
                    adapters.Expanded(row, projection, feature)) +
          bias_values[shift + column]));
    }
    if (projection == 2) return {y.begin(), y.end()};
    if (shape.has_norms) {
      const std::vector<double> normed = reference::RmsNormRow(
          y, Slice(projection == 0 ? q_C : k_C, shift, shape.features), kEps);
      y.assign(normed.begin(), normed.end());
    }
    const int64_t at = position_values[row] * half;
    return reference::RotaryHead(y, Slice(cos_values, at, half),
                                 Slice(sin_values, at, half), false);
  }
  // The tolerance covers the rounding of the head, its norm and its rotation.
  static void ExpectHead(const float* actual,
                         const std::vector<double>& expected) {
    double largest = 1;
    for (const double x : expected) largest = std::max(largest, std::abs(x));
    for (size_t c = 0; c < expected.size(); ++c) {
      ASSERT_NEAR(actual[c], expected[c], 2 * kEpsilonBf16 * largest) << c;
    }
  }
  void CheckRow(int64_t row, const std::vector<float>& q, std::vector<float>* k,
                std::vector<float>* v) const {
    for (int64_t head = 0; head < shape.num_q; ++head) {
      ExpectHead(q.data() + shift + row * stride() + head * shape.features,
                 Expected(row, 0, head));
    }
    if (slot_values[row] < 0) return;
    for (int64_t head = 0; head < shape.num_k; ++head) {
      const int64_t at =
          shift + (slot_values[row] * shape.num_k + head) * shape.features;
      for (auto* pages : {k, v}) {
        ExpectHead(pages->data() + at, Expected(row, pages == k ? 1 : 2, head));
        std::fill_n(pages->data() + at, shape.features, 9.0F);
      }
    }
  }
  void Check() const {
    const std::vector<float> q = in.Read();
    std::vector<float> k = k_pages.Read(), v = v_pages.Read();
    for (int64_t row = 0; row < rows; ++row) {
      SCOPED_TRACE(row);
      CheckRow(row, q, &k, &v);
    }
    // CheckRow has reset what it checked. The kernel wrote nothing else.
    EXPECT_EQ(k, Untouched());
    EXPECT_EQ(v, Untouched());
  }

  DecodeAdapters adapters;
  Shape shape;
  int64_t rows, shift, half, width;
  std::vector<float> in_values, bias_values, q_C, k_C, cos_values, sin_values,
      squares_values;
  std::vector<int64_t> slot_values;
  std::vector<int32_t> position_values;
  DeviceArray in, bias, q_weight, k_weight, k_pages, v_pages;
  std::unique_ptr<DeviceBuffer<float>> cos, sin, squares;
  std::unique_ptr<DeviceBuffer<int64_t>> slots;
  std::unique_ptr<DeviceBuffer<int32_t>> positions;
  LoraHeads launch;
};

class CudaLoraHeadsTest : public CudaKernelTest {};

void CheckHeads(const DecodeProblem& problem, const Shape& shape) {
  const Heads heads(problem, shape);
  heads.Run();
  heads.Check();
}

TEST_F(CudaLoraHeadsTest, PreparesHeadsOfMixedRows) {
  for (const Shape& shape :
       {Shape{.features = 64, .has_bias = true},
        Shape{.num_q = 3, .features = 80, .has_norms = true},
        Shape{.num_q = 2, .num_k = 1, .features = 256, .has_norms = true}}) {
    CheckHeads(MixedDecode(WidthsOf(shape), 0, 0), shape);
  }
}

TEST_F(CudaLoraHeadsTest, PreparesHeadsThatLieAnywhere) {
  for (const Shape& shape :
       {Shape{.features = 6, .has_norms = true, .has_bias = true},
        Shape{.features = 2, .has_bias = true},
        Shape{.num_q = 5, .features = 20}, Shape{.features = 64}}) {
    CheckHeads(MixedDecode(WidthsOf(shape), 0, 3), shape);
  }
}

TEST_F(CudaLoraHeadsTest, PreparesHeadsOfManyRows) {
  const Shape shape = {.num_q = 1, .num_k = 1, .features = 16};
  CheckHeads(ManyItems(WidthsOf(shape), 0, /*tiles=*/3), shape);
}

// The heads are those of Llama-3.1-8B, Qwen3-8B and SmolLM2.
TEST_F(CudaLoraHeadsTest, PreparesTheHeadsOfServedModels) {
  for (const Shape& shape :
       {Shape{.num_q = 32, .num_k = 8, .features = 128},
        Shape{.num_q = 32, .num_k = 8, .features = 128, .has_norms = true},
        Shape{.num_q = 9, .num_k = 3, .features = 64}}) {
    CheckHeads(OneRow(WidthsOf(shape), 0, 32, 0), shape);
  }
}

// As in the first layer, the rows are already normed.
TEST_F(CudaLoraHeadsTest, PreparesNormedRowsLikeAFactorOfOne) {
  const Shape shape = {.features = 64};
  const DecodeProblem problem = MixedDecode(WidthsOf(shape), 0, 0);
  Heads normed(problem, shape);
  normed.launch.norm = {};
  normed.Run();
  std::ranges::fill(normed.squares_values,
                    static_cast<float>(kHidden) /
                        static_cast<float>(LoraResidualParts(kHidden)));
  normed.Check();
}

TEST_F(CudaLoraHeadsTest, RefusesHeadsThatFillNoTile) {
  const Shape shape = {.num_q = 1, .num_k = 1, .features = 258};
  const Heads heads(OneRow(WidthsOf(shape), 0, 8, 0), shape);
  EXPECT_EQ(RunLoraHeads(heads.launch, nullptr), cudaErrorInvalidValue);
}

TEST_F(CudaLoraHeadsTest, RefusesOtherDtypes) {
  const Shape shape = {.features = 64, .has_norms = true};
  Heads heads(OneRow(WidthsOf(shape), 0, 8, 0), shape);
  heads.launch.norms.dtype = DType::kF32;
  EXPECT_EQ(RunLoraHeads(heads.launch, nullptr), cudaErrorInvalidValue);
  heads.launch.norms = {};
  heads.launch.rows.dtype = DType::kF32;
  EXPECT_EQ(RunLoraHeads(heads.launch, nullptr), cudaErrorInvalidValue);
}

TEST_F(CudaLoraHeadsTest, GivesARowTheSameBitsWithoutItsNeighbours) {
  const Shape shape = {.features = 64, .has_norms = true};
  const DecodeProblem all = MixedDecode(WidthsOf(shape), 0, 0);
  const Heads with(all, shape);
  with.Run();
  for (const int64_t row : {2, 10, 22}) {
    const Heads without(WithBaseRowsAround(all, row), shape);
    without.Run();
    const auto rows = [&](const Heads& heads) {
      const int64_t size = shape.num_k * shape.features;
      const int64_t at = heads.slot_values[row] * size;
      std::vector<float> values = Slice(heads.in.Read(), row * heads.stride(),
                                        shape.num_q * shape.features);
      for (const DeviceArray* pages : {&heads.k_pages, &heads.v_pages}) {
        const std::vector<float> own = Slice(pages->Read(), at, size);
        values.insert(values.end(), own.begin(), own.end());
      }
      return values;
    };
    EXPECT_EQ(rows(with), rows(without)) << row;
  }
}

TEST_F(CudaLoraHeadsTest, KeepsNanInItsHead) {
  const Shape shape = {.features = 64, .has_norms = true};
  const Heads heads(MixedDecode(WidthsOf(shape), 0, 0), shape);
  const uint16_t nan = ToBf16(kNan);
  ASSERT_EQ(cudaMemcpy(heads.in.at(9 * heads.stride() + 70), &nan, sizeof nan,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  heads.Run();
  const std::vector<float> q = heads.in.Read();
  for (int64_t row = 0; row < heads.rows; ++row) {
    for (int64_t i = 0; i < shape.num_q * shape.features; ++i) {
      ASSERT_EQ(std::isnan(q[row * heads.stride() + i]),
                row == 9 && i / shape.features == 1)
          << row << " " << i;
    }
  }
}

}  // namespace
}  // namespace weft::kernels::cuda
