// Compares the sort by expert with std::stable_sort, sums over experts with
// sums in f64, and the search for the adapters of sorted rows with a search row
// by row.
#include "kernels/cuda/expert_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/lora/lora_expert_rows.h"
#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using Longs = std::vector<int64_t>;

struct Sorted {
  Longs tokens, pairs, places;
  std::vector<int32_t> ends;
};

Sorted SortOnDevice(const Longs& experts, int64_t per_token,
                    int64_t num_experts) {
  const size_t rows = experts.size();
  const DeviceBuffer<int64_t> from(experts), tokens(Longs(rows, -1)),
      pairs(Longs(rows, -1)), places(Longs(rows, -1));
  const DeviceBuffer<int32_t> ends(
      std::vector<int32_t>(static_cast<size_t>(num_experts), -1));
  EXPECT_EQ(SortByExpert({.experts_TK = from.data(),
                          .num_rows = static_cast<int64_t>(rows),
                          .per_token = per_token,
                          .num_experts = num_experts,
                          .tokens_N = tokens.data(),
                          .pairs_N = pairs.data(),
                          .places_TK = places.data(),
                          .ends_E = ends.data()},
                         nullptr),
            cudaSuccess);
  return {tokens.Read(), pairs.Read(), places.Read(), ends.Read()};
}

Sorted Reference(const Longs& experts, int64_t per_token, int64_t num_experts) {
  Sorted sorted;
  sorted.pairs.resize(experts.size());
  std::iota(sorted.pairs.begin(), sorted.pairs.end(), int64_t{0});
  std::ranges::stable_sort(sorted.pairs, {},
                           [&](int64_t pair) { return experts[pair]; });
  sorted.places.resize(experts.size());
  for (size_t row = 0; row < experts.size(); ++row) {
    sorted.tokens.push_back(sorted.pairs[row] / per_token);
    sorted.places[sorted.pairs[row]] = static_cast<int64_t>(row);
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    sorted.ends.push_back(static_cast<int32_t>(std::ranges::count_if(
        experts, [&](int64_t chosen) { return chosen <= expert; })));
  }
  return sorted;
}

class CudaExpertRowsTest : public CudaKernelTest {
 protected:
  static void ExpectSorted(const Longs& experts, int64_t per_token,
                           int64_t num_experts) {
    const Sorted actual = SortOnDevice(experts, per_token, num_experts);
    const Sorted expected = Reference(experts, per_token, num_experts);
    EXPECT_EQ(actual.tokens, expected.tokens);
    EXPECT_EQ(actual.pairs, expected.pairs);
    EXPECT_EQ(actual.places, expected.places);
    EXPECT_EQ(actual.ends, expected.ends);
  }
};

// Returns the experts of tokens that differ in a pattern, so that experts have
// rows from all parts of a batch.
Longs SpreadExperts(int64_t num_rows, int64_t num_experts) {
  Longs experts;
  for (int64_t i = 0; i < num_rows; ++i) {
    experts.push_back((i * i * 7 + i / 5) % num_experts);
  }
  return experts;
}

// A block has 256 threads.
TEST_F(CudaExpertRowsTest, SortsLikeAStableSort) {
  for (const int64_t num_experts : {1, 3, 128}) {
    for (const int64_t num_tokens : {1, 31, 64, 65, 200}) {
      SCOPED_TRACE(num_tokens);
      ExpectSorted(SpreadExperts(num_tokens * 4, num_experts), 4, num_experts);
    }
  }
  for (const int64_t num_rows : {255, 256, 257}) {
    ExpectSorted(SpreadExperts(num_rows, 9), 1, 9);
  }
}

TEST_F(CudaExpertRowsTest, ExpertsMayHaveNoRowsOrAll) {
  ExpectSorted({5, 2}, 2, 8);
  for (const int64_t expert : {0, 4, 7}) {
    ExpectSorted(Longs(300, expert), 3, 8);
  }
  // The first and the last expert alone.
  Longs ends(260, 0);
  std::fill(ends.begin() + 100, ends.end(), 7);
  ExpectSorted(ends, 2, 8);
}

TEST_F(CudaExpertRowsTest, KeepsExpertsInTheirColumnsAndSkipsPadding) {
  constexpr int64_t kTokens = 150, kPerToken = 2, kWidth = 7, kColumn = 3;
  Longs experts, slots;
  for (int64_t token = 0; token < kTokens; ++token) {
    slots.push_back(token % 4 == 3 ? -1 : kTokens - 1 - token);
    for (int64_t k = 0; k < kPerToken; ++k) experts.push_back(token * 2 + k);
  }
  const std::vector<int16_t> before(kTokens * kWidth, -7);
  const DeviceBuffer<int64_t> from(experts), to(slots);
  const DeviceBuffer<int16_t> kept(before);
  EXPECT_EQ(KeepExperts({.experts_TK = from.data(),
                         .num_tokens = kTokens,
                         .per_token = kPerToken,
                         .slots_T = to.data(),
                         .experts_SW = kept.data(),
                         .width = kWidth,
                         .column = kColumn},
                        nullptr),
            cudaSuccess);
  std::vector<int16_t> expected = before;
  for (int64_t i = 0; i < kTokens * kPerToken; ++i) {
    const int64_t slot = slots[i / kPerToken];
    if (slot < 0) continue;
    expected[slot * kWidth + kColumn + i % kPerToken] =
        static_cast<int16_t>(experts[i]);
  }
  EXPECT_EQ(kept.Read(), expected);
}

class CudaExpertSumsTest : public CudaDtypeTest {};

// The widths are read element by element, in packs, and by several blocks.
TEST_P(CudaExpertSumsTest, AddsUpTheRowsOfEachToken) {
  constexpr int64_t kTokens = 5;
  for (const int64_t per_token : {1, 3, 9}) {
    for (const int64_t features : {1, 20, 64, 300, 2056}) {
      const int64_t num_rows = kTokens * per_token + 1;
      const std::vector<float> rows =
          Rounded(GetParam(), RandomFloats(num_rows * features, 21));
      Longs places;
      for (int64_t i = 0; i < kTokens * per_token; ++i) {
        places.push_back((i * 7 + 2) % num_rows);
      }
      const DeviceArray from(GetParam(), rows);
      const DeviceArray to(GetParam(),
                           std::vector<float>(kTokens * features, kNan));
      const DeviceBuffer<int64_t> order(places);
      ASSERT_EQ(SumExpertRows({.dtype = GetParam(),
                               .num_tokens = kTokens,
                               .per_token = per_token,
                               .features = features,
                               .places_TK = order.data(),
                               .rows_NH = from.data(),
                               .sums_TH = to.data()},
                              nullptr),
                cudaSuccess);
      const std::vector<float> sums = to.Read();
      for (int64_t i = 0; i < kTokens * features; ++i) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < per_token; ++k) {
          const int64_t row = places[i / features * per_token + k];
          const double x = rows[row * features + i % features];
          sum += x;
          size += std::abs(x);
        }
        ASSERT_NEAR(
            sums[i], sum,
            StoredTolerance(EpsilonOf(GetParam()), per_token, size, sum));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaExpertSumsTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

TEST_F(CudaExpertRowsTest, NoRowsAreNoError) {
  EXPECT_EQ(SumExpertRows({}, nullptr), cudaSuccess);
  EXPECT_EQ(SortByExpert({}, nullptr), cudaSuccess);
  EXPECT_EQ(KeepExperts({}, nullptr), cudaSuccess);
}

// The slots of a layout, and the rows of adapters.
constexpr int64_t kGateUp = 1, kDown = 2, kDistance = 4, kNumSlots = 5;
constexpr int64_t kDistanceOfLayout[] = {40, 0, 24};

// Layout 0 has LoRA on gate and up, layout 1 none on experts, and layout 2 on
// down.
std::vector<LoraMatrix> SlotsOf(int layout) {
  std::vector<LoraMatrix> slots(kNumSlots);
  slots[0].rank = 3;
  slots[kGateUp].rank = layout == 0 ? 4 : 0;
  slots[kDown].rank = layout == 2 ? 4 : 0;
  slots[kDistance].offset = kDistanceOfLayout[layout];
  return slots;
}

struct Segment {
  int64_t begin, end;
  int layout;
};

// Weights are never read, only their addresses.
const void* WeightsOf(size_t segment) {
  return reinterpret_cast<const void*>((segment + 1) << 20);
}

class CudaLoraExpertRowsTest : public CudaKernelTest {
 protected:
  // Finds the entries of rows that are sorted by expert, and compares the owner
  // of each row.
  static void ExpectFound(const Longs& experts, int64_t per_token,
                          int64_t num_experts,
                          const std::vector<Segment>& segments) {
    LoraTableBuilder builder(kNumSlots);
    for (size_t i = 0; i < segments.size(); ++i) {
      builder.AddFewRows(segments[i].begin, segments[i].end - segments[i].begin,
                         segments[i].layout, WeightsOf(i));
    }
    for (const int layout : {0, 1, 2}) builder.AddLayout(SlotsOf(layout));
    const DeviceBuffer<std::byte> table(builder.Finish());
    const Longs pairs = Reference(experts, per_token, num_experts).pairs;
    const DeviceBuffer<int64_t> chosen(experts), order(pairs);
    const DeviceBuffer<LoraFewRows> few(
        std::vector<LoraFewRows>(pairs.size(), {.num_rows = -1}));
    const DeviceBuffer<int64_t> num_few(Longs{-1});
    ASSERT_EQ(
        FindLoraExpertRows({.batch = builder.At(table.data()),
                            .slot_of_gate_up = kGateUp,
                            .slot_of_down = kDown,
                            .slot_of_distance = kDistance,
                            .experts_TK = chosen.data(),
                            .pairs_N = order.data(),
                            .num_rows = static_cast<int64_t>(pairs.size()),
                            .per_token = per_token,
                            .few = few.data(),
                            .num_few = num_few.data()},
                           nullptr),
        cudaSuccess);
    ExpectOwners(few.Read(), num_few.Read()[0], experts, pairs, per_token,
                 segments);
  }

  static void ExpectOwners(const std::vector<LoraFewRows>& few, int64_t num_few,
                           const Longs& experts, const Longs& pairs,
                           int64_t per_token,
                           const std::vector<Segment>& segments) {
    ASSERT_GE(num_few, 0);
    ASSERT_LE(num_few, static_cast<int64_t>(pairs.size()));
    std::vector<const LoraFewRows*> owners(pairs.size());
    int64_t next = 0;
    for (int64_t i = 0; i < num_few; ++i) {
      const LoraFewRows& entry = few[i];
      ASSERT_GE(entry.row, next);
      ASSERT_GE(entry.num_rows, 1);
      EXPECT_EQ(entry.row / kLoraFewRows,
                (entry.row + entry.num_rows - 1) / kLoraFewRows);
      EXPECT_EQ(entry.place, entry.row);
      next = entry.row + entry.num_rows;
      ASSERT_LE(next, static_cast<int64_t>(pairs.size()));
      std::fill(owners.begin() + entry.row, owners.begin() + next, &entry);
    }
    // Nothing is written behind the last entry.
    for (size_t i = static_cast<size_t>(num_few); i < few.size(); ++i) {
      EXPECT_EQ(few[i].num_rows, -1);
    }
    for (size_t row = 0; row < pairs.size(); ++row) {
      const int64_t token = pairs[row] / per_token;
      const auto own = std::ranges::find_if(segments, [&](const Segment& s) {
        return s.begin <= token && token < s.end;
      });
      if (own == segments.end() || own->layout == 1) {
        EXPECT_EQ(owners[row], nullptr) << row;
        continue;
      }
      ASSERT_NE(owners[row], nullptr) << row;
      EXPECT_EQ(owners[row]->layout, own->layout);
      constexpr int64_t kBytes = 2;  // Of bf16.
      EXPECT_EQ(
          owners[row]->weights,
          static_cast<const std::byte*>(WeightsOf(own - segments.begin())) +
              kBytes * experts[pairs[row]] * kDistanceOfLayout[own->layout]);
    }
  }
};

// Tokens 0 to 2, 14 and the last have no adapter.
TEST_F(CudaLoraExpertRowsTest, FindsTheAdapterOfEachRow) {
  for (const int64_t num_experts : {1, 5, 40}) {
    for (const int64_t num_tokens : {16, 40, 170, 300}) {
      SCOPED_TRACE(num_tokens);
      ExpectFound(SpreadExperts(num_tokens * 4, num_experts), 4, num_experts,
                  {{3, 4, 0},
                   {4, 5, 2},
                   {5, 9, 1},
                   {9, 14, 0},
                   {15, num_tokens - 1, 2}});
    }
  }
}

// A block has 512 threads.
TEST_F(CudaLoraExpertRowsTest, RowsOfOneAdapterShareEntries) {
  for (const int64_t num_rows : {1, 15, 16, 17, 511, 512, 513, 1100}) {
    SCOPED_TRACE(num_rows);
    ExpectFound(Longs(num_rows, 2), 1, 4, {{0, num_rows, 0}});
  }
}

TEST_F(CudaLoraExpertRowsTest, RowsMayHaveNoAdapters) {
  ExpectFound({1, 0, 3, 2}, 2, 4, {});
  ExpectFound({1, 0, 3, 2}, 2, 4, {{0, 2, 1}});
  ExpectFound({1, 0, 3, 2}, 2, 4, {{1, 2, 2}});
}

}  // namespace
}  // namespace weft::kernels::cuda
