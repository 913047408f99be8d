#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "src/ops/tree_attention.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::suffix_attention_test {
namespace {

constexpr int64_t kHeads = 6, kKvHeads = 2, kFeatures = 8;

// The numbers of cached tokens and of new tokens.
struct Lengths {
  int64_t past;
  int64_t own;
};

std::vector<SuffixRows> Pack(const std::vector<Lengths>& lengths) {
  std::vector<SuffixRows> sequences;
  int64_t q_rows = 0, k_rows = 0;
  for (const auto& [past, own] : lengths) {
    sequences.push_back({q_rows, own, k_rows, past + own});
    q_rows += own;
    k_rows += past + own;
  }
  return sequences;
}

// Computes one sequence in f64 with an explicit mask. Returns [q_size, H, C].
at::Tensor DenseSuffix(const at::Tensor& q_THC, const at::Tensor& k_SKC,
                       const at::Tensor& v_SKC, const SuffixRows& rows,
                       const AttentionRule& rule, const at::Tensor& sinks_H) {
  const auto heads_first = [&](const at::Tensor& x, int64_t begin,
                               int64_t size) {
    return x.narrow(0, begin, size)
        .to(at::kDouble)
        .repeat_interleave(kHeads / x.size(1), 1)
        .transpose(0, 1);
  };
  const at::Tensor q = heads_first(q_THC, rows.q_begin, rows.q_size);
  const at::Tensor k = heads_first(k_SKC, rows.k_begin, rows.k_size);
  const at::Tensor v = heads_first(v_SKC, rows.k_begin, rows.k_size);
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)) * rule.scale;
  if (rule.softcap > 0) scores = (scores / rule.softcap).tanh() * rule.softcap;
  const at::Tensor distance =
      at::arange(rows.k_size - rows.q_size, rows.k_size).unsqueeze(1) -
      at::arange(rows.k_size).unsqueeze(0);
  at::Tensor hidden = distance < 0;
  if (rule.window > 0) hidden.logical_or_(distance >= rule.window);
  const at::Tensor sinks = sinks_H.to(at::kDouble).view({-1, 1, 1});
  const at::Tensor all = at::cat({scores.masked_fill(hidden, -INFINITY),
                                  sinks.expand({kHeads, rows.q_size, 1})},
                                 2);
  return at::matmul(all.softmax(-1).narrow(2, 0, rows.k_size), v)
      .transpose(0, 1);
}

void CheckAgainstDense(const std::vector<Lengths>& lengths, AttentionRule rule,
                       at::ScalarType dtype, double epsilon,
                       at::Device device = at::kCPU) {
  SCOPED_TRACE("window " + std::to_string(rule.window) + " softcap " +
               std::to_string(rule.softcap));
  at::manual_seed(5);
  rule.scale = 1 / std::sqrt(static_cast<double>(kFeatures));
  const std::vector<SuffixRows> sequences = Pack(lengths);
  const int64_t q_rows = sequences.back().q_begin + sequences.back().q_size;
  const int64_t k_rows = sequences.back().k_begin + sequences.back().k_size;
  // q is a view into a fused projection, like the decoder's.
  const at::Tensor q = at::randn({q_rows, (kHeads + 3) * kFeatures})
                           .to(dtype)
                           .narrow(1, 0, kHeads * kFeatures)
                           .view({q_rows, kHeads, kFeatures});
  const at::Tensor k = at::randn({k_rows, kKvHeads, kFeatures}).to(dtype);
  const at::Tensor v = at::randn({k_rows, kKvHeads, kFeatures}).to(dtype);
  // A sink of -inf does not change the softmax.
  const at::Tensor none_H = at::full({kHeads}, -INFINITY);
  const at::Tensor sinks_H =
      at::randn({kHeads}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  const auto run = [&](const at::Tensor& sinks) {
    return SuffixAttention(q.to(device), k.to(device), v.to(device), sequences,
                           rule, sinks)
        .cpu();
  };
  const at::Tensor out = run({});
  const at::Tensor sunk = run(sinks_H.to(device));
  ASSERT_EQ(out.sizes(), q.sizes());
  ASSERT_EQ(out.scalar_type(), dtype);
  for (const SuffixRows& rows : sequences) {
    for (const bool has_sinks : {false, true}) {
      const at::Tensor expected =
          DenseSuffix(q, k, v, rows, rule, has_sinks ? sinks_H : none_H);
      const at::Tensor actual =
          (has_sinks ? sunk : out).narrow(0, rows.q_begin, rows.q_size);
      SCOPED_TRACE(::testing::Message() << rows.q_size << " of " << rows.k_size
                                        << ", sinks " << has_sinks);
      ExpectNear(actual, expected, epsilon, rows.k_size);
    }
  }
}

TEST(SuffixAttentionTest, IsTheEndOfCausalAttention) {
  const std::vector<std::vector<Lengths>> packs = {
      {{0, 1}},
      {{9, 1}},
      {{16, 21}},
      {{0, 7}, {16, 3}, {32, 1}, {1, 12}},
      // There are more rows than one block of scores has.
      {{40, 300}, {5, 2}}};
  const AttentionRule rules[] = {{},
                                 {.window = 1},
                                 {.window = 6},
                                 {.window = 30},
                                 {.softcap = 1.5},
                                 {.window = 5, .softcap = 2}};
  for (const std::vector<Lengths>& lengths : packs) {
    for (const AttentionRule& rule : rules) {
      CheckAgainstDense(lengths, rule, at::kFloat, kEpsilonF32);
      CheckAgainstDense(lengths, rule, at::kDouble, kEpsilonF64);
      CheckAgainstDense(lengths, rule, at::kBFloat16, kEpsilonBf16);
    }
  }
}

// LibTorch does not document how its kernel aligns the causal mask if there are
// fewer queries than keys.
TEST(SuffixAttentionTest, CudaIsTheEndOfCausalAttention) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  CheckAgainstDense({{16, 21}}, {}, at::kBFloat16, kEpsilonBf16, at::kCUDA);
  CheckAgainstDense({{0, 7}, {16, 3}, {32, 1}, {1, 12}}, {}, at::kBFloat16,
                    kEpsilonBf16, at::kCUDA);
}

TEST(SuffixAttentionTest, NanOfOneSequenceStaysThere) {
  const std::vector<SuffixRows> sequences = Pack({{8, 2}, {4, 3}});
  const at::Tensor q = at::randn({5, kHeads, kFeatures});
  const at::Tensor v = at::randn({17, kKvHeads, kFeatures});
  at::Tensor k = at::randn({17, kKvHeads, kFeatures});
  for (const AttentionRule& rule : {AttentionRule{}, {.softcap = 2}}) {
    const at::Tensor before = SuffixAttention(q, k, v, sequences, rule);
    at::Tensor bad = k.clone();
    bad[3].fill_(NAN);
    const at::Tensor after = SuffixAttention(q, bad, v, sequences, rule);
    EXPECT_TRUE(after.narrow(0, 0, 2).isnan().all().item<bool>());
    EXPECT_TRUE(at::equal(after.narrow(0, 2, 3), before.narrow(0, 2, 3)));
  }
}

}  // namespace
}  // namespace weft::ops::suffix_attention_test
