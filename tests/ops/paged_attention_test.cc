#include "src/ops/paged_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/tree_attention.h"
#include "tests/support/tensors_near.h"

namespace weft::ops {
namespace {

struct Shape {
  int64_t query_heads;
  int64_t kv_heads;
  int64_t features;
  int64_t page_tokens;
  std::vector<int32_t> lengths;
};

struct Cache {
  at::Tensor k_PSKC;
  at::Tensor v_PSKC;
  at::Tensor table_BL;
  at::Tensor lengths_B;
};

// Makes pages in a scrambled order. Every slot that no token uses holds NaN,
// and the table has a page number out of range after each sequence's last page.
Cache MakeCache(const Shape& shape, at::ScalarType dtype,
                const std::vector<at::Tensor>& k,
                const std::vector<at::Tensor>& v) {
  const int64_t batch = static_cast<int64_t>(shape.lengths.size());
  const int64_t S = shape.page_tokens;
  std::vector<int64_t> num_pages;
  int64_t total = 0, longest = 0;
  for (const int32_t length : shape.lengths) {
    num_pages.push_back((length + S - 1) / S);
    total += num_pages.back();
    longest = std::max(longest, num_pages.back());
  }
  const at::Tensor order = at::randperm(total, at::kInt);
  Cache cache{at::full({total, S, shape.kv_heads, shape.features}, NAN, dtype),
              at::full({total, S, shape.kv_heads, shape.features}, NAN, dtype),
              at::full({batch, longest + 1}, 1 << 30, at::kInt),
              at::tensor(shape.lengths, at::kInt)};
  int64_t next = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const at::Tensor pages = order.narrow(0, next, num_pages[b]);
    next += num_pages[b];
    cache.table_BL[b].narrow(0, 0, num_pages[b]).copy_(pages);
    const at::Tensor tokens = at::arange(shape.lengths[b], at::kLong);
    const at::Tensor slots =
        pages.to(at::kLong).index_select(0, at::div(tokens, S, "floor")) * S +
        at::remainder(tokens, S);
    WriteKvPages(k[b], v[b], slots, cache.k_PSKC, cache.v_PSKC);
  }
  return cache;
}

at::Tensor DenseAttention(const at::Tensor& q_HC, const at::Tensor& k_TKC,
                          const at::Tensor& v_TKC, const AttentionRule& rule,
                          const at::Tensor& sinks_H = {}) {
  const int64_t hidden =
      rule.window > 0 ? std::max<int64_t>(0, k_TKC.size(0) - rule.window) : 0;
  const int64_t group = q_HC.size(0) / k_TKC.size(1);
  const at::Tensor k = k_TKC.slice(0, hidden)
                           .to(at::kDouble)
                           .repeat_interleave(group, 1)
                           .permute({1, 2, 0});
  const at::Tensor v = v_TKC.slice(0, hidden)
                           .to(at::kDouble)
                           .repeat_interleave(group, 1)
                           .transpose(0, 1);
  at::Tensor scores =
      at::matmul(q_HC.to(at::kDouble).unsqueeze(1), k) * rule.scale;
  if (rule.softcap > 0) scores = (scores / rule.softcap).tanh() * rule.softcap;
  const int64_t keys = scores.size(2);
  if (sinks_H.defined()) {
    scores = at::cat({scores, sinks_H.to(at::kDouble).view({-1, 1, 1})}, 2);
  }
  return at::matmul(scores.softmax(-1).narrow(2, 0, keys), v).squeeze(1);
}

void CheckAgainstDense(const Shape& shape, at::ScalarType dtype, double epsilon,
                       AttentionRule rule = {}, bool has_sinks = false) {
  at::manual_seed(9);
  const int64_t batch = static_cast<int64_t>(shape.lengths.size());
  rule.scale = 1 / std::sqrt(static_cast<double>(shape.features));
  std::vector<at::Tensor> k, v;
  for (const int32_t length : shape.lengths) {
    // k and v are views into a fused projection, so rows are wider than K * C.
    const at::Tensor kv =
        at::randn({length, 2, shape.kv_heads, shape.features}).to(dtype);
    k.push_back(kv.select(1, 0));
    v.push_back(kv.select(1, 1));
  }
  const Cache cache = MakeCache(shape, dtype, k, v);
  const at::Tensor q = at::randn({batch, shape.query_heads + 1, shape.features})
                           .to(dtype)
                           .narrow(1, 1, shape.query_heads);
  at::Tensor out =
      at::full({batch, shape.query_heads, shape.features}, NAN, dtype);
  const at::Tensor sinks_H =
      has_sinks ? at::randn({shape.query_heads},
                            dtype == at::kDouble ? at::kDouble : at::kFloat)
                : at::Tensor();
  PagedAttention(q, cache.k_PSKC, cache.v_PSKC, cache.table_BL, cache.lengths_B,
                 rule, out, sinks_H);
  for (int64_t b = 0; b < batch; ++b) {
    const at::Tensor expected = DenseAttention(q[b], k[b], v[b], rule, sinks_H);
    SCOPED_TRACE(::testing::Message()
                 << "sequence " << b << " of " << shape.lengths[b]);
    ExpectNear(out[b], expected, epsilon, shape.lengths[b] + shape.features);
  }
}

std::vector<Shape> Shapes() {
  return {{4, 4, 16, 16, {1}},
          {9, 3, 64, 16, {1, 15, 16, 17, 33, 100}},
          {8, 1, 128, 32, {31, 64, 65}},
          {6, 2, 20, 5, {4, 5, 6, 23}},  // The features are not a multiple of a
                                         // vector.
          {40, 1, 8, 4, {9}},            // The kernel cuts the group of 40
                                         // query heads.
          {72, 24, 20, 4, {9, 10}},      // 72 heads: more than one piece.
          {2, 1, 64, 16, {3000}},        // The tokens are cut into parts.
          {4, 2, 64, 16, {1, 63, 0, 64, 2500}}};  // Length 0 is padding.
}

TEST(PagedAttentionTest, MatchesDenseAttentionInF32) {
  for (const Shape& shape : Shapes()) {
    CheckAgainstDense(shape, at::kFloat, kEpsilonF32);
  }
}

TEST(PagedAttentionTest, ReferenceMatchesDenseAttention) {
  for (const Shape& shape : Shapes()) {
    CheckAgainstDense(shape, at::kDouble, kEpsilonF64);
    CheckAgainstDense(shape, at::kBFloat16, kEpsilonBf16);
  }
}

// The windows lie inside a page, cover one page, several pages or several parts
// of the tokens, or cover all tokens.
TEST(PagedAttentionTest, WindowsAndSoftcapsMatchDenseAttention) {
  for (const Shape& shape : Shapes()) {
    for (const int64_t window : {0, 1, 7, 16, 50, 1500, 4000}) {
      for (const double softcap : {0.0, 0.8}) {
        const AttentionRule rule{.window = window, .softcap = softcap};
        CheckAgainstDense(shape, at::kFloat, kEpsilonF32, rule);
        CheckAgainstDense(shape, at::kDouble, kEpsilonF64, rule);
      }
    }
  }
}

TEST(PagedAttentionTest, SinksMatchDenseAttention) {
  for (const Shape& shape : Shapes()) {
    for (const int64_t window : {0, 16, 1500}) {
      const AttentionRule rule{.window = window};
      CheckAgainstDense(shape, at::kFloat, kEpsilonF32, rule, true);
      CheckAgainstDense(shape, at::kDouble, kEpsilonF64, rule, true);
      CheckAgainstDense(shape, at::kBFloat16, kEpsilonBf16, rule, true);
    }
  }
}

// With 32 threads, different threads may compute different heads of one part of
// the tokens.
TEST(PagedAttentionTest, BitsDependNeitherOnTheBatchNorOnThreads) {
  const std::vector<int32_t> lengths = {1, 63, 64, 300, 1100, 4200};
  for (const Shape& shape :
       {Shape{9, 3, 64, 16, lengths}, Shape{80, 2, 20, 16, lengths}}) {
    std::vector<at::Tensor> kv;
    for (const int32_t length : lengths) {
      kv.push_back(at::randn({length, shape.kv_heads, shape.features}));
    }
    const Cache cache = MakeCache(shape, at::kFloat, kv, kv);
    const auto batch = static_cast<int64_t>(lengths.size());
    const at::Tensor q = at::randn({batch, shape.query_heads, shape.features});
    const at::Tensor sinks_H = at::randn({shape.query_heads});
    const auto attend = [&](int64_t first, int64_t count) {
      at::Tensor out = at::empty({count, shape.query_heads, shape.features});
      PagedAttention(q.narrow(0, first, count), cache.k_PSKC, cache.v_PSKC,
                     cache.table_BL.narrow(0, first, count),
                     cache.lengths_B.narrow(0, first, count), {.scale = 0.125},
                     out, sinks_H);
      return out;
    };
    const at::Tensor expected = attend(0, batch);
    const int num_threads = at::get_num_threads();
    for (const int threads : {1, 2, 32}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(at::equal(attend(0, batch), expected)) << threads;
      for (int64_t b = 0; b < batch; ++b) {
        EXPECT_TRUE(at::equal(attend(b, 1)[0], expected[b]))
            << lengths[b] << " tokens, " << threads << " threads";
      }
    }
    at::set_num_threads(num_threads);
  }
}

// One sequence, and the attention of all its tokens at once.
struct Whole {
  at::Tensor q_THC, k_TKC, v_TKC, sinks_H;
  AttentionRule rule;
  at::Tensor out_THC;

  int64_t size() const { return q_THC.size(0); }
};

Whole AttendAtOnce(const Shape& shape, const AttentionRule& rule,
                   bool has_sinks) {
  const int64_t size = shape.lengths[0];
  Whole whole{.q_THC = at::randn({size, shape.query_heads, shape.features}),
              .k_TKC = at::randn({size, shape.kv_heads, shape.features}),
              .v_TKC = at::randn({size, shape.kv_heads, shape.features}),
              .rule = rule};
  if (has_sinks) whole.sinks_H = at::randn({shape.query_heads});
  whole.out_THC =
      TreeAttention(whole.q_THC, whole.k_TKC, whole.v_TKC,
                    {{.begin = 0, .end = size, .subtree_end = size}}, rule,
                    AttentionMethod::kFused, whole.sinks_H)
          .out_THC;
  return whole;
}

// The sequence as nodes of a prefix tree, each a part of the one before.
void ExpectSameBitsInATree(const Whole& whole, int64_t node_size) {
  std::vector<AttentionNode> nodes;
  for (int64_t begin = 0; begin < whole.size(); begin += node_size) {
    nodes.push_back({.begin = begin,
                     .end = std::min(whole.size(), begin + node_size),
                     .parent = std::ssize(nodes) - 1,
                     .subtree_end = whole.size()});
  }
  EXPECT_TRUE(at::equal(
      TreeAttention(whole.q_THC, whole.k_TKC, whole.v_TKC, nodes, whole.rule,
                    AttentionMethod::kFused, whole.sinks_H)
          .out_THC,
      whole.out_THC))
      << "nodes of " << node_size;
}

// The last `count` tokens, with the others in a cache.
void ExpectSameBitsInAPiece(const Whole& whole, int64_t count) {
  const int64_t first = whole.size() - count;
  const at::Tensor out = SuffixAttention(
      whole.q_THC.narrow(0, first, count), whole.k_TKC, whole.v_TKC,
      {{.q_size = count, .k_size = whole.size()}}, whole.rule, whole.sinks_H);
  EXPECT_TRUE(at::equal(out, whole.out_THC.narrow(0, first, count)))
      << "a piece of " << count;
}

void ExpectSameBitsInDecoding(const Whole& whole, Shape shape) {
  for (const int64_t length : {1, 16, 40, 255, 256, 257, 599, 600}) {
    if (length > whole.size()) continue;
    shape.lengths = {static_cast<int32_t>(length)};
    const Cache cache =
        MakeCache(shape, at::kFloat, {whole.k_TKC.narrow(0, 0, length)},
                  {whole.v_TKC.narrow(0, 0, length)});
    at::Tensor out = at::empty({1, shape.query_heads, shape.features});
    PagedAttention(whole.q_THC.narrow(0, length - 1, 1), cache.k_PSKC,
                   cache.v_PSKC, cache.table_BL, cache.lengths_B, whole.rule,
                   out, whole.sinks_H);
    EXPECT_TRUE(at::equal(out[0], whole.out_THC[length - 1]))
        << "token " << length << " of pages of " << shape.page_tokens;
  }
}

// A token's attention does not depend on what is computed beside it, on the
// prefix tree, on how a prompt is cut, or on whether it is trained or sampled.
TEST(PagedAttentionTest, HasTheBitsOfTrainingAndOfPrompts) {
  for (const Shape& shape :
       {Shape{4, 4, 16, 16, {600}}, Shape{9, 3, 64, 16, {600}},
        Shape{6, 2, 20, 5, {300}}, Shape{2, 1, 260, 32, {520}},
        Shape{40, 1, 8, 4, {270}}}) {
    for (const int64_t window : {0, 7, 50, 300}) {
      for (const double softcap : {0.0, 0.8}) {
        SCOPED_TRACE(::testing::Message()
                     << shape.query_heads << " heads of " << shape.features
                     << " features, window " << window << ", softcap "
                     << softcap);
        const Whole whole = AttendAtOnce(
            shape, {.scale = 0.3, .window = window, .softcap = softcap},
            /*has_sinks=*/softcap > 0);
        for (const int64_t size : {3, 100, 256}) {
          ExpectSameBitsInATree(whole, size);
        }
        for (const int64_t count : {1, 20, 200}) {
          ExpectSameBitsInAPiece(whole, count);
        }
        ExpectSameBitsInDecoding(whole, shape);
      }
    }
  }
}

// Tokens before the window may have any value, and pages with only such tokens
// may be gone.
TEST(PagedAttentionTest, NeverReadsPagesBeforeTheWindow) {
  const Shape shape{4, 2, 16, 4, {11}};
  const at::Tensor kv = at::randn({11, 2, 16});
  const at::Tensor q = at::randn({1, 4, 16});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Cache cache = MakeCache(shape, dtype, {kv.to(dtype)}, {kv.to(dtype)});
    at::Tensor outs[2];
    for (at::Tensor& out : outs) {
      out = at::empty(q.sizes(), dtype);
      PagedAttention(q.to(dtype), cache.k_PSKC, cache.v_PSKC, cache.table_BL,
                     cache.lengths_B, {.scale = 0.25, .window = 5}, out);
      cache.table_BL[0][0] = 1 << 30;
    }
    EXPECT_TRUE(at::equal(outs[0], outs[1]));
  }
}

TEST(PagedAttentionTest, TakesScoresThatOverflowExp) {
  const Shape shape{1, 1, 16, 4, {7}};
  const at::Tensor k = at::full({7, 1, 16}, 10.0);
  const at::Tensor v = at::arange(7 * 16, at::kFloat).view({7, 1, 16});
  const Cache cache = MakeCache(shape, at::kFloat, {k}, {v});
  at::Tensor out = at::empty({1, 1, 16});
  PagedAttention(at::full({1, 1, 16}, 10.0), cache.k_PSKC, cache.v_PSKC,
                 cache.table_BL, cache.lengths_B, {.scale = 1.0}, out);
  EXPECT_TRUE(at::allclose(out[0], v.mean(0)));
}

TEST(PagedAttentionTest, KeepsNanInItsSequence) {
  const Shape shape{4, 2, 16, 4, {5, 9, 3}};
  std::vector<at::Tensor> kv;
  for (const int32_t length : shape.lengths) {
    kv.push_back(at::randn({length, 2, 16}));
  }
  const at::Tensor q = at::randn({3, 4, 16});
  at::Tensor outs[2];
  for (at::Tensor& out : outs) {
    at::manual_seed(1);
    const Cache cache = MakeCache(shape, at::kFloat, kv, kv);
    out = at::empty_like(q);
    PagedAttention(q, cache.k_PSKC, cache.v_PSKC, cache.table_BL,
                   cache.lengths_B, {.scale = 0.25}, out);
    kv[1].fill_(NAN);
  }
  EXPECT_TRUE(at::equal(outs[0][0], outs[1][0]));
  EXPECT_TRUE(at::equal(outs[0][2], outs[1][2]));
  EXPECT_TRUE(outs[1][1].isnan().all().item<bool>());
}

TEST(WriteKvPagesTest, WritesOnlyItsSlots) {
  at::Tensor k_pages = at::zeros({3, 2, 1, 4});
  at::Tensor v_pages = at::zeros({3, 2, 1, 4});
  const at::Tensor k = at::ones({2, 1, 4});
  WriteKvPages(k, k * 2, at::tensor({5, 2}, at::kLong), k_pages, v_pages);
  EXPECT_EQ(k_pages.sum().item<float>(), 8);
  EXPECT_EQ(k_pages[2][1].sum().item<float>(), 4);
  EXPECT_EQ(k_pages[1][0].sum().item<float>(), 4);
  EXPECT_EQ(v_pages[1][0].sum().item<float>(), 8);
}

TEST(LseMergeTest, EveryInstructionSetMergesAndSkipsPartsWithoutKeys) {
  using kernels::cpu::Isa;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    const auto* table = kernels::cpu::KernelsFor(isa);
    if (table == nullptr) continue;
    const std::vector<float> part = {3, 3, 3, 8, 8, 8, 5, 5, 5};
    const std::vector<float> part_lse = {1000, -INFINITY, -50};
    std::vector<float> out = {1, 1, 1, 2, 2, 2, NAN, NAN, NAN};
    std::vector<float> lse = {1000, 4, -INFINITY};
    out[6] = out[7] = out[8] = 0;
    table->lse_merge_rows(part.data(), part_lse.data(), 3, 3, out.data(),
                          lse.data());
    EXPECT_NEAR(out[0], 2, 1e-6) << table->name;
    EXPECT_NEAR(lse[0], 1000 + std::log(2.0), 1e-4);
    EXPECT_EQ(out[3], 2);
    EXPECT_EQ(lse[1], 4);
    EXPECT_NEAR(out[6], 5, 1e-6);
    EXPECT_EQ(lse[2], -50);
  }
}

// The kernel cuts an item with more than 32 query heads into pieces.
TEST(PagedAttentionKernelTest, EveryInstructionSetAgreesWithTheOthers) {
  using kernels::cpu::Isa;
  constexpr int64_t kTokens = 39, kPage = 8;
  const int32_t table_L[] = {0, 1, 2, 3, 4};
  for (const auto& [heads, group, features] :
       {std::array<int64_t, 3>{1, 3, 20}, {12, 3, 20}, {2, 40, 8}}) {
    const at::Tensor q = at::randn({heads * group, features});
    const at::Tensor k = at::randn({5, kPage, heads, features});
    const at::Tensor v = at::randn({5, kPage, heads, features});
    const kernels::cpu::PagedAttentionItem item{
        .q_NGC = q.const_data_ptr<float>(),
        .k_pages = k.const_data_ptr<float>(),
        .v_pages = v.const_data_ptr<float>(),
        .page_table = table_L,
        .begin = 3,
        .end = kTokens,
        .num_heads = heads,
        .group_size = group,
        .num_kv_heads = heads,
        .head_features = features,
        .page_tokens = kPage,
        .scale = 0.3F,
        .softcap = 0.9F};
    const at::Tensor rows_k = k.flatten(0, 1).narrow(0, 3, kTokens - 3);
    const at::Tensor rows_v = v.flatten(0, 1).narrow(0, 3, kTokens - 3);
    const at::Tensor expected =
        DenseAttention(q, rows_k, rows_v, {.scale = 0.3F, .softcap = 0.9F});
    for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
      const auto* table = kernels::cpu::KernelsFor(isa);
      if (table == nullptr) continue;
      at::Tensor out = at::empty({heads * group, features});
      at::Tensor lse = at::empty({heads * group});
      table->paged_attention(item, out.mutable_data_ptr<float>(),
                             lse.mutable_data_ptr<float>());
      EXPECT_LE((out.to(at::kDouble) - expected).abs().max().item<double>(),
                Tolerance(kEpsilonF32, kTokens + features, 1))
          << table->name << ", " << heads << " heads";
    }
  }
}

}  // namespace
}  // namespace weft::ops
