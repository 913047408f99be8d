// Compares the segmented products of kernels/cuda with loops in f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/lora/lora_gradient.h"
#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

constexpr int64_t kRows = 300;
// This stride is not a multiple of any vector load's width.
constexpr int64_t kStride = 541;
constexpr int64_t kShrunkStride = 213;

struct Segment {
  int64_t begin;
  int64_t end;
  int layout;
};

// A linear layer whose columns are two projections, and adapters of three
// layouts: with both projections, with only the second, and with none.
struct Problem {
  LoraOrder order;
  int64_t features[2] = {260, 270};
  std::vector<Segment> segments = {{0, 1, 0},     {1, 131, 1},   {132, 140, 0},
                                   {140, 142, 2}, {142, 207, 1}, {207, 299, 0}};

  std::vector<std::vector<LoraMatrix>> layouts = {
      {{.offset = 4, .rank = 96, .column = 8, .scale = 2},
       {.offset = 96 * 260 + 4, .rank = 3, .column = 104, .scale = -1}},
      {{}, {.offset = 1, .rank = 16, .column = 5, .scale = 0.5F}},
      {{}, {}}};

  int32_t MaxRank(int projection) const {
    int32_t rank = 0;
    for (const auto& layout : layouts) {
      rank = std::max(rank, layout[projection].rank);
    }
    return rank;
  }
  int64_t Column(int projection) const {
    return projection == 0 ? 3 : 3 + features[0];
  }
  // Returns the index of element (rank, feature) of a projection's matrix.
  int64_t At(const LoraMatrix& matrix, int projection, int64_t r,
             int64_t f) const {
    return matrix.offset + (order == LoraOrder::kRankByFeatures
                                ? r * features[projection] + f
                                : f * matrix.rank + r);
  }
};

constexpr int64_t kParameters = 96 * 260 + 3 * 270 + 8;

class CudaLoraTest : public CudaKernelTest {
 protected:
  // Calls visit(row, segment, projection, matrix) for each row's matrices.
  template <typename Visit>
  static void ForRows(const Problem& problem, Visit visit) {
    for (size_t s = 0; s < problem.segments.size(); ++s) {
      const Segment& segment = problem.segments[s];
      for (int64_t t = segment.begin; t < segment.end; ++t) {
        for (int p = 0; p < 2; ++p) {
          visit(t, s, p, problem.layouts[segment.layout][p]);
        }
      }
    }
  }

  // All arrays of the problem, on the device. Segment s trains gradient s %
  // num_gradients.
  struct OnDevice {
    OnDevice(const CudaLoraTest& test, const Problem& problem,
             size_t num_gradients)
        : x(DType::kBf16, test.x_), shrunk(DType::kBf16, test.shrunk_) {
      LoraTableBuilder builder(2);
      for (const auto& layout : problem.layouts) builder.AddLayout(layout);
      for (size_t s = 0; s < problem.segments.size(); ++s) {
        weights.push_back(
            std::make_unique<DeviceArray>(DType::kBf16, test.weights_[s]));
      }
      for (size_t g = 0; g < num_gradients; ++g) {
        gradients.push_back(
            std::make_unique<DeviceBuffer<float>>(test.before_));
      }
      for (size_t s = 0; s < problem.segments.size(); ++s) {
        const Segment& segment = problem.segments[s];
        builder.AddSegment(segment.begin, segment.end - segment.begin,
                           segment.layout, weights[s]->data(),
                           num_gradients == 0
                               ? nullptr
                               : gradients[s % num_gradients]->data());
      }
      bytes = std::make_unique<DeviceBuffer<std::byte>>(builder.Finish());
      product = {.table = builder.At(bytes->data()),
                 .order = problem.order,
                 .features_TF = x.data(),
                 .features_stride = kStride,
                 .shrunk_TR = shrunk.data(),
                 .shrunk_stride = kShrunkStride};
      // The product has only the projections that some layout has.
      for (int p = 0; p < 2; ++p) {
        if (problem.MaxRank(p) == 0) continue;
        product.max_rank =
            std::max<int64_t>(product.max_rank, problem.MaxRank(p));
        product.projections[product.num_projections++] = {
            .slot = p,
            .column = problem.Column(p),
            .features = problem.features[p]};
      }
      workspace = std::make_unique<DeviceBuffer<float>>(std::vector<float>(
          static_cast<size_t>(std::max(LoraShrinkWorkspace(product),
                                       LoraGradientWorkspace(product))),
          kNan));
      product.workspace = workspace->data();
      counters = std::make_unique<DeviceBuffer<unsigned>>(
          std::vector<unsigned>(LoraCounters(product)));
      product.counters = counters->data();
    }

    DeviceArray x, shrunk;
    std::vector<std::unique_ptr<DeviceArray>> weights;
    std::vector<std::unique_ptr<DeviceBuffer<float>>> gradients;
    std::unique_ptr<DeviceBuffer<std::byte>> bytes;
    std::unique_ptr<DeviceBuffer<float>> workspace;
    std::unique_ptr<DeviceBuffer<unsigned>> counters;
    LoraProduct product;
  };

  // Makes the terms of the sums over features cancel.
  void CancelSums(const Problem& problem) {
    x_ = Rounded(DType::kBf16, RandomFloats(kRows * kStride, 21));
    weights_ = Weights();
    for (int p = 0; p < 2; ++p) {
      const int64_t half = problem.features[p] / 2;
      for (int64_t t = 0; t < kRows; ++t) {
        Repeat(x_.data() + t * kStride + problem.Column(p), half, -1);
      }
      for (size_t s = 0; s < problem.segments.size(); ++s) {
        const LoraMatrix& m = problem.layouts[problem.segments[s].layout][p];
        for (int64_t i = 0; i < m.rank * half; ++i) {
          weights_[s][problem.At(m, p, i / half, half + i % half)] =
              weights_[s][problem.At(m, p, i / half, i % half)];
        }
      }
    }
  }

  static void ExpectNear(const std::vector<float>& actual,
                         const std::vector<double>& expected, int64_t stride) {
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(
          actual[i], expected[i],
          Tolerance(kEpsilonBf16, 1, std::max(4.0, std::abs(expected[i]))))
          << "row " << i / stride << " column " << i % stride;
    }
  }

  static std::vector<std::vector<float>> Weights() {
    std::vector<std::vector<float>> weights;
    for (int s = 0; s < 6; ++s) {
      weights.push_back(
          Rounded(DType::kBf16, RandomFloats(kParameters, 23 + s, 0.2F)));
    }
    return weights;
  }

  std::vector<float> x_ =
      Rounded(DType::kBf16, RandomFloats(kRows* kStride, 21));
  std::vector<float> shrunk_ =
      Rounded(DType::kBf16, RandomFloats(kRows* kShrunkStride, 22));
  std::vector<std::vector<float>> weights_ = Weights();
  std::vector<float> before_ = RandomFloats(kParameters, 33);
};

constexpr LoraOrder kOrders[] = {LoraOrder::kRankByFeatures,
                                 LoraOrder::kFeaturesByRank};

// Sums over the features have one part for many rows and two for few rows.
TEST_F(CudaLoraTest, ShrinksSegmentsOfMixedRanks) {
  for (const LoraOrder order : kOrders) {
    const Problem problem = {.order = order};
    std::vector<double> expected(shrunk_.begin(), shrunk_.end());
    ForRows(problem, [&](int64_t t, size_t s, int p, const LoraMatrix& m) {
      for (int64_t r = 0; r < m.rank; ++r) {
        double sum = 0;
        for (int64_t f = 0; f < problem.features[p]; ++f) {
          sum += static_cast<double>(x_[t * kStride + problem.Column(p) + f]) *
                 weights_[s][problem.At(m, p, r, f)];
        }
        expected[t * kShrunkStride + m.column + r] = m.scale * sum;
      }
    });
    const OnDevice device(*this, problem, 0);
    ASSERT_EQ(RunLoraShrink(device.product, nullptr), cudaSuccess);
    ExpectNear(device.shrunk.Read(), expected, kShrunkStride);
  }
}

TEST_F(CudaLoraTest, ExpandsSegmentsOfMixedRanksOntoWhatIsThere) {
  for (const LoraOrder order : kOrders) {
    const Problem problem = {.order = order};
    std::vector<double> expected(x_.begin(), x_.end());
    ForRows(problem, [&](int64_t t, size_t s, int p, const LoraMatrix& m) {
      for (int64_t f = 0; f < problem.features[p]; ++f) {
        double sum = 0;
        for (int64_t r = 0; r < m.rank; ++r) {
          sum +=
              static_cast<double>(shrunk_[t * kShrunkStride + m.column + r]) *
              weights_[s][problem.At(m, p, r, f)];
        }
        expected[t * kStride + problem.Column(p) + f] += m.scale * sum;
      }
    });
    const OnDevice device(*this, problem, 0);
    ASSERT_EQ(RunLoraExpand(device.product, nullptr), cudaSuccess);
    ExpectNear(device.x.Read(), expected, kStride);
  }
}

// Either three gradients have two segments each, which makes partial sums, or
// each segment has its own gradient.
TEST_F(CudaLoraTest, AddsGradientsOfSegmentsThatShareThemOrNot) {
  for (const LoraOrder order : kOrders) {
    for (const size_t num_gradients : {6, 3}) {
      Problem problem = {.order = order};
      // Segments that share a gradient have the same layout.
      for (size_t s = 0; s < 6; ++s) problem.segments[s].layout = s % 3 % 2;
      const std::vector<double> start(before_.begin(), before_.end());
      std::vector<std::vector<double>> expected(num_gradients, start);
      ForRows(problem, [&](int64_t t, size_t s, int p, const LoraMatrix& m) {
        for (int64_t r = 0; r < m.rank; ++r) {
          const double ds = shrunk_[t * kShrunkStride + m.column + r];
          for (int64_t f = 0; f < problem.features[p]; ++f) {
            expected[s % num_gradients][problem.At(m, p, r, f)] +=
                m.scale * ds * x_[t * kStride + problem.Column(p) + f];
          }
        }
      });
      const OnDevice device(*this, problem, num_gradients);
      // Segments that share a gradient need partial sums, because two parts
      // must not add to one gradient at the same time.
      EXPECT_EQ(device.product.table.num_partials, num_gradients == 3 ? 6 : 0);
      ASSERT_EQ(AddLoraGradient(device.product, nullptr), cudaSuccess);
      for (size_t g = 0; g < num_gradients; ++g) {
        const std::vector<float> actual = device.gradients[g]->Read();
        for (size_t i = 0; i < actual.size(); ++i) {
          // Products of bf16 numbers are exact in f32, so only the sums round.
          ASSERT_NEAR(actual[i], expected[g][i],
                      Tolerance(kEpsilonF32, kRows, 40))
              << "gradient " << g << " at " << i;
        }
      }
    }
  }
}

// One segment of one adapter with one matrix, A [R, F], over all rows.
struct OneMatrix {
  OneMatrix(int64_t num_rows, int32_t rank, int64_t features,
            const std::vector<float>& x_values,
            const std::vector<float>& weight_values,
            int64_t max_parts = kLoraMaxParts)
      : x(DType::kBf16, x_values),
        weight(DType::kBf16, weight_values),
        shrunk(DType::kBf16, std::vector<float>(num_rows * rank, 1)),
        gradient(std::vector<float>(rank * features, 7)),
        builder(1, max_parts) {
    builder.AddLayout({{.rank = rank, .scale = 2}});
    builder.AddSegment(0, num_rows, 0, weight.data(), gradient.data());
    bytes = std::make_unique<DeviceBuffer<std::byte>>(builder.Finish());
    product = {.table = builder.At(bytes->data()),
               .projections = {{.slot = 0, .features = features}},
               .num_projections = 1,
               .max_rank = rank,
               .features_TF = x.data(),
               .features_stride = features,
               .shrunk_TR = shrunk.data(),
               .shrunk_stride = rank};
  }
  // Returns the product with a workspace of `num_floats`.
  LoraProduct ProductWith(int64_t num_floats) {
    workspace = std::make_unique<DeviceBuffer<float>>(
        std::vector<float>(static_cast<size_t>(num_floats), kNan));
    product.workspace = workspace->data();
    counters = std::make_unique<DeviceBuffer<unsigned>>(
        std::vector<unsigned>(LoraCounters(product)));
    product.counters = counters->data();
    return product;
  }
  // Returns whether all launches left the counters at zero.
  bool HasZeroCounters() const {
    const std::vector<unsigned> values = counters->Read();
    return std::ranges::count(values, 0U) ==
           static_cast<int64_t>(values.size());
  }

  DeviceArray x, weight, shrunk;
  DeviceBuffer<float> gradient;
  LoraTableBuilder builder;
  std::unique_ptr<DeviceBuffer<std::byte>> bytes;
  std::unique_ptr<DeviceBuffer<float>> workspace;
  std::unique_ptr<DeviceBuffer<unsigned>> counters;
  LoraProduct product;
};

// There are more rows than one part takes, so that even a single segment has
// partial sums.
TEST_F(CudaLoraTest, CutsLongSegmentsIntoParts) {
  constexpr int64_t kLong = 2 * kLoraPartRows + 5;
  // Each of three parts needs a tile with the smallest number of ranks, 16.
  constexpr int64_t kFloats = 3 * kLoraTileFeatures * 16;
  const std::vector<float> ones(kLong * 3, 1);
  OneMatrix one(kLong, /*rank=*/2, /*features=*/3, ones, ones);
  EXPECT_EQ(one.product.table.num_partials, 3);
  EXPECT_EQ(LoraGradientWorkspace(one.product), kFloats);
  const LoraProduct product = one.ProductWith(kFloats);
  for (const float times : {1, 2}) {
    ASSERT_EQ(AddLoraGradient(product, nullptr), cudaSuccess);
    EXPECT_EQ(one.gradient.Read(),
              std::vector<float>(2 * 3, 7 + times * 2 * kLong));
    EXPECT_TRUE(one.HasZeroCounters());
  }
}

TEST_F(CudaLoraTest, CutsWideSumsIntoNoMoreThanTheMostParts) {
  constexpr int64_t kWide = 5 * kLoraSpan;
  constexpr int64_t kFloats = kLoraMaxParts * kLoraBlockRows * 16;
  const std::vector<float> ones(kWide, 1);
  OneMatrix one(/*num_rows=*/1, /*rank=*/1, kWide, ones, ones);
  EXPECT_EQ(LoraShrinkWorkspace(one.product), kFloats);
  const LoraProduct product = one.ProductWith(kFloats);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(RunLoraShrink(product, nullptr), cudaSuccess);
    EXPECT_EQ(one.shrunk.Read(), std::vector<float>{2 * kWide});
    EXPECT_TRUE(one.HasZeroCounters());
  }
}

TEST_F(CudaLoraTest, SumsInOnePartOnDemand) {
  constexpr int64_t kWide = 3 * kLoraSpan;
  const std::vector<float> ones(kWide, 1);
  OneMatrix one(/*num_rows=*/1, /*rank=*/1, kWide, ones, ones, /*max_parts=*/1);
  EXPECT_EQ(LoraShrinkWorkspace(one.product), 0);
  ASSERT_EQ(RunLoraShrink(one.ProductWith(0), nullptr), cudaSuccess);
  EXPECT_EQ(one.shrunk.Read(), std::vector<float>{2 * kWide});
}

// A segment's bits do not depend on other segments, although ranks of other
// segments select the tile. Some other segments also have more projections.
TEST_F(CudaLoraTest, GivesASegmentTheSameBitsWithoutItsNeighbours) {
  // The expansion reads this S instead of the shrink's result. The sums of the
  // shrink cancel, so its result would be too small to change x.
  const DeviceArray shrunk(DType::kBf16, shrunk_);
  const auto run = [&](LoraProduct product) {
    ASSERT_EQ(AddLoraGradient(product, nullptr), cudaSuccess);
    ASSERT_EQ(RunLoraShrink(product, nullptr), cudaSuccess);
    product.shrunk_TR = shrunk.data();
    ASSERT_EQ(RunLoraExpand(product, nullptr), cudaSuccess);
  };
  for (const LoraOrder order : kOrders) {
    const Problem all = {.order = order};
    CancelSums(all);
    const OnDevice with(*this, all, 6);
    run(with.product);
    for (const size_t s : {1, 2, 4}) {
      Problem alone = all;
      alone.layouts = {all.layouts[all.segments[s].layout]};
      alone.segments = {all.segments[s]};
      alone.segments[0].layout = 0;
      std::swap(weights_[0], weights_[s]);
      const OnDevice without(*this, alone, 1);
      std::swap(weights_[0], weights_[s]);
      run(without.product);
      const auto rows = [&](const DeviceArray& array, int64_t stride) {
        const Segment& segment = all.segments[s];
        return Slice(array.Read(), segment.begin * stride,
                     (segment.end - segment.begin) * stride);
      };
      EXPECT_EQ(rows(with.shrunk, kShrunkStride),
                rows(without.shrunk, kShrunkStride));
      EXPECT_EQ(rows(with.x, kStride), rows(without.x, kStride));
      EXPECT_EQ(with.gradients[s]->Read(), without.gradients[0]->Read());
    }
  }
}

// Widths, columns and strides are multiples of 8, so the wide loads run.
TEST_F(CudaLoraTest, NanStaysInItsRowAndItsRank) {
  constexpr int64_t kSide = 64;
  std::vector<float> x(kSide * kSide, 1), weight(kSide * kSide, 1);
  x[3 * kSide + 40] = kNan;
  weight[5 * kSide + 33] = kNan;
  OneMatrix one(kSide, kSide, kSide, x, weight);
  EXPECT_EQ(LoraShrinkWorkspace(one.product), 0);
  ASSERT_EQ(RunLoraShrink(one.product, nullptr), cudaSuccess);
  const std::vector<float> y = one.shrunk.Read();
  for (int64_t i = 0; i < kSide * kSide; ++i) {
    if (i / kSide == 3 || i % kSide == 5) {
      ASSERT_TRUE(std::isnan(y[i])) << i;
    } else {
      ASSERT_EQ(y[i], 2 * kSide) << i;
    }
  }
}

TEST_F(CudaLoraTest, TakesNothing) {
  EXPECT_EQ(RunLoraShrink({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraExpand({}, nullptr), cudaSuccess);
  EXPECT_EQ(AddLoraGradient({}, nullptr), cudaSuccess);
  LoraTableBuilder builder(1);
  builder.AddSegment(5, 0, 0, nullptr, nullptr);
  const std::vector<std::byte> bytes = builder.Finish();
  const LoraTable table = builder.At(bytes.data());
  EXPECT_EQ(table.num_blocks + table.num_parts + table.max_few, 0);
}

}  // namespace
}  // namespace weft::kernels::cuda
