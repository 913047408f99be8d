// Times PagedAttention, which reads each key and value once, and compares it
// with a copy that moves the same number of bytes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/paged_attention.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t kPageTokens = 16;
constexpr int64_t kMaxBatch = 256;
constexpr int64_t kMaxTokens = 8192;

struct Heads {
  const char* name;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t features;

  int64_t token_elements() const { return num_kv_heads * features; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(features)); }
};
// None of these models has more elements per token than Llama, so Pages is
// large enough for all.
constexpr Heads kLlama = {"Llama-3.1-8B", 32, 8, 128};
constexpr Heads kSmolLm = {"SmolLM2-135M", 9, 3, 64};
constexpr Heads kGemma = {"Gemma-2-2b", 8, 4, 256};

// The key and value pages of the largest batch. Sequences use them in random
// order.
class Pages {
 public:
  Pages()
      : k_(kMaxBatch * kMaxTokens * kLlama.token_elements()),
        v_(kMaxBatch * kMaxTokens * kLlama.token_elements()),
        order_(kMaxBatch * kMaxTokens / kPageTokens) {
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), std::minstd_rand(7));
  }

  const Bf16Buffer& k() const { return k_; }
  const Bf16Buffer& v() const { return v_; }
  std::vector<int32_t> Table(int64_t entries) const {
    return {order_.begin(), order_.begin() + entries};
  }
  // Returns the features of one key/value head for a sequence's token. The
  // sequence's pages begin at order_[first_entry].
  std::vector<float> Row(const Heads& heads, const Bf16Buffer& pages,
                         int64_t first_entry, int64_t token,
                         int64_t kv_head) const {
    const int64_t page =
        order_[static_cast<size_t>(first_entry + token / kPageTokens)];
    return pages.Floats(
        (page * kPageTokens + token % kPageTokens) * heads.token_elements() +
            kv_head * heads.features,
        heads.features);
  }

 private:
  Bf16Buffer k_, v_;
  std::vector<int32_t> order_;
};

// Returns the expected output of the last sequence's last head, in f64.
std::vector<double> AttendedByLastHead(const Heads& heads, const Pages& pages,
                                       const Bf16Buffer& q, int64_t batch,
                                       int64_t tokens) {
  const int64_t at = (batch * heads.num_heads - 1) * heads.features;
  const int64_t first_entry = (batch - 1) * (tokens / kPageTokens);
  const std::vector<float> query = q.Floats(at, heads.features);
  std::vector<double> sums(static_cast<size_t>(heads.features));
  double total = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto row = [&](const Bf16Buffer& all) {
      return pages.Row(heads, all, first_entry, t, heads.num_kv_heads - 1);
    };
    const std::vector<float> key = row(pages.k());
    const std::vector<float> value = row(pages.v());
    const double weight =
        std::exp(heads.scale() * std::inner_product(query.begin(), query.end(),
                                                    key.begin(), 0.0));
    total += weight;
    for (size_t c = 0; c < sums.size(); ++c) sums[c] += weight * value[c];
  }
  for (double& sum : sums) sum /= total;
  return sums;
}

void CheckLastHead(const Heads& heads, const Bf16Buffer& out,
                   const std::vector<double>& expected, int64_t batch,
                   int64_t tokens) {
  const std::vector<float> actual = out.Floats(
      (batch * heads.num_heads - 1) * heads.features, heads.features);
  for (size_t c = 0; c < expected.size(); ++c) {
    CheckNear(actual[c], expected[c], kEpsilonBf16, tokens, 1,
              "PagedAttention");
  }
}

void BenchBatch(const Device& device, const Heads& heads, const Pages& pages,
                int64_t batch, int64_t tokens) {
  const int64_t entries = tokens / kPageTokens;
  const int64_t count = batch * heads.num_heads * heads.features;
  const Bf16Buffer q(count), out(count);
  const Buffer<int32_t> table(pages.Table(batch * entries));
  const Buffer<int32_t> lengths(std::vector<int32_t>(
      static_cast<size_t>(batch), static_cast<int32_t>(tokens)));
  const std::vector<double> expected =
      AttendedByLastHead(heads, pages, q, batch, tokens);
  PagedAttentionBatch work = {.dtype = DType::kBf16,
                              .batch = batch,
                              .num_heads = heads.num_heads,
                              .num_kv_heads = heads.num_kv_heads,
                              .head_features = heads.features,
                              .page_tokens = kPageTokens,
                              .q_BHC = q.data(),
                              .k_pages_PSKC = pages.k().data(),
                              .v_pages_PSKC = pages.v().data(),
                              .page_table_BL = table.data(),
                              .table_entries = entries,
                              .lengths_B = lengths.data(),
                              .scale = heads.scale(),
                              .out_BHC = out.data()};
  const auto seconds_of = [&](AttentionSplits splits) {
    work.splits = splits;
    const FloatBuffer workspace(
        std::max<int64_t>(1, PagedAttentionWorkspace(work)));
    work.workspace = workspace.data();
    const auto run = [&] { Check(PagedAttention(work, nullptr)); };
    run();
    CheckLastHead(heads, out, expected, batch, tokens);
    return device.Seconds(run);
  };
  const AttentionSplits chosen = ChooseAttentionSplits(work);
  const double time = seconds_of(chosen);
  double best = time;
  int best_splits = chosen.most;
  for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
    const double seconds = seconds_of({.wanted = splits, .most = splits});
    if (seconds < best) {
      best = seconds;
      best_splits = splits;
    }
  }
  const double num_bytes =
      4.0 * static_cast<double>(batch * tokens * heads.token_elements());
  Line("PagedAttention")
      .Add("heads", heads.name)
      .Add("batch", batch)
      .Add("tokens", tokens)
      .Add("splits", chosen.most)
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
      BenchBatch(device, kLlama, pages, batch, tokens);
    }
  }
  for (const Heads& heads : {kSmolLm, kGemma}) {
    BenchBatch(device, heads, pages, 64, 1024);
  }
}

}  // namespace weft::kernels::cuda::bench
