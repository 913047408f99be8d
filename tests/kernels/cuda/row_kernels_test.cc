// Compares the row kernels of kernels/cuda with the f64 loops of
// tests/kernels/cpu/reference.h, on ragged sizes and row strides, and on sizes
// that are read 16 bytes at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/rms_norm.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

namespace reference = weft::kernels::cpu::reference;

constexpr float kGap = 77;  // The value between the rows, where no kernel may
                            // write.

class CudaRmsNormTest : public CudaDtypeTest {
 protected:
  // Makes rows of `stride` elements: `features` random values, then kGap.
  void Fill(int64_t rows, int64_t features, int64_t stride, uint32_t seed,
            std::vector<float>* values) const {
    const std::vector<float> random = RandomFloats(rows * features, seed);
    values->assign(static_cast<size_t>(rows * stride), kGap);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(random.begin() + r * features, features,
                  values->begin() + r * stride);
    }
    *values = Rounded(GetParam(), *values);
  }

  // `gap` is the number of elements between rows of x. If `gap` and `features`
  // are multiples of 8, rows are read in packs.
  void Check(int64_t rows, int64_t features, DType weight_dtype, int64_t gap) {
    const int64_t stride = features + gap;
    std::vector<float> x, dy, before;
    Fill(rows, features, stride, 1, &x);
    Fill(rows, features, stride + gap, 2, &dy);
    Fill(rows, features, stride + 2 * gap, 3, &before);
    const std::vector<float> w =
        Rounded(weight_dtype, RandomFloats(features, 4));
    const DeviceArray x_device(GetParam(), x), dy_device(GetParam(), dy);
    const DeviceArray w_device(weight_dtype, w), dx_device(GetParam(), before);
    const DeviceArray y_device(GetParam(), x);
    const RmsNormRows args =
        Arguments(rows, features, weight_dtype, x_device, stride, w_device);
    ASSERT_EQ(RmsNorm(args, y_device.data(), stride, nullptr), cudaSuccess);
    ASSERT_EQ(RmsNormBackward(args, dy_device.data(), stride + gap,
                              dx_device.data(), stride + 2 * gap, nullptr),
              cudaSuccess);
    const std::vector<float> y = y_device.Read(), dx = dx_device.Read();
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<float> row = Slice(x, r * stride, features);
      const std::vector<double> y_row = reference::RmsNormRow(row, w, 1e-5);
      const std::vector<double> dx_row = reference::RmsNormBackwardRow(
          Slice(dy, r * (stride + gap), features), row, w, 1e-5);
      // With one feature, the norm x / |x| is constant. In its gradient, terms
      // of size dy / |x| cancel, but their rounding errors remain.
      const double scale = features == 1 ? 16 + 16 / std::abs(row[0]) : 16;
      const auto tolerance = [&](double value) {
        return StoredTolerance(EpsilonOf(GetParam()), features, scale, value);
      };
      for (int64_t i = 0; i < features; ++i) {
        ASSERT_NEAR(y[r * stride + i], y_row[i], tolerance(y_row[i]));
        const int64_t at = r * (stride + 2 * gap) + i;
        const double sum = before[at] + dx_row[i];
        ASSERT_NEAR(dx[at], sum, tolerance(sum));
      }
      for (int64_t i = features; i < stride; ++i) {
        ASSERT_EQ(y[r * stride + i], kGap);
        ASSERT_EQ(dx[r * (stride + 2 * gap) + i], kGap);
      }
    }
  }

  // Compares AddRmsNorm with an addition and an RmsNorm of its result.
  void CheckAdd(int64_t rows, int64_t features, int64_t gap) {
    const int64_t stride = features + gap;
    std::vector<float> x, before;
    Fill(rows, features, stride, 1, &x);
    Fill(rows, features, stride, 2, &before);
    const DeviceArray x_device(GetParam(), x), sum_device(GetParam(), before);
    const DeviceArray y_device(GetParam(), x), expected_device(GetParam(), x);
    const DeviceArray w_device(GetParam(), RandomFloats(features, 4));
    const RmsNormRows args =
        Arguments(rows, features, GetParam(), x_device, stride, w_device);
    ASSERT_EQ(AddRmsNorm(args, sum_device.data(), stride, y_device.data(),
                         stride, nullptr),
              cudaSuccess);
    std::vector<float> sums = before;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = r * stride; i < r * stride + features; ++i) {
        sums[i] += x[i];
      }
    }
    sums = Rounded(GetParam(), sums);
    ASSERT_EQ(sum_device.Read(), sums);
    const DeviceArray added(GetParam(), sums);
    ASSERT_EQ(
        RmsNorm(Arguments(rows, features, GetParam(), added, stride, w_device),
                expected_device.data(), stride, nullptr),
        cudaSuccess);
    ASSERT_EQ(y_device.Read(), expected_device.Read());
  }

 private:
  static RmsNormRows Arguments(int64_t rows, int64_t features,
                               DType weight_dtype, const DeviceArray& x,
                               int64_t x_stride, const DeviceArray& weight) {
    return {.dtype = GetParam(),
            .weight_dtype = weight_dtype,
            .num_rows = rows,
            .features = features,
            .eps = 1e-5F,
            .x_TD = x.data(),
            .x_stride = x_stride,
            .weight_D = weight.data()};
  }
};

TEST_P(CudaRmsNormTest, MatchesTheReferenceForAnyShapeAndRowStride) {
  for (const int64_t features : {1, 5, 31, 32, 33, 64, 257, 576, 1025, 2049}) {
    for (const int64_t rows : {1, 3}) {
      Check(rows, features, GetParam(), 3);
      Check(rows, features, DType::kF32, 3);
      if (HasFatalFailure()) return;
    }
  }
}

// A row of the last size is longer than what the threads of a block keep in
// registers.
TEST_P(CudaRmsNormTest, MatchesTheReferenceInPacks) {
  for (const int64_t features : {8, 128, 576, 4096, 8192 + 1024}) {
    Check(2, features, GetParam(), 8);
    Check(2, features, DType::kF32, 8);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaRmsNormTest, AfterAnAdditionHasTheBitsOfBothCalls) {
  for (const int64_t features : {1, 33, 576, 1025, 4096, 8192 + 1024}) {
    for (const int64_t gap : {0, 3, 8}) {
      CheckAdd(2, features, gap);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaRmsNormTest, WorksInPlaceAndKeepsNanInItsRow) {
  std::vector<float> x = RandomFloats(4 * 40, 5);
  x[2 * 40 + 39] = kNan;
  const DeviceArray device(GetParam(), x);
  const DeviceArray other(GetParam(), x);
  const DeviceArray weight(DType::kF32, std::vector<float>(40, 1));
  const RmsNormRows args = {.dtype = GetParam(),
                            .weight_dtype = DType::kF32,
                            .num_rows = 4,
                            .features = 40,
                            .eps = 1e-5F,
                            .x_TD = device.data(),
                            .x_stride = 40,
                            .weight_D = weight.data()};
  ASSERT_EQ(RmsNorm(args, other.data(), 40, nullptr), cudaSuccess);
  ASSERT_EQ(RmsNorm(args, device.data(), 40, nullptr), cudaSuccess);
  const std::vector<float> y = other.Read(), in_place = device.Read();
  for (int i = 0; i < 160; ++i) {
    ASSERT_EQ(std::isnan(y[i]), i / 40 == 2);
    if (i / 40 != 2) {
      ASSERT_EQ(y[i], in_place[i]);
    }
  }
}

TEST_P(CudaRmsNormTest, NoRowsAreNoError) {
  RmsNormRows args = {.dtype = GetParam(), .weight_dtype = GetParam()};
  args.features = 8;
  EXPECT_EQ(RmsNorm(args, nullptr, 8, nullptr), cudaSuccess);
  EXPECT_EQ(AddRmsNorm(args, nullptr, 8, nullptr, 8, nullptr), cudaSuccess);
  EXPECT_EQ(RmsNormBackward(args, nullptr, 8, nullptr, 8, nullptr),
            cudaSuccess);
}

TEST_F(CudaKernelTest, RmsNormRefusesABf16WeightBesideF32Rows) {
  const RmsNormRows args = {.dtype = DType::kF32,
                            .weight_dtype = DType::kBf16,
                            .num_rows = 1,
                            .features = 1};
  EXPECT_EQ(RmsNorm(args, nullptr, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RmsNormBackward(args, nullptr, 1, nullptr, 1, nullptr),
            cudaErrorInvalidValue);
}

struct GatedCase {
  GateActivation activation;
  std::vector<double> (*forward)(const std::vector<float>&,
                                 const std::vector<float>&);
  reference::GatedGradient (*backward)(const std::vector<float>&,
                                       const std::vector<float>&,
                                       const std::vector<float>&);
};

class CudaGatedProductTest : public CudaDtypeTest {
 protected:
  void Check(const GatedCase& c, int64_t rows, int64_t features) {
    std::vector<float> gate_up = RandomFloats(rows * 2 * features, 9, 4);
    gate_up[0] = -200;
    gate_up[2 * features * (rows - 1)] = 200;
    gate_up = Rounded(GetParam(), gate_up);
    const std::vector<float> dout =
        Rounded(GetParam(), RandomFloats(rows * features, 10));
    const DeviceArray gate_up_device(GetParam(), gate_up);
    const DeviceArray dout_device(GetParam(), dout);
    const DeviceArray out_device(GetParam(), dout);
    ASSERT_EQ(GatedProduct(GetParam(), c.activation, rows, features,
                           gate_up_device.data(), out_device.data(), nullptr),
              cudaSuccess);
    ASSERT_EQ(GatedProductBackward(GetParam(), c.activation, rows, features,
                                   dout_device.data(), gate_up_device.data(),
                                   nullptr),
              cudaSuccess);
    const std::vector<float> out = out_device.Read();
    const std::vector<float> gradient = gate_up_device.Read();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * 2 * features;
      const std::vector<float> gate = Slice(gate_up, at, features);
      const std::vector<float> up = Slice(gate_up, at + features, features);
      const std::vector<double> expected = c.forward(gate, up);
      const reference::GatedGradient d =
          c.backward(Slice(dout, r * features, features), gate, up);
      const auto tolerance = [](double value) {
        return StoredTolerance(EpsilonOf(GetParam()), 1, 400, value);
      };
      for (int64_t i = 0; i < features; ++i) {
        ASSERT_NEAR(out[r * features + i], expected[i], tolerance(expected[i]));
        ASSERT_NEAR(gradient[at + i], d.gate[i], tolerance(d.gate[i]));
        ASSERT_NEAR(gradient[at + features + i], d.up[i], tolerance(d.up[i]));
      }
    }
  }
};

TEST_P(CudaGatedProductTest, MatchesTheReferenceForAllActivations) {
  for (const int64_t features : {1, 33, 255, 256, 1025, 1536, 14336}) {
    Check({GateActivation::kSilu, reference::SwiGluRow,
           reference::SwiGluBackwardRow},
          3, features);
    Check({GateActivation::kGeluTanh, reference::GeGluRow,
           reference::GeGluBackwardRow},
          2, features);
    Check({GateActivation::kClampedSilu, reference::ClampedSwiGluRow,
           reference::ClampedSwiGluBackwardRow},
          2, features);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaGatedProductTest, ClampsKeepNan) {
  for (const std::vector<float>& gate_up :
       {std::vector<float>{kNan, 1}, std::vector<float>{1, kNan}}) {
    const DeviceArray x(GetParam(), gate_up);
    const DeviceArray out(GetParam(), {0});
    ASSERT_EQ(GatedProduct(GetParam(), GateActivation::kClampedSilu, 1, 1,
                           x.data(), out.data(), nullptr),
              cudaSuccess);
    EXPECT_TRUE(std::isnan(out.Read()[0]));
  }
}

class CudaLseMergeTest : public CudaDtypeTest {};

// In the four rows, both parts have keys, only `out` has keys, only `part` has
// keys, and no part has keys.
TEST_P(CudaLseMergeTest, MatchesTheFormulaAndLeavesEmptyPartsOut) {
  for (const int64_t features : {1, 20, 64, 128, 256, 300}) {
    const std::vector<float> lse = {3, 100, -kInf, -kInf};
    const std::vector<float> part_lse = {4, -kInf, -50, -kInf};
    const std::vector<float> out =
        Rounded(GetParam(), RandomFloats(4 * features, 11));
    const std::vector<float> part =
        Rounded(GetParam(), RandomFloats(4 * features, 12));
    const DeviceArray out_device(GetParam(), out);
    const DeviceArray part_device(GetParam(), part);
    const DeviceBuffer<float> lse_device(lse), part_lse_device(part_lse);
    ASSERT_EQ(LseMergeRows(GetParam(), 4, features, part_device.data(),
                           part_lse_device.data(), out_device.data(),
                           lse_device.data(), nullptr),
              cudaSuccess);
    const std::vector<float> merged = out_device.Read();
    const std::vector<float> merged_lse = lse_device.Read();
    const double sum = std::exp(3.0) + std::exp(4.0);
    EXPECT_NEAR(merged_lse[0], std::log(sum), Tolerance(kEpsilonF32, 1, 4));
    EXPECT_EQ(Slice(merged_lse, 1, 3), (std::vector<float>{100, -50, -kInf}));
    for (int64_t c = 0; c < features; ++c) {
      const double first =
          (out[c] * std::exp(3.0) + part[c] * std::exp(4.0)) / sum;
      EXPECT_NEAR(merged[c], first, Tolerance(EpsilonOf(GetParam()), 2, 4));
      EXPECT_EQ(merged[features + c], out[features + c]);
      EXPECT_EQ(merged[2 * features + c], part[2 * features + c]);
      EXPECT_EQ(merged[3 * features + c], out[3 * features + c]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaRmsNormTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);
INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaGatedProductTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);
INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaLseMergeTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

}  // namespace
}  // namespace weft::kernels::cuda
