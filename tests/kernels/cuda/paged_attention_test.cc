// Compares PagedAttention with dense attention in f64.
#include "kernels/cuda/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

struct AttentionCase {
  int64_t heads;
  int64_t kv_heads;
  int64_t features;
  int64_t page_tokens;
  std::vector<int32_t> lengths;
  int num_splits = 1;  // The value of AttentionSplits::most.
  int64_t window = 0;
  float softcap = 0;
  // The number of elements by which pages and queries miss the alignment of
  // wide loads.
  int64_t misalignment = 0;
  bool has_sinks = false;
  int wanted_splits = 0;  // AttentionSplits::wanted, or num_splits if 0.

  std::vector<float> Sinks() const {
    return has_sinks ? RandomFloats(heads, 45) : std::vector<float>();
  }
};

// Pages in a scrambled order. Every slot that no token uses holds NaN, and the
// table has a page far out of range after each sequence's last page.
struct Cache {
  int64_t entries = 0;
  std::vector<int32_t> table;
  std::vector<float> k;
  std::vector<float> v;
};

Cache MakeCache(const AttentionCase& c, DType dtype) {
  Cache cache;
  std::vector<int64_t> num_pages;
  for (const int32_t length : c.lengths) {
    num_pages.push_back((length + c.page_tokens - 1) / c.page_tokens);
    cache.entries = std::max(cache.entries, num_pages.back() + 1);
  }
  const int64_t total =
      std::accumulate(num_pages.begin(), num_pages.end(), int64_t{0});
  std::vector<int32_t> order(static_cast<size_t>(total));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(41));
  const int64_t page_floats = c.page_tokens * c.kv_heads * c.features;
  cache.k = Rounded(dtype, RandomFloats(total * page_floats, 42));
  cache.v = Rounded(dtype, RandomFloats(total * page_floats, 43));
  int64_t next = 0;
  for (size_t b = 0; b < c.lengths.size(); ++b) {
    for (int64_t entry = 0; entry < cache.entries; ++entry) {
      cache.table.push_back(entry < num_pages[b] ? order[next + entry]
                                                 : 1 << 30);
    }
    next += num_pages[b];
    if (num_pages[b] == 0) continue;
    const int64_t last_page = order[next - 1];
    const int64_t used =
        (c.lengths[b] - 1) % c.page_tokens * c.kv_heads * c.features +
        c.kv_heads * c.features;
    for (int64_t i = used; i < page_floats; ++i) {
      cache.k[last_page * page_floats + i] = kNan;
      cache.v[last_page * page_floats + i] = kNan;
    }
  }
  return cache;
}

// Computes the attention of one sequence and head.
std::vector<double> Dense(const AttentionCase& c, const Cache& cache,
                          const std::vector<float>& q, int64_t b,
                          int64_t head) {
  const int64_t kv_head = head / (c.heads / c.kv_heads);
  const int64_t length = c.lengths[b];
  const int64_t first =
      c.window > 0 ? std::max<int64_t>(0, length - c.window) : 0;
  const auto row = [&](int64_t token) {
    const int64_t page = cache.table[b * cache.entries + token / c.page_tokens];
    return ((page * c.page_tokens + token % c.page_tokens) * c.kv_heads +
            kv_head) *
           c.features;
  };
  std::vector<double> scores, out(static_cast<size_t>(c.features));
  if (length == 0) return out;
  for (int64_t token = first; token < length; ++token) {
    double dot = 0;
    for (int64_t i = 0; i < c.features; ++i) {
      dot += static_cast<double>(q[(b * c.heads + head) * c.features + i]) *
             cache.k[row(token) + i];
    }
    dot /= std::sqrt(static_cast<double>(c.features));
    if (c.softcap > 0) dot = c.softcap * std::tanh(dot / c.softcap);
    scores.push_back(dot);
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - max);
  if (c.has_sinks) sum += std::exp(c.Sinks()[head] - max);
  for (int64_t token = first; token < length; ++token) {
    for (int64_t i = 0; i < c.features; ++i) {
      out[i] += scores[token - first] / sum * cache.v[row(token) + i];
    }
  }
  return out;
}

// A case on the device.
class Decoding {
 public:
  Decoding(DType dtype, const AttentionCase& c)
      : cache_(MakeCache(c, dtype)),
        q_(Rounded(dtype, RandomFloats(static_cast<int64_t>(c.lengths.size()) *
                                           c.heads * c.features,
                                       44))),
        q_device_(dtype, After(c.misalignment, q_)),
        k_(dtype, After(c.misalignment, cache_.k)),
        v_(dtype, After(c.misalignment, cache_.v)),
        out_(dtype, std::vector<float>(q_.size(), kNan)),
        table_(cache_.table),
        lengths_(c.lengths),
        sinks_(c.Sinks()) {
    batch_ = {.dtype = dtype,
              .batch = static_cast<int64_t>(c.lengths.size()),
              .num_heads = c.heads,
              .num_kv_heads = c.kv_heads,
              .head_features = c.features,
              .page_tokens = c.page_tokens,
              .q_BHC = q_device_.at(c.misalignment),
              .k_pages_PSKC = k_.at(c.misalignment),
              .v_pages_PSKC = v_.at(c.misalignment),
              .page_table_BL = table_.data(),
              .table_entries = cache_.entries,
              .lengths_B = lengths_.data(),
              .window = c.window,
              .scale = 1 / std::sqrt(static_cast<float>(c.features)),
              .softcap = c.softcap,
              .sinks_H = c.has_sinks ? sinks_.data() : nullptr,
              .out_BHC = out_.data(),
              .splits = {.wanted = c.wanted_splits > 0 ? c.wanted_splits
                                                       : c.num_splits,
                         .most = c.num_splits}};
  }

  // Returns the output [B, H, C] for a batch of the sequences [first, first +
  // count).
  std::vector<float> Run(int64_t first, int64_t count) {
    PagedAttentionBatch batch = batch_;
    const int64_t row_floats = batch.num_heads * batch.head_features;
    const int64_t element = batch.dtype == DType::kBf16 ? 2 : 4;
    batch.batch = count;
    batch.q_BHC =
        static_cast<const char*>(batch.q_BHC) + first * row_floats * element;
    batch.page_table_BL += first * batch.table_entries;
    batch.lengths_B += first;
    const DeviceBuffer<float> workspace(std::vector<float>(
        static_cast<size_t>(PagedAttentionWorkspace(batch)), kNan));
    batch.workspace = workspace.data();
    EXPECT_EQ(PagedAttention(batch, nullptr), cudaSuccess);
    return Slice(out_.Read(), 0, count * row_floats);
  }
  void SetLengths(const std::vector<int32_t>& lengths) {
    ASSERT_EQ(
        cudaMemcpy(lengths_.data(), lengths.data(),
                   lengths.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  const Cache& cache() const { return cache_; }
  const std::vector<float>& q() const { return q_; }

 private:
  static std::vector<float> After(int64_t count, std::vector<float> values) {
    values.insert(values.begin(), static_cast<size_t>(count), kNan);
    return values;
  }

  Cache cache_;
  std::vector<float> q_;
  DeviceArray q_device_, k_, v_, out_;
  DeviceBuffer<int32_t> table_, lengths_;
  DeviceBuffer<float> sinks_;
  PagedAttentionBatch batch_;
};

class CudaPagedAttentionTest : public CudaDtypeTest {
 protected:
  static void ExpectDense(const AttentionCase& c, const Decoding& decoding,
                          const std::vector<float>& out) {
    for (int64_t b = 0; b < static_cast<int64_t>(c.lengths.size()); ++b) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const std::vector<double> expected =
            Dense(c, decoding.cache(), decoding.q(), b, head);
        for (int64_t i = 0; i < c.features; ++i) {
          ASSERT_NEAR(out[(b * c.heads + head) * c.features + i], expected[i],
                      StoredTolerance(
                          EpsilonOf(GetParam()), c.lengths[b] + c.features,
                          std::max(1.0, std::abs(expected[i])), expected[i]))
              << "sequence " << b << " head " << head << " feature " << i
              << " of " << c.features;
        }
      }
    }
  }
  static void Check(const AttentionCase& c) {
    Decoding decoding(GetParam(), c);
    ExpectDense(c, decoding,
                decoding.Run(0, static_cast<int64_t>(c.lengths.size())));
  }
};

// The heads of served models and others, with few tokens.
std::vector<AttentionCase> Cases() {
  return {{4, 4, 16, 16, {1, 0, 20}},
          {9, 3, 64, 16, {1, 15, 16, 17, 33, 100}},
          {32, 8, 128, 16, {130}},
          {8, 4, 256, 16, {1, 70}},
          {8, 1, 128, 32, {31, 64, 65}},
          {6, 2, 20, 5, {4, 5, 6, 23}},
          {20, 1, 8, 4, {9}},  // A group has more heads than a block takes.
          {16, 1, 64, 16, {40}},
          {5, 1, 80, 16, {40}},
          {2, 2, 96, 16, {40}},
          {4, 2, 192, 16, {40}},
          {2, 1, 129, 16, {40}}};
}

TEST_P(CudaPagedAttentionTest, MatchesDenseAttention) {
  for (const AttentionCase& c : Cases()) {
    Check(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaPagedAttentionTest, PagesMayBeginAnywhere) {
  for (const int64_t features : {8, 128, 192, 256}) {
    AttentionCase c = {4, 2, features, 16, {33}};
    c.misalignment = 1;
    Check(c);
    if (HasFatalFailure()) return;
  }
}

// A sequence gets at most one split per 128 tokens, so these lengths allow 1 to
// 4 splits.
TEST_P(CudaPagedAttentionTest, SplitsMergeToTheSame) {
  for (const int splits : {2, kMaxSplits}) {
    for (const auto& [heads, kv_heads, features] :
         {std::tuple(3, 1, 64), {4, 2, 20}, {12, 1, 8}}) {
      Check({.heads = heads,
             .kv_heads = kv_heads,
             .features = features,
             .page_tokens = 16,
             .lengths = {0, 1, 128, 129, 260, 400},
             .num_splits = splits});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaPagedAttentionTest, WindowsAndSoftcapsMatchDenseAttention) {
  for (AttentionCase c : {AttentionCase{9, 3, 64, 16, {1, 17, 100}},
                          AttentionCase{4, 2, 256, 16, {70}},
                          AttentionCase{6, 2, 20, 5, {4, 6, 200}}}) {
    c.softcap = 0.8F;
    for (const int64_t window : {1, 7, 16, 150, 4000}) {
      c.window = window;
      c.num_splits = window == 150 ? 3 : 1;
      Check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaPagedAttentionTest, SinksMatchDenseAttention) {
  for (AttentionCase c :
       {AttentionCase{9, 3, 64, 16, {1, 0, 100}},
        AttentionCase{4, 2, 20, 5, {4, 6, 200}},
        AttentionCase{6, 2, 64, 16, {129, 400, 1}, /*num_splits=*/4},
        AttentionCase{20, 1, 8, 4, {9}, 1, /*window=*/5}}) {
    c.has_sinks = true;
    Check(c);
    if (HasFatalFailure()) return;
  }
}

// A replayed graph repeats the same launch with other lengths.
TEST_P(CudaPagedAttentionTest, LengthsMayChangeBetweenEqualLaunches) {
  AttentionCase c = {4, 2, 16, 16, {400, 300, 65}, /*num_splits=*/8};
  Decoding decoding(GetParam(), c);
  for (const auto& lengths : std::vector<std::vector<int32_t>>{
           {400, 300, 65}, {1, 128, 0}, {129, 0, 64}, {400, 300, 65}}) {
    decoding.SetLengths(lengths);
    c.lengths = lengths;
    ExpectDense(c, decoding, decoding.Run(0, 3));
    if (HasFatalFailure()) return;
  }
}

// All launches here have equal splits.
TEST_P(CudaPagedAttentionTest, ASequencesBitsDoNotDependOnItsNeighbours) {
  const AttentionCase c = {4, 2, 64, 16, {300, 40, 400}, /*num_splits=*/4};
  Decoding decoding(GetParam(), c);
  const std::vector<float> together = decoding.Run(0, 3);
  const int64_t row = c.heads * c.features;
  for (int64_t b = 0; b < 3; ++b) {
    EXPECT_EQ(decoding.Run(b, 1), Slice(together, b * row, row)) << b;
  }
}

// One split is wanted, but a split has at most 2048 tokens.
TEST_P(CudaPagedAttentionTest, LongSequencesAreSplitOnceMore) {
  AttentionCase c = {1, 1, 8, 64, {4200}, /*num_splits=*/4};
  c.wanted_splits = 1;
  Check(c);
}

TEST(AttentionSplitsTest, FewSequencesAndLongOnesAreSplit) {
  const auto splits = [](int64_t batch, int64_t tokens, int64_t window) {
    return ChooseAttentionSplits({.batch = batch,
                                  .num_heads = 32,
                                  .num_kv_heads = 8,
                                  .page_tokens = 16,
                                  .table_entries = tokens / 16,
                                  .window = window});
  };
  EXPECT_EQ(splits(0, 8192, 0).most, 1);
  EXPECT_EQ(splits(1, 32768, 512).most, 4);
  EXPECT_EQ(splits(1, 1024, 0).most, 8);   // 8 splits of 128 tokens.
  EXPECT_EQ(splits(1, 8192, 0).most, 32);  // 256 blocks in total.
  EXPECT_EQ(splits(8, 8192, 0).most, 4);
  EXPECT_EQ(splits(64, 1024, 0).most, 1);
  EXPECT_EQ(splits(64, 8192, 0).most, 4);  // 4 splits of 2048 tokens.
  EXPECT_EQ(splits(1, int64_t{1} << 20, 0).most, kMaxSplits);
  // The table's size does not change how a sequence of a given length is split.
  EXPECT_EQ(splits(8, 1024, 0).wanted, splits(8, 131072, 0).wanted);
  // There are 16,000 groups of heads, but counters for only 8192 groups.
  EXPECT_EQ(splits(2000, 131072, 0).most, 1);
}

TEST_F(CudaKernelTest, PagedAttentionRefusesWhatIsOutOfRange) {
  for (const int64_t features : {0, 257}) {
    EXPECT_EQ(PagedAttention({.head_features = features}, nullptr),
              cudaErrorInvalidValue);
  }
  for (const int splits : {0, kMaxSplits + 1}) {
    EXPECT_EQ(PagedAttention({.head_features = 8, .splits = {.most = splits}},
                             nullptr),
              cudaErrorInvalidValue);
  }
  EXPECT_EQ(PagedAttention({.batch = 8193,
                            .num_heads = 1,
                            .head_features = 8,
                            .splits = {.most = 2}},
                           nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(PagedAttention({.head_features = 8}, nullptr), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaPagedAttentionTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

}  // namespace
}  // namespace weft::kernels::cuda
