// Decoding over pages: each key and value is read once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/bench/bench.h"
#include "kernels/cuda/paged_attention.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t kHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kFeatures = 128;
constexpr int64_t kPageTokens = 16;
constexpr int64_t kTokenElements = kKvHeads * kFeatures;
constexpr int64_t kMaxBatch = 256;
constexpr int64_t kMaxTokens = 8192;
const float kScale = 1 / std::sqrt(static_cast<float>(kFeatures));

// As many pages as the largest batch has, in no order.
class Pages {
 public:
  Pages()
      : k_(kMaxBatch * kMaxTokens * kTokenElements),
        v_(kMaxBatch * kMaxTokens * kTokenElements),
        order_(kMaxBatch * kMaxTokens / kPageTokens) {
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), std::minstd_rand(7));
  }

  [[nodiscard]] const Bf16Buffer& k() const { return k_; }
  [[nodiscard]] const Bf16Buffer& v() const { return v_; }
  [[nodiscard]] std::vector<int32_t> Table(int64_t entries) const {
    return {order_.begin(), order_.begin() + entries};
  }
  // The features of a sequence's token in one key/value head.
  [[nodiscard]] std::vector<float> Row(const Bf16Buffer& pages,
                                       int64_t first_entry, int64_t token,
                                       int64_t kv_head) const {
    const int64_t page =
        order_[static_cast<size_t>(first_entry + token / kPageTokens)];
    return pages.Floats(
        (page * kPageTokens + token % kPageTokens) * kTokenElements +
            kv_head * kFeatures,
        kFeatures);
  }

 private:
  Bf16Buffer k_, v_;
  std::vector<int32_t> order_;
};

// Of the last sequence's last head.
std::vector<double> AttendedByLastHead(const Pages& pages, const Bf16Buffer& q,
                                       int64_t batch, int64_t tokens) {
  const int64_t at = (batch * kHeads - 1) * kFeatures;
  const int64_t first_entry = (batch - 1) * (tokens / kPageTokens);
  const std::vector<float> query = q.Floats(at, kFeatures);
  std::vector<double> sums(kFeatures);
  double total = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<float> key =
        pages.Row(pages.k(), first_entry, t, kKvHeads - 1);
    const std::vector<float> value =
        pages.Row(pages.v(), first_entry, t, kKvHeads - 1);
    const double weight =
        std::exp(kScale * std::inner_product(query.begin(), query.end(),
                                             key.begin(), 0.0));
    total += weight;
    for (size_t c = 0; c < sums.size(); ++c) sums[c] += weight * value[c];
  }
  for (double& sum : sums) sum /= total;
  return sums;
}

void CheckLastHead(const Bf16Buffer& out, const std::vector<double>& expected,
                   int64_t batch, int64_t tokens) {
  const std::vector<float> actual =
      out.Floats((batch * kHeads - 1) * kFeatures, kFeatures);
  for (size_t c = 0; c < expected.size(); ++c) {
    CheckNear(actual[c], expected[c], weft::testing::kEpsilonBf16, tokens, 1,
              "PagedAttention");
  }
}

void BenchBatch(const Device& device, const Pages& pages, int64_t batch,
                int64_t tokens) {
  const int64_t entries = tokens / kPageTokens;
  const Bf16Buffer q(batch * kHeads * kFeatures),
      out(batch * kHeads * kFeatures);
  const Buffer<int32_t> table(pages.Table(batch * entries));
  const Buffer<int32_t> lengths(std::vector<int32_t>(
      static_cast<size_t>(batch), static_cast<int32_t>(tokens)));
  const std::vector<double> expected =
      AttendedByLastHead(pages, q, batch, tokens);
  PagedAttentionBatch work = {.dtype = DType::kBf16,
                              .batch = batch,
                              .num_heads = kHeads,
                              .num_kv_heads = kKvHeads,
                              .head_features = kFeatures,
                              .page_tokens = kPageTokens,
                              .q_BHC = q.data(),
                              .k_pages_PSKC = pages.k().data(),
                              .v_pages_PSKC = pages.v().data(),
                              .page_table_BL = table.data(),
                              .table_entries = entries,
                              .lengths_B = lengths.data(),
                              .scale = kScale,
                              .out_BHC = out.data()};
  const auto seconds_of = [&](int splits) {
    work.num_splits = splits;
    const FloatBuffer workspace(
        std::max<int64_t>(1, PagedAttentionWorkspace(work)));
    work.workspace = workspace.data();
    const auto run = [&] { Check(PagedAttention(work, nullptr)); };
    run();
    CheckLastHead(out, expected, batch, tokens);
    return device.Seconds(run);
  };
  const int chosen = PagedAttentionSplits(work);
  const double time = seconds_of(chosen);
  double best = time;
  int best_splits = chosen;
  for (const int splits : {1, 2, 4, 8, 16, 32, 64}) {
    const double seconds = seconds_of(splits);
    if (seconds < best) {
      best = seconds;
      best_splits = splits;
    }
  }
  const double num_bytes = 4.0 * static_cast<double>(batch * tokens) *
                           static_cast<double>(kTokenElements);
  Line("PagedAttention")
      .Add("batch", batch)
      .Add("tokens", tokens)
      .Add("splits", chosen)
      .AddTime("time", time)
      .Add("best_splits", best_splits)
      .AddTime("best_time", best)
      .AddTime("copy_time", num_bytes / device.copy_rate())
      .AddRatio("of_copy", num_bytes / device.copy_rate() / time)
      .Print();
}

}  // namespace

void BenchAttention(const Device& device) {
  const Pages pages;
  for (const int64_t tokens : {int64_t{1024}, kMaxTokens}) {
    for (const int64_t batch :
         {int64_t{1}, int64_t{8}, int64_t{64}, kMaxBatch}) {
      BenchBatch(device, pages, batch, tokens);
    }
  }
}

}  // namespace weft::kernels::cuda::bench
