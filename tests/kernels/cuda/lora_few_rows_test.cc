// Compares the products of segments of few rows with loops in f64.
#include "kernels/cuda/lora/lora_few_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kMostProjections = kMaxLoraProjections;

// The ranks and scales of an adapter's projections. Rank 0 means that the
// adapter lacks the projection.
struct Layout {
  int32_t ranks[kMostProjections] = {};
  float scales[kMostProjections] = {2, -1, 0.5F};
};

struct Segment {
  int64_t begin;
  int64_t end;
  int layout;
  uint32_t seed;  // The seed of the adapter's weights.
};

// One linear group, with everything that the kernels read about it.
struct Problem {
  int64_t inputs = 0;
  std::vector<int64_t> features;
  std::vector<Layout> layouts;
  std::vector<Segment> segments;
  int64_t num_rows = 0;
  // The matrices, x's columns and y's columns begin this many elements after an
  // aligned address. An odd number leaves none of them aligned.
  int64_t shift = 0;
  // If true, the terms of sums over inputs and over ranks cancel, and y begins
  // with 0.
  bool cancels = false;

  int64_t x_stride() const { return inputs + shift; }
  int64_t y_stride() const {
    int64_t stride = shift;
    for (const int64_t own : features) stride += own;
    return stride;
  }
  int64_t ColumnOf(size_t projection) const {
    int64_t column = shift;
    for (size_t p = 0; p < projection; ++p) column += features[p];
    return column;
  }
  // Returns the slots: the stacked A, then every B.
  std::vector<LoraMatrix> SlotsOf(const Layout& layout) const {
    std::vector<LoraMatrix> slots(1 + features.size());
    slots[0].offset = shift;
    for (size_t p = 0; p < features.size(); ++p) {
      slots[1 + p] = {.rank = layout.ranks[p],
                      .column = slots[0].rank,
                      .scale = layout.scales[p]};
      slots[0].rank += layout.ranks[p];
    }
    int64_t offset = shift + slots[0].rank * inputs;
    for (size_t p = 0; p < features.size(); ++p) {
      slots[1 + p].offset = offset;
      offset += slots[1 + p].rank * features[p];
    }
    return slots;
  }
  int64_t NumParameters(const Layout& layout) const {
    const auto slots = SlotsOf(layout);
    return slots.back().offset + slots.back().rank * features.back();
  }
  int64_t MaxRank() const {
    int64_t rank = 0;
    for (const Layout& layout : layouts) {
      rank = std::max<int64_t>(rank, SlotsOf(layout).front().rank);
    }
    return rank;
  }
  int64_t MaxProjectionRank() const {
    int64_t rank = 0;
    for (const Layout& layout : layouts) {
      rank = std::max<int64_t>(rank, std::ranges::max(layout.ranks));
    }
    return rank;
  }
  std::vector<float> WeightsOf(const Segment& segment) const {
    const Layout& layout = layouts[segment.layout];
    std::vector<float> weights = Rounded(
        DType::kBf16, RandomFloats(NumParameters(layout), segment.seed, 0.1F));
    if (!cancels) return weights;
    const std::vector<LoraMatrix> slots = SlotsOf(layout);
    float* const a = weights.data() + shift;
    for (int64_t r = 0; r < slots[0].rank; ++r) {
      Repeat(a + r * inputs, inputs / 2, 1);
    }
    for (size_t p = 0; p < features.size(); ++p) {
      const LoraMatrix& b = slots[1 + p];
      Repeat(a + b.column * inputs, b.rank / 2 * inputs, 1);
      for (int64_t f = 0; f < features[p]; ++f) {
        Repeat(weights.data() + b.offset + f * b.rank, b.rank / 2, -1);
      }
    }
    return weights;
  }
  std::vector<float> Inputs() const {
    std::vector<float> x =
        Rounded(DType::kBf16, RandomFloats(num_rows * x_stride(), 1));
    for (int64_t t = 0; cancels && t < num_rows; ++t) {
      Repeat(x.data() + t * x_stride() + shift, inputs / 2, -1);
    }
    return x;
  }
  std::vector<float> Outputs() const {
    const int64_t count = num_rows * y_stride();
    if (cancels) return std::vector<float>(count);
    return Rounded(DType::kBf16, RandomFloats(count, 2));
  }
};

// The problem on the device.
struct OnDevice {
  // With `capacity`, the table has that capacity, and all segments, even long
  // ones, are added as entries of few rows.
  explicit OnDevice(const Problem& problem,
                    const LoraTableCapacity* capacity = nullptr)
      : of(problem),
        x_values(problem.Inputs()),
        y_values(problem.Outputs()),
        x(DType::kBf16, x_values),
        y(DType::kBf16, y_values),
        shrunk(DType::kBf16,
               std::vector<float>(problem.num_rows * problem.MaxRank(), 3)) {
    LoraTableBuilder builder(1 + static_cast<int64_t>(problem.features.size()));
    for (const Layout& layout : problem.layouts) {
      builder.AddLayout(problem.SlotsOf(layout));
    }
    for (const Segment& s : problem.segments) {
      weights.push_back(
          std::make_unique<DeviceArray>(DType::kBf16, problem.WeightsOf(s)));
      if (capacity == nullptr) {
        builder.AddSegment(s.begin, s.end - s.begin, s.layout,
                           weights.back()->data(), nullptr);
      } else {
        builder.AddFewRows(s.begin, s.end - s.begin, s.layout,
                           weights.back()->data());
      }
    }
    std::vector<std::byte> table;
    if (capacity == nullptr) {
      table = builder.Finish();
    } else {
      // The bytes behind the batch are 0xFF. The kernels must not read them.
      table.resize(capacity->num_bytes(), std::byte{0xFF});
      builder.WriteTo(*capacity, table);
    }
    bytes = std::make_unique<DeviceBuffer<std::byte>>(table);
    product = {.table = capacity == nullptr ? builder.At(bytes->data())
                                            : capacity->At(bytes->data()),
               .max_rank = problem.MaxRank(),
               .num_projections = static_cast<int>(problem.features.size()),
               .max_projection_rank = problem.MaxProjectionRank(),
               .x_TI = x.at(problem.shift),
               .x_stride = problem.x_stride(),
               .inputs = problem.inputs,
               .y_TO = y.data(),
               .y_stride = problem.y_stride(),
               .shrunk_TR = shrunk.data(),
               .shrunk_stride = problem.MaxRank()};
    for (size_t p = 0; p < problem.features.size(); ++p) {
      product.projections[p] = {.slot = 1 + static_cast<int64_t>(p),
                                .column = problem.ColumnOf(p),
                                .features = problem.features[p]};
    }
    workspace = std::make_unique<DeviceBuffer<float>>(std::vector<float>(
        static_cast<size_t>(LoraFewRowsWorkspace(product)), kNan));
    product.workspace = workspace->data();
  }

  void Run() const {
    ASSERT_EQ(RunLoraFewRowsShrink(product, nullptr), cudaSuccess);
    ASSERT_EQ(RunLoraFewRowsExpand(product, nullptr), cudaSuccess);
  }

  // Returns element (row, rank) of x A^T in f64.
  double Shrunk(int64_t t, const std::vector<float>& adapter,
                int64_t rank) const {
    double sum = 0;
    for (int64_t i = 0; i < of.inputs; ++i) {
      sum += static_cast<double>(x_values[t * of.x_stride() + of.shift + i]) *
             adapter[of.shift + rank * of.inputs + i];
    }
    return sum;
  }

  // CheckShrunk checks S, and CheckOutputs checks y, in all rows. CheckOutputs
  // computes the expected y from the device's S, so the rounding of S does not
  // affect the comparison of y.
  void CheckShrunk() const {
    const std::vector<float> actual = shrunk.Read();
    std::vector<double> expected(actual.size(), 3);
    const int64_t stride = of.MaxRank();
    for (const Segment& s : of.segments) {
      const std::vector<float> adapter = of.WeightsOf(s);
      const int32_t rank = of.SlotsOf(of.layouts[s.layout]).front().rank;
      for (int64_t t = s.begin; t < s.end; ++t) {
        for (int64_t r = 0; r < rank; ++r) {
          expected[t * stride + r] = Shrunk(t, adapter, r);
        }
      }
    }
    ExpectNear(actual, expected, of.inputs, stride, "S");
  }
  void CheckOutputs() const {
    const std::vector<float> s_values = shrunk.Read(), actual = y.Read();
    std::vector<double> expected(y_values.begin(), y_values.end());
    for (const Segment& s : of.segments) {
      const std::vector<float> adapter = of.WeightsOf(s);
      const auto slots = of.SlotsOf(of.layouts[s.layout]);
      for (int64_t t = s.begin; t < s.end; ++t) {
        for (size_t p = 0; p < of.features.size(); ++p) {
          const LoraMatrix& b = slots[1 + p];
          for (int64_t f = 0; f < of.features[p]; ++f) {
            double sum = 0;
            for (int64_t r = 0; r < b.rank; ++r) {
              sum += static_cast<double>(
                         s_values[t * of.MaxRank() + b.column + r]) *
                     adapter[b.offset + f * b.rank + r];
            }
            const int64_t at = t * of.y_stride() + of.ColumnOf(p) + f;
            expected[at] += b.scale * sum;
          }
        }
      }
    }
    ExpectNear(actual, expected, 1 + of.MaxRank(), of.y_stride(), "y");
  }
  // Compares results that are sums of `terms` terms. The tolerance assumes that
  // no partial sum is larger than the largest result.
  static void ExpectNear(const std::vector<float>& actual,
                         const std::vector<double>& expected, int64_t terms,
                         int64_t stride, const char* what) {
    double largest = 0;
    for (const double x : expected) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i],
                  StoredTolerance(kEpsilonBf16, terms, largest, expected[i]))
          << what << ", row " << i / stride << " column " << i % stride;
    }
  }

  Problem of;
  std::vector<float> x_values, y_values;
  DeviceArray x, y, shrunk;
  std::vector<std::unique_ptr<DeviceArray>> weights;
  std::unique_ptr<DeviceBuffer<std::byte>> bytes;
  std::unique_ptr<DeviceBuffer<float>> workspace;
  LoraFewRowsProduct product;
};

class CudaLoraFewRowsTest : public CudaKernelTest {};

void RunAndCheck(const Problem& problem) {
  const OnDevice device(problem);
  device.Run();
  device.CheckShrunk();
  device.CheckOutputs();
}

// Makes layouts of all projections, of one and of none; segments of 1 to 16
// rows; and rows without an adapter.
Problem Mixed(int64_t inputs, std::vector<int64_t> features, int64_t shift) {
  return {.inputs = inputs,
          .features = std::move(features),
          .layouts = {{.ranks = {16, 8, 32}},
                      {.ranks = {0, 3, 0}},
                      {},
                      {.ranks = {72, 0, 5}}},
          .segments = {{1, 2, 0, 11},
                       {2, 4, 1, 12},
                       {4, 5, 2, 13},
                       {6, 22, 3, 14},
                       {22, 31, 0, 15}},
          .num_rows = 33,
          .shift = shift};
}

TEST_F(CudaLoraFewRowsTest, TakesMixedRanksRowsAndProjections) {
  RunAndCheck(Mixed(264, {136, 40, 48}, 0));
}

// In the first problem, no width or stride is a multiple of a wide load. In the
// second problem, x, y and the matrices are not aligned to wide loads.
TEST_F(CudaLoraFewRowsTest, TakesWhatLiesAnywhere) {
  RunAndCheck(Mixed(101, {35, 3, 47}, 0));
  RunAndCheck(Mixed(264, {136, 40, 48}, 3));
}

// One row, as for a decoded token. The layers are qkv, gate and up, and down of
// Llama-3.1-8B, then qkv and down of SmolLM2. The input widths of SmolLM2 are
// not multiples of a part's width.
TEST_F(CudaLoraFewRowsTest, TakesTheWidthsOfServedModels) {
  const auto one_row = [](int64_t inputs, std::vector<int64_t> features,
                          Layout layout) {
    return Problem{.inputs = inputs,
                   .features = std::move(features),
                   .layouts = {layout},
                   .segments = {{0, 1, 0, 5}},
                   .num_rows = 1};
  };
  RunAndCheck(one_row(4096, {4096, 1024, 1024}, {.ranks = {16, 16, 16}}));
  RunAndCheck(one_row(4096, {14336, 14336}, {.ranks = {8, 16}}));
  RunAndCheck(one_row(14336, {4096}, {.ranks = {8}}));
  RunAndCheck(one_row(576, {576, 192, 192}, {.ranks = {128, 64, 8}}));
  RunAndCheck(one_row(1536, {576}, {.ranks = {32}}));
}

TEST_F(CudaLoraFewRowsTest, CutsWideSumsIntoNoMoreThanTheMostParts) {
  constexpr int64_t kWide = 40000;
  RunAndCheck({.inputs = kWide,
               .features = {8},
               .layouts = {{.ranks = {1}}},
               .segments = {{0, 1, 0, 5}},
               .num_rows = 1});
  const LoraFewRowsProduct product = {
      .table = {.max_few = 1, .max_few_rows = 1},
      .max_rank = 1,
      .inputs = kWide};
  EXPECT_EQ(LoraFewRowsWorkspace(product), 16 * 4);
}

// There are more work items than a launch has blocks.
TEST_F(CudaLoraFewRowsTest, TakesManyAdapters) {
  Problem problem = {.inputs = 64,
                     .features = {24},
                     .layouts = {{.ranks = {256}}, {.ranks = {8}}},
                     .num_rows = 80};
  for (int i = 0; i < 80; ++i) {
    problem.segments.push_back({i, i + 1, i % 8 == 0 ? 0 : 1, 100U + i});
  }
  RunAndCheck(problem);
}

// The kernels do not touch the rows of long segments.
TEST_F(CudaLoraFewRowsTest, LeavesLongSegmentsAlone) {
  Problem problem = Mixed(64, {24}, 0);
  problem.layouts = {{.ranks = {8}}};
  problem.segments = {{0, 17, 0, 5}, {17, 33, 0, 6}};
  OnDevice device(problem);
  EXPECT_EQ(device.product.table.max_few, 1);
  EXPECT_EQ(device.product.table.num_blocks, 2);
  EXPECT_EQ(device.product.table.LongSegments().num_blocks, 1);
  EXPECT_EQ(device.product.table.LongSegments().max_cuts, 4);
  device.Run();
  device.of.segments.erase(device.of.segments.begin());
  device.CheckShrunk();
  device.CheckOutputs();
}

// A recorded launch has the pointers and the grids of one table. It serves any
// other table with the same capacity.
TEST_F(CudaLoraFewRowsTest, ServesAnyBatchOfACapacity) {
  Problem problem = Mixed(64, {24, 16, 8}, 0);
  const LoraTableCapacity capacity = {
      .num_slots = 4, .max_layouts = 5, .max_rows = 40};
  // Here a long segment also becomes entries of few rows.
  problem.segments = {{0, 1, 3, 4}, {1, 31, 0, 5}};
  const OnDevice first(problem, &capacity);
  first.Run();
  first.CheckShrunk();
  first.CheckOutputs();

  problem.segments = {{5, 6, 1, 7}, {20, 22, 0, 8}};
  const OnDevice next(problem, &capacity);
  LoraFewRowsProduct recorded = next.product;
  recorded.table = first.product.table;
  EXPECT_EQ(LoraFewRowsWorkspace(recorded), LoraFewRowsWorkspace(next.product));
  ASSERT_EQ(cudaMemcpy(first.bytes->data(), next.bytes->Read().data(),
                       capacity.num_bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
  ASSERT_EQ(RunLoraFewRowsShrink(recorded, nullptr), cudaSuccess);
  ASSERT_EQ(RunLoraFewRowsExpand(recorded, nullptr), cudaSuccess);
  next.CheckShrunk();
  next.CheckOutputs();

  problem.segments = {};
  const OnDevice none(problem, &capacity);
  none.Run();
  EXPECT_EQ(none.y.Read(), none.y_values);
}

TEST_F(CudaLoraFewRowsTest, SumsWhatTheExpansionKeeps) {
  const Problem problem = Mixed(264, {136, 40, 48}, 0);
  const OnDevice expanded(problem), summed(problem);
  expanded.Run();
  ASSERT_EQ(RunLoraFewRowsShrink(summed.product, nullptr), cudaSuccess);
  ASSERT_EQ(RunLoraFewRowsSum(summed.product, nullptr), cudaSuccess);
  EXPECT_EQ(summed.shrunk.Read(), expanded.shrunk.Read());
  EXPECT_EQ(summed.y.Read(), summed.y_values);

  OnDevice kept_none(problem);
  kept_none.product.shrunk_TR = nullptr;
  kept_none.Run();
  EXPECT_EQ(kept_none.y.Read(), expanded.y.Read());
  EXPECT_EQ(kept_none.shrunk.Read(),
            std::vector<float>(problem.num_rows * problem.MaxRank(), 3));
}

// A row's bits do not depend on other segments or on other rows of its own
// segment. They do not depend on the ranks of other layouts either, although
// the other ranks affect the choice of the kernel and the strides of parts and
// S.
TEST_F(CudaLoraFewRowsTest, GivesARowTheSameBitsWithoutItsNeighbours) {
  // The sums over 1096 inputs have two parts.
  Problem all = Mixed(1096, {136, 40, 48}, 0);
  all.cancels = true;
  const OnDevice with(all);
  with.Run();
  for (const Segment& segment : all.segments) {
    Problem alone = all;
    const int64_t last = segment.end - 1;
    alone.layouts = {all.layouts[segment.layout]};
    alone.segments = {{last, last + 1, 0, segment.seed}};
    const OnDevice without(alone);
    without.Run();
    EXPECT_EQ(Slice(with.y.Read(), last * all.y_stride(), all.y_stride()),
              Slice(without.y.Read(), last * all.y_stride(), all.y_stride()));
    const int64_t rank = alone.MaxRank();
    EXPECT_EQ(Slice(with.shrunk.Read(), last * all.MaxRank(), rank),
              Slice(without.shrunk.Read(), last * rank, rank));
  }
}

TEST_F(CudaLoraFewRowsTest, NanStaysInItsRow) {
  const Problem problem = {.inputs = 64,
                           .features = {16},
                           .layouts = {{.ranks = {8}}},
                           .segments = {{0, 10, 0, 5}},
                           .num_rows = 10};
  const OnDevice clean(problem), dirty(problem);
  clean.Run();
  const uint16_t nan = ToBf16(kNan);
  for (const int64_t row : {2, 9}) {
    ASSERT_EQ(cudaMemcpy(dirty.x.at(row * 64 + 40), &nan, sizeof nan,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  dirty.Run();
  const std::vector<float> y = dirty.y.Read(), expected = clean.y.Read();
  for (size_t i = 0; i < y.size(); ++i) {
    if (i / 16 == 2 || i / 16 == 9) {
      ASSERT_TRUE(std::isnan(y[i])) << i;
    } else {
      ASSERT_EQ(y[i], expected[i]) << i;
    }
  }
}

TEST_F(CudaLoraFewRowsTest, TakesNothing) {
  EXPECT_EQ(RunLoraFewRowsShrink({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraFewRowsExpand({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraFewRowsSum({}, nullptr), cudaSuccess);
  EXPECT_EQ(LoraFewRowsWorkspace({}), 0);
}

}  // namespace
}  // namespace weft::kernels::cuda
