// The segmented products of kernels/cuda against loops in f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_product.h"
#include "tests/kernels_cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::kEpsilonBf16;
using weft::testing::kEpsilonF32;
using weft::testing::Tolerance;

constexpr int64_t kRows = 300;

// A segment of rows of one adapter, and what is its own in the product.
struct Segment {
  int64_t begin;
  int64_t end;
  int64_t inputs;
  int64_t outputs;
  int64_t x_column;
  int64_t y_column;
  float scale;
};

struct ProductCase {
  LoraWeightOrder order;
  bool adds;
  int num_splits;
  std::vector<Segment> segments;
};

class CudaLoraProductTest : public CudaKernelTest {
 protected:
  // Strides that no vector load divides.
  static constexpr int64_t kXStride = 211;
  static constexpr int64_t kYStride = 213;

  std::vector<float> Expected(const ProductCase& c,
                              const std::vector<std::vector<float>>& weights,
                              std::vector<float> y) const {
    std::vector<double> sums(y.begin(), y.end());
    for (size_t s = 0; s < c.segments.size(); ++s) {
      const Segment& segment = c.segments[s];
      for (int64_t t = segment.begin; t < segment.end; ++t) {
        for (int64_t o = 0; o < segment.outputs; ++o) {
          double sum = 0;
          for (int64_t i = 0; i < segment.inputs; ++i) {
            const int64_t at = c.order == LoraWeightOrder::kOutputsByInputs
                                   ? o * segment.inputs + i
                                   : i * segment.outputs + o;
            sum +=
                static_cast<double>(x_[t * kXStride + segment.x_column + i]) *
                weights[s][at];
          }
          double& out = sums[t * kYStride + segment.y_column + o];
          out = (c.adds ? out : 0) + segment.scale * sum;
        }
      }
    }
    return {sums.begin(), sums.end()};
  }

  void Check(const ProductCase& c) {
    const std::vector<float> y =
        Rounded(DType::kBf16, RandomFloats(kRows * kYStride, 22));
    std::vector<std::vector<float>> weights;
    std::vector<std::unique_ptr<DeviceArray>> weights_device;
    std::vector<LoraProductItem> items(1);  // The first: no rows.
    LoraProduct product = {.order = c.order,
                           .adds = c.adds,
                           .x_stride = kXStride,
                           .y_stride = kYStride,
                           .num_splits = c.num_splits};
    for (const Segment& segment : c.segments) {
      weights.push_back(
          Rounded(DType::kBf16, RandomFloats(segment.inputs * segment.outputs,
                                             23 + segment.begin, 0.2F)));
      weights_device.push_back(
          std::make_unique<DeviceArray>(DType::kBf16, weights.back()));
      for (int64_t row = segment.begin; row < segment.end;
           row += kLoraItemRows) {
        items.push_back({.row = row,
                         .num_rows = std::min(kLoraItemRows, segment.end - row),
                         .x_column = segment.x_column,
                         .num_inputs = segment.inputs,
                         .y_column = segment.y_column,
                         .num_outputs = segment.outputs,
                         .weight = weights_device.back()->data(),
                         .scale = segment.scale});
      }
      product.max_outputs = std::max(product.max_outputs, segment.outputs);
    }
    const DeviceBuffer<LoraProductItem> items_device(items);
    const DeviceArray x_device(DType::kBf16, x_), y_device(DType::kBf16, y);
    product.items = items_device.data();
    product.num_items = static_cast<int64_t>(items.size());
    product.x_TI = x_device.data();
    product.y_TO = y_device.data();
    const DeviceBuffer<float> workspace(std::vector<float>(
        static_cast<size_t>(LoraProductWorkspace(product)), kNan));
    product.workspace = workspace.data();
    ASSERT_EQ(RunLoraProduct(product, nullptr), cudaSuccess);
    const std::vector<float> actual = y_device.Read();
    const std::vector<float> expected = Expected(c, weights, y);
    for (size_t i = 0; i < actual.size(); ++i) {
      const double magnitude = std::max(4.0F, std::abs(expected[i]));
      ASSERT_NEAR(actual[i], expected[i], Tolerance(kEpsilonBf16, 1, magnitude))
          << "row " << i / kYStride << " column " << i % kYStride;
    }
  }

  std::vector<float> x_ =
      Rounded(DType::kBf16, RandomFloats(kRows* kXStride, 21));
};

// Ranks 1 to 96 mixed, rows per adapter 1 to 130, and a row of no adapter.
std::vector<Segment> ShrinkSegments() {
  return {{0, 1, 200, 16, 3, 5, 1},
          {1, 131, 200, 1, 3, 5, 2},
          {132, 140, 200, 96, 3, 5, 1},
          {140, 205, 200, 64, 3, 5, 0.5F},
          {205, 300, 200, 8, 3, 5, 1}};
}

TEST_F(CudaLoraProductTest, ShrinksSegmentsOfMixedRanks) {
  for (const int splits : {1, 3, 16}) {
    Check({LoraWeightOrder::kOutputsByInputs, false, splits, ShrinkSegments()});
    Check({LoraWeightOrder::kInputsByOutputs, false, splits, ShrinkSegments()});
    if (HasFatalFailure()) return;
  }
}

// Rank as inputs; two projections of one adapter side by side in y.
std::vector<Segment> ExpandSegments() {
  return {{0, 70, 16, 128, 0, 0, 2},   {0, 70, 3, 60, 16, 128, -1},
          {71, 72, 1, 128, 8, 0, 1},   {72, 73, 64, 128, 8, 0, 0.25F},
          {73, 299, 33, 188, 0, 7, 1}, {299, 300, 0, 188, 0, 7, 1}};
}

TEST_F(CudaLoraProductTest, ExpandsSegmentsOfMixedRanksOntoWhatIsThere) {
  for (const int splits : {1, 2}) {
    Check({LoraWeightOrder::kOutputsByInputs, true, splits, ExpandSegments()});
    Check({LoraWeightOrder::kInputsByOutputs, true, splits, ExpandSegments()});
    if (HasFatalFailure()) return;
  }
}

// Widths, columns and strides that are multiples of 8: the wide loads.
TEST_F(CudaLoraProductTest, NanStaysInItsRowAndItsOutput) {
  constexpr int64_t kSide = 64;
  std::vector<float> x(kSide * kSide, 1), weight(kSide * kSide, 1);
  x[3 * kSide + 40] = kNan;
  weight[5 * kSide + 33] = kNan;
  const DeviceArray x_device(DType::kBf16, x), w_device(DType::kBf16, weight);
  const DeviceArray y_device(DType::kBf16, x);
  const DeviceBuffer<LoraProductItem> items(
      std::vector<LoraProductItem>{{.num_rows = kSide,
                                    .num_inputs = kSide,
                                    .num_outputs = kSide,
                                    .weight = w_device.data()}});
  const LoraProduct product = {.items = items.data(),
                               .num_items = 1,
                               .max_outputs = kSide,
                               .x_TI = x_device.data(),
                               .x_stride = kSide,
                               .y_TO = y_device.data(),
                               .y_stride = kSide};
  ASSERT_EQ(RunLoraProduct(product, nullptr), cudaSuccess);
  const std::vector<float> y = y_device.Read();
  for (int64_t i = 0; i < kSide * kSide; ++i) {
    if (i / kSide == 3 || i % kSide == 5) {
      ASSERT_TRUE(std::isnan(y[i])) << i;
    } else {
      ASSERT_EQ(y[i], kSide) << i;
    }
  }
}

TEST_F(CudaLoraProductTest, RefusesSplitsOutOfRangeAndTakesNoItems) {
  EXPECT_EQ(RunLoraProduct({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraProduct({.num_splits = 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RunLoraProduct({.num_splits = 65}, nullptr), cudaErrorInvalidValue);
}

struct GradientCase {
  int64_t max_p;
  int64_t max_q;
  int num_splits;
  std::vector<LoraGradientItem> items;  // Without their gradients.
};

class CudaLoraGradientTest : public CudaKernelTest {
 protected:
  static constexpr int64_t kPStride = 211;
  static constexpr int64_t kQStride = 152;

  double Expected(const LoraGradientItem& item, int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t t = item.row; t < item.row + item.num_rows; ++t) {
      sum += static_cast<double>(p_[t * kPStride + item.p_column + i]) *
             q_[t * kQStride + item.q_column + j];
    }
    return item.scale * sum;
  }

  void Check(GradientCase c) {
    const DeviceArray p_device(DType::kBf16, p_), q_device(DType::kBf16, q_);
    std::vector<std::vector<float>> before;
    std::vector<std::unique_ptr<DeviceBuffer<float>>> gradients;
    for (LoraGradientItem& item : c.items) {
      before.push_back(
          RandomFloats(item.num_p * item.num_q, 33 + item.num_rows));
      gradients.push_back(std::make_unique<DeviceBuffer<float>>(before.back()));
      item.gradient_PQ = gradients.back()->data();
    }
    const DeviceBuffer<LoraGradientItem> items(c.items);
    LoraGradient gradient = {.items = items.data(),
                             .num_items = static_cast<int64_t>(c.items.size()),
                             .max_p = c.max_p,
                             .max_q = c.max_q,
                             .p_TP = p_device.data(),
                             .p_stride = kPStride,
                             .q_TQ = q_device.data(),
                             .q_stride = kQStride,
                             .num_splits = c.num_splits};
    const DeviceBuffer<float> workspace(std::vector<float>(
        static_cast<size_t>(LoraGradientWorkspace(gradient)), kNan));
    gradient.workspace = workspace.data();
    ASSERT_EQ(AddLoraGradient(gradient, nullptr), cudaSuccess);
    for (size_t n = 0; n < c.items.size(); ++n) {
      const LoraGradientItem& item = c.items[n];
      const std::vector<float> sums = gradients[n]->Read();
      for (int64_t i = 0; i < item.num_p; ++i) {
        for (int64_t j = 0; j < item.num_q; ++j) {
          const int64_t at = i * item.num_q + j;
          // Products of bf16 numbers are exact in f32: only sums round.
          ASSERT_NEAR(sums[at], before[n][at] + Expected(item, i, j),
                      Tolerance(kEpsilonF32, item.num_rows, 40))
              << "item " << n << " at " << i << ", " << j;
        }
      }
    }
  }

  std::vector<float> p_ =
      Rounded(DType::kBf16, RandomFloats(kRows* kPStride, 31));
  std::vector<float> q_ =
      Rounded(DType::kBf16, RandomFloats(kRows* kQStride, 32));
};

// dB of wide outputs and small ranks; dA is the same with the sides changed.
TEST_F(CudaLoraGradientTest, AddsSumsOverSegmentsOfMixedRanks) {
  for (const int splits : {1, 2, 5}) {
    Check({190,
           96,
           splits,
           {{.row = 0, .num_rows = 1, .num_p = 190, .num_q = 16},
            {.row = 1,
             .num_rows = 130,
             .num_p = 190,
             .q_column = 8,
             .num_q = 96,
             .scale = 2},
            {.row = 131, .num_rows = 0, .num_p = 190, .num_q = 4},
            {.row = 140,
             .num_rows = 160,
             .p_column = 5,
             .num_p = 64,
             .q_column = 3,
             .num_q = 1,
             .scale = -0.5F}}});
    Check({7,
           150,
           splits,
           {{.row = 2, .num_rows = 32, .num_p = 7, .num_q = 150},
            {.row = 34,
             .num_rows = 97,
             .p_column = 7,
             .num_p = 3,
             .num_q = 150}}});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaLoraGradientTest, RefusesSplitsOutOfRangeAndTakesNoItems) {
  EXPECT_EQ(AddLoraGradient({}, nullptr), cudaSuccess);
  EXPECT_EQ(AddLoraGradient({.num_splits = 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(AddLoraGradient({.num_splits = 65}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace weft::kernels::cuda
