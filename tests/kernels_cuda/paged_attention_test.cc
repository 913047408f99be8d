// PagedAttention against dense attention in f64.
#include "kernels/cuda/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tests/kernels_cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::StoredTolerance;

struct AttentionCase {
  int64_t heads;
  int64_t kv_heads;
  int64_t features;
  int64_t page_tokens;
  std::vector<int32_t> lengths;
  int num_splits = 1;
  int64_t window = 0;
  float softcap = 0;
};

// Pages in a scrambled order; NaN in every slot that no token uses, and a page
// far out of range past each sequence's last one.
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

class CudaPagedAttentionTest : public CudaDtypeTest {
 protected:
  // Of one sequence and head.
  static std::vector<double> Dense(const AttentionCase& c, const Cache& cache,
                                   const std::vector<float>& q, int64_t b,
                                   int64_t head) {
    const int64_t kv_head = head / (c.heads / c.kv_heads);
    const int64_t length = c.lengths[b];
    const int64_t first =
        c.window > 0 ? std::max<int64_t>(0, length - c.window) : 0;
    const auto row = [&](int64_t token) {
      const int64_t page =
          cache.table[b * cache.entries + token / c.page_tokens];
      return ((page * c.page_tokens + token % c.page_tokens) * c.kv_heads +
              kv_head) *
             c.features;
    };
    std::vector<double> scores, out(static_cast<size_t>(c.features));
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
    for (int64_t token = first; token < length; ++token) {
      for (int64_t i = 0; i < c.features; ++i) {
        out[i] += scores[token - first] / sum * cache.v[row(token) + i];
      }
    }
    return out;
  }

  void Check(const AttentionCase& c) {
    const DType dtype = GetParam();
    const auto batch_size = static_cast<int64_t>(c.lengths.size());
    const Cache cache = MakeCache(c, dtype);
    const std::vector<float> q =
        Rounded(dtype, RandomFloats(batch_size * c.heads * c.features, 44));
    const DeviceArray q_device(dtype, q), k(dtype, cache.k), v(dtype, cache.v);
    const DeviceArray out_device(dtype, std::vector<float>(q.size(), kNan));
    const DeviceBuffer<int32_t> table(cache.table), lengths(c.lengths);
    PagedAttentionBatch batch = {
        .dtype = dtype,
        .batch = batch_size,
        .num_heads = c.heads,
        .num_kv_heads = c.kv_heads,
        .head_features = c.features,
        .page_tokens = c.page_tokens,
        .q_BHC = q_device.data(),
        .k_pages_PSKC = k.data(),
        .v_pages_PSKC = v.data(),
        .page_table_BL = table.data(),
        .table_entries = cache.entries,
        .lengths_B = lengths.data(),
        .window = c.window,
        .scale = 1 / std::sqrt(static_cast<float>(c.features)),
        .softcap = c.softcap,
        .out_BHC = out_device.data(),
        .num_splits = c.num_splits};
    const DeviceBuffer<float> workspace(std::vector<float>(
        static_cast<size_t>(PagedAttentionWorkspace(batch)), kNan));
    batch.workspace = workspace.data();
    ASSERT_EQ(PagedAttention(batch, nullptr), cudaSuccess);
    const std::vector<float> out = out_device.Read();
    for (int64_t b = 0; b < batch_size; ++b) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const std::vector<double> expected = Dense(c, cache, q, b, head);
        for (int64_t i = 0; i < c.features; ++i) {
          ASSERT_NEAR(out[(b * c.heads + head) * c.features + i], expected[i],
                      StoredTolerance(
                          EpsilonOf(dtype), c.lengths[b] + c.features,
                          std::max(1.0, std::abs(expected[i])), expected[i]))
              << "sequence " << b << " head " << head;
        }
      }
    }
  }
};

std::vector<AttentionCase> Cases() {
  return {{4, 4, 16, 16, {1}},
          {9, 3, 64, 16, {1, 15, 16, 17, 33, 100}},
          {8, 1, 128, 32, {31, 64, 65}},
          {6, 2, 20, 5, {4, 5, 6, 23}},
          {20, 1, 8, 4, {9}},  // More heads of a group than a block takes.
          {2, 1, 129, 16, {40}},
          {2, 2, 256, 16, {1, 70}}};
}

TEST_P(CudaPagedAttentionTest, MatchesDenseAttention) {
  for (const AttentionCase& c : Cases()) {
    Check(c);
    if (HasFatalFailure()) return;
  }
}

// Also more parts than a sequence has tokens.
TEST_P(CudaPagedAttentionTest, PartsMergeToTheSame) {
  for (AttentionCase c : Cases()) {
    for (const int splits : {2, 7}) {
      c.num_splits = splits;
      Check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaPagedAttentionTest, WindowsAndSoftcapsMatchDenseAttention) {
  for (AttentionCase c : Cases()) {
    c.softcap = 0.8F;
    for (const int64_t window : {1, 7, 16, 50, 4000}) {
      c.window = window;
      c.num_splits = window == 50 ? 3 : 1;
      Check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(PagedAttentionSplitsTest, FewLongSequencesAreSplit) {
  const auto splits = [](int64_t batch, int64_t tokens, int64_t window) {
    return PagedAttentionSplits({.batch = batch,
                                 .num_heads = 32,
                                 .num_kv_heads = 8,
                                 .page_tokens = 16,
                                 .table_entries = tokens / 16,
                                 .window = window});
  };
  EXPECT_EQ(splits(0, 8192, 0), 1);
  EXPECT_EQ(splits(1, 128, 0), 1);
  EXPECT_EQ(splits(1, 1024, 0), 4);    // 256 tokens each.
  EXPECT_EQ(splits(1, 32768, 0), 33);  // 264 blocks.
  EXPECT_EQ(splits(1, 32768, 512), 2);
  EXPECT_EQ(splits(64, 32768, 0), 1);
  EXPECT_EQ(PagedAttentionSplits({.batch = 1,
                                  .num_heads = 1,
                                  .page_tokens = 16,
                                  .table_entries = 10000}),
            64);
}

TEST_F(CudaKernelTest, PagedAttentionRefusesWhatIsOutOfRange) {
  EXPECT_EQ(PagedAttention({.head_features = 257}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(PagedAttention({.head_features = 0}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(PagedAttention({.head_features = 8, .num_splits = 0}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(PagedAttention({.head_features = 8, .num_splits = 1025}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(PagedAttention({.head_features = 8}, nullptr), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaPagedAttentionTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

}  // namespace
}  // namespace weft::kernels::cuda
