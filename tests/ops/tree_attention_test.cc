#include "src/ops/tree_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "src/ops/matmul.h"
#include "tests/ops/tree_pack.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::tree_attention_test {
namespace {

using ::weft::testing::Pack;
using ::weft::testing::Tree;

using Node = std::pair<int64_t, int64_t>;  // Its length and its parent.

// Makes sequences without a shared prefix.
Pack Sequences(const std::string& name, const std::vector<int64_t>& lengths) {
  std::vector<Node> nodes;
  for (const int64_t length : lengths) nodes.emplace_back(length, -1);
  return Tree(name, nodes);
}

// Makes groups of one prompt with its completions.
Pack Groups(const std::string& name, int64_t prompt,
            const std::vector<std::vector<int64_t>>& completions) {
  std::vector<Node> nodes;
  for (const std::vector<int64_t>& lengths : completions) {
    const auto parent = std::ssize(nodes);
    nodes.emplace_back(prompt, -1);
    for (const int64_t length : lengths) nodes.emplace_back(length, parent);
  }
  return Tree(name, nodes);
}

std::vector<Pack> Packs() {
  return {Sequences("OneSequence", {37}), Sequences("OneToken", {1}),
          Sequences("EqualSequences", {6, 6, 6}),
          Sequences("RaggedSequences", {5, 1, 9, 9, 3}),
          Groups("GroupOfOne", 7, {{5}}), Groups("GroupOfTwo", 9, {{4, 4}}),
          Groups("RaggedGroupOfEight", 20, {{3, 1, 7, 7, 2, 5, 1, 4}}),
          Groups("PromptOfOneToken", 1, {{4, 2}}),
          Groups("CompletionsOfOneToken", 5, {{1, 1, 1}}),
          Groups("TwoGroupsAndASequence", 6, {{3, 2}, {2, 8}, {}}),
          // The root has two branches with two leaves each, and one leaf.
          Tree("ThreeLevels", {{4, -1},
                               {3, 0},
                               {2, 1},
                               {4, 1},
                               {2, 0},
                               {1, 4},
                               {2, 4},
                               {2, 0},
                               {5, -1}})};
}

struct Heads {
  int64_t query;
  int64_t kv;
  int64_t features;
};

// Query, key and value as views into one tensor [T, (H + 2K) C].
struct Fused {
  Fused(const at::Tensor& storage, const Heads& heads)
      : all(storage),
        q(View(0, heads.query, heads.features)),
        k(View(heads.query, heads.kv, heads.features)),
        v(View(heads.query + heads.kv, heads.kv, heads.features)) {}

  at::Tensor View(int64_t first_head, int64_t num_heads, int64_t features) {
    return all.narrow(1, first_head * features, num_heads * features)
        .unflatten(1, {num_heads, features});
  }

  at::Tensor all;
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
};

// Returns the position of every row: a root begins at 0, a child where its
// parent ends.
std::vector<int64_t> Positions(const Pack& pack) {
  std::vector<int64_t> positions;
  for (const AttentionNode& node : pack.nodes) {
    const int64_t first =
        node.parent < 0 ? 0 : positions[pack.nodes[node.parent].end - 1] + 1;
    for (int64_t i = node.begin; i < node.end; ++i) {
      positions.push_back(first + i - node.begin);
    }
  }
  return positions;
}

// Returns mask[i][j], which is true if row i may see row j. Finds it by walking
// up from i's node.
at::Tensor VisibleRows(const Pack& pack, int64_t window) {
  at::Tensor mask = at::zeros({pack.num_rows(), pack.num_rows()}, at::kBool);
  auto visible = mask.accessor<bool, 2>();
  for (const AttentionNode& node : pack.nodes) {
    for (int64_t i = node.begin; i < node.end; ++i) {
      for (int64_t j = node.begin; j <= i; ++j) visible[i][j] = true;
      for (int64_t up = node.parent; up >= 0; up = pack.nodes[up].parent) {
        for (int64_t j = pack.nodes[up].begin; j < pack.nodes[up].end; ++j) {
          visible[i][j] = true;
        }
      }
    }
  }
  if (window == 0) return mask;
  const at::Tensor positions = at::tensor(Positions(pack));
  const at::Tensor distance = positions.unsqueeze(1) - positions.unsqueeze(0);
  return mask.logical_and(distance < window);
}

struct Oracle {
  at::Tensor out;   // [T, H, C] f64.
  at::Tensor lse;   // [T, H].
  at::Tensor grad;  // The gradient of the fused storage.
};

// Computes dense attention with an explicit mask in f64, differentiated by
// autograd.
Oracle DenseAttention(const Pack& pack, const at::Tensor& storage,
                      const at::Tensor& dout, const Heads& heads,
                      const AttentionRule& rule,
                      const at::Tensor& sinks_H = {}) {
  at::Tensor leaf = storage.to(at::kCPU, at::kDouble).detach().clone();
  leaf.set_requires_grad(true);
  const Fused fused(leaf, heads);
  const int64_t group = heads.query / heads.kv;
  const at::Tensor k = fused.k.repeat_interleave(group, 1).transpose(0, 1);
  const at::Tensor v = fused.v.repeat_interleave(group, 1).transpose(0, 1);
  at::Tensor scores =
      at::matmul(fused.q.transpose(0, 1), k.transpose(1, 2)) * rule.scale;
  if (rule.softcap > 0) scores = (scores / rule.softcap).tanh() * rule.softcap;
  scores = scores.masked_fill(VisibleRows(pack, rule.window).logical_not(),
                              -INFINITY);
  const int64_t keys = scores.size(2);
  if (sinks_H.defined()) {
    const at::Tensor sinks = sinks_H.to(at::kDouble).view({-1, 1, 1});
    scores = at::cat({scores, sinks.expand({-1, keys, 1})}, 2);
  }
  const at::Tensor weights = scores.softmax(-1).narrow(2, 0, keys);
  const at::Tensor out = at::matmul(weights, v).transpose(0, 1);
  const auto gradients =
      torch::autograd::grad({out}, {leaf}, {dout.to(at::kCPU, at::kDouble)});
  return {out.detach(), scores.logsumexp(-1).t().detach(), gradients[0]};
}

void CheckAgainstOracle(const Pack& pack, const Heads& heads,
                        at::TensorOptions options, double epsilon,
                        AttentionMethod method, AttentionRule rule = {},
                        const at::Tensor& sinks_H = {}) {
  SCOPED_TRACE(pack.name + " heads " + std::to_string(heads.query) + "/" +
               std::to_string(heads.kv) + " features " +
               std::to_string(heads.features) + " window " +
               std::to_string(rule.window) + " softcap " +
               std::to_string(rule.softcap));
  at::manual_seed(3);
  const int64_t rows = pack.num_rows();
  const int64_t width = (heads.query + 2 * heads.kv) * heads.features;
  rule.scale = 1 / std::sqrt(static_cast<double>(heads.features));
  const Fused in(at::randn({rows, width}).to(options), heads);
  const at::Tensor dout =
      at::randn({rows, heads.query, heads.features}).to(options);
  const Oracle oracle =
      DenseAttention(pack, in.all, dout, heads, rule, sinks_H);

  const AttentionOutput result = TreeAttention(
      in.q, in.k, in.v, pack.nodes, rule, method,
      sinks_H.defined() ? sinks_H.to(options.device()) : at::Tensor());
  // The gradient starts with NaN, which stays where the backward pass does not
  // overwrite it.
  Fused grad(at::full({rows, width}, NAN, options), heads);
  TreeAttentionBackward(dout, in.q, in.k, in.v, result, pack.nodes, rule,
                        grad.q, grad.k, grad.v, method);

  EXPECT_EQ(result.out_THC.scalar_type(), in.q.scalar_type());
  const int64_t reduction = rows + heads.features;
  ExpectNear(result.out_THC, oracle.out, epsilon, reduction, "out");
  // The kernels' exp is only as exact as the dtype of the output requires, so
  // the log-sum-exp has the same bound as the output.
  ExpectNear(result.lse_TH, oracle.lse, epsilon, reduction, "log-sum-exp");
  ExpectNear(grad.all, oracle.grad, epsilon, reduction, "gradient");
}

constexpr Heads kHeads[] = {{9, 3, 64}, {4, 4, 16}, {8, 1, 128}};

TEST(TreeAttentionTest, MatchesDenseAutogradInF64) {
  for (const Pack& pack : Packs()) {
    for (const Heads& heads : kHeads) {
      CheckAgainstOracle(pack, heads, at::kDouble, kEpsilonF64,
                         AttentionMethod::kFused);
    }
  }
}

TEST(TreeAttentionTest, MatchesDenseAutogradInF32) {
  for (const Pack& pack : Packs()) {
    for (const Heads& heads : kHeads) {
      CheckAgainstOracle(pack, heads, at::kFloat, kEpsilonF32,
                         AttentionMethod::kFused);
    }
  }
}

TEST(TreeAttentionTest, MatchesDenseAutogradInBf16) {
  for (const Pack& pack : Packs()) {
    CheckAgainstOracle(pack, kHeads[0], at::kBFloat16, kEpsilonBf16,
                       AttentionMethod::kFused);
  }
}

// During each test, allows attention over f32 rows to compute products in bf16.
class Bf16ArithmeticAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!AllowBf16Products(true)) {
      GTEST_SKIP() << "this processor lacks AVX512_BF16";
    }
  }
  void TearDown() override { AllowBf16Products(false); }
};

TEST_F(Bf16ArithmeticAttentionTest, MatchesDenseAutograd) {
  const at::Tensor sinks_H = at::tensor({-30.0F, 0.5F, 2.0F, 12.0F});
  for (const Pack& pack : Packs()) {
    for (const Heads& heads : kHeads) {
      CheckAgainstOracle(pack, heads, at::kFloat, kEpsilonBf16,
                         AttentionMethod::kFused);
    }
    for (const int64_t window : {0, 3, 11}) {
      CheckAgainstOracle(pack, {4, 2, 16}, at::kFloat, kEpsilonBf16,
                         AttentionMethod::kFused,
                         {.window = window, .softcap = 0.7});
      CheckAgainstOracle(pack, {4, 2, 16}, at::kFloat, kEpsilonBf16,
                         AttentionMethod::kFused, {.window = window}, sinks_H);
    }
  }
  // This case has several blocks and several chunks of keys.
  CheckAgainstOracle(Groups("LongGroup", 700, {{150, 3}}), {6, 2, 20},
                     at::kFloat, kEpsilonBf16, AttentionMethod::kFused);
}

TEST(TreeAttentionTest, EagerMatchesDenseAutograd) {
  for (const Pack& pack : Packs()) {
    for (const Heads& heads : kHeads) {
      CheckAgainstOracle(pack, heads, at::kDouble, kEpsilonF64,
                         AttentionMethod::kEager);
      CheckAgainstOracle(pack, heads, at::kFloat, kEpsilonF32,
                         AttentionMethod::kEager);
    }
  }
}

// The windows end in a node, in its ancestor, in the ancestor's ancestor, and
// beyond every path. The caps bend most scores.
TEST(TreeAttentionTest, WindowsAndSoftcapsMatchDenseAutograd) {
  for (const Pack& pack : Packs()) {
    for (const int64_t window : {1, 2, 3, 6, 11, 100}) {
      for (const double softcap : {0.0, 0.7}) {
        const AttentionRule rule{.window = window, .softcap = softcap};
        CheckAgainstOracle(pack, {4, 2, 16}, at::kDouble, kEpsilonF64,
                           AttentionMethod::kFused, rule);
        CheckAgainstOracle(pack, {9, 3, 8}, at::kFloat, kEpsilonF32,
                           AttentionMethod::kFused, rule);
      }
    }
    CheckAgainstOracle(pack, {4, 2, 16}, at::kBFloat16, kEpsilonBf16,
                       AttentionMethod::kFused, {.window = 3, .softcap = 2});
    CheckAgainstOracle(pack, {4, 2, 16}, at::kDouble, kEpsilonF64,
                       AttentionMethod::kFused, {.softcap = 0.7});
  }
}

// The largest sink takes most of the softmax, the smallest nearly nothing.
TEST(TreeAttentionTest, SinksMatchDenseAutograd) {
  const at::Tensor sinks_H = at::tensor({-30.0, 0.5, 2.0, 12.0});
  for (const Pack& pack : Packs()) {
    for (const int64_t window : {0, 3}) {
      const AttentionRule rule{.window = window};
      for (const AttentionMethod method :
           {AttentionMethod::kFused, AttentionMethod::kEager}) {
        CheckAgainstOracle(pack, {4, 2, 16}, at::kDouble, kEpsilonF64, method,
                           rule, sinks_H);
        CheckAgainstOracle(pack, {4, 2, 16}, at::kFloat, kEpsilonF32, method,
                           rule, sinks_H.to(at::kFloat));
      }
    }
  }
}

TEST(TreeAttentionTest, SinksOfAnotherShapeAreRefused) {
  const at::Tensor qkv = at::zeros({1, 2, 4});
  EXPECT_THROW(TreeAttention(qkv, qkv, qkv, {{0, 1, -1, 1}}, {},
                             AttentionMethod::kFused, at::zeros({3})),
               c10::Error);
}

// There are more rows than one block of the attention has.
TEST(TreeAttentionTest, WindowsReachAcrossBlocksOfRows) {
  for (const int64_t window : {1, 40, 256, 300, 400}) {
    CheckAgainstOracle(Groups("Long", 300, {{280, 77}}), {2, 1, 8}, at::kDouble,
                       kEpsilonF64, AttentionMethod::kFused,
                       {.window = window});
  }
}

TEST(TreeAttentionTest, AWindowLongerThanEveryPathChangesNoBit) {
  const Pack pack = Groups("Group", 9, {{4, 6}});
  at::manual_seed(7);
  const Fused in(at::randn({pack.num_rows(), 8 * 16}), {4, 2, 16});
  const auto run = [&](int64_t window) {
    return TreeAttention(in.q, in.k, in.v, pack.nodes,
                         {.scale = 0.25, .window = window})
        .out_THC;
  };
  EXPECT_TRUE(at::equal(run(0), run(15)));
  EXPECT_FALSE(at::equal(run(0), run(14)));
}

TEST(TreeAttentionTest, TakesRowsBeyondOneKernelBlock) {
  CheckAgainstOracle(Groups("Long", 300, {{150, 77}}), {4, 2, 16}, at::kFloat,
                     kEpsilonF32, AttentionMethod::kFused);
}

// The engine computes in inference mode, which other threads do not inherit.
TEST(TreeAttentionTest, ComputesTheSameBitsInInferenceMode) {
  const Pack pack = Groups("Long", 300, {{150, 77}});
  const AttentionRule rule{.scale = 0.25};
  const auto run = [&] {
    at::manual_seed(7);
    const Fused in(at::randn({pack.num_rows(), 8 * 16}), {4, 2, 16});
    const AttentionOutput result =
        TreeAttention(in.q, in.k, in.v, pack.nodes, rule);
    Fused grad(at::empty_like(in.all), {4, 2, 16});
    TreeAttentionBackward(result.out_THC, in.q, in.k, in.v, result, pack.nodes,
                          rule, grad.q, grad.k, grad.v);
    return grad.all;
  };
  const at::Tensor expected = run();
  const c10::InferenceMode guard;
  EXPECT_TRUE(at::equal(run(), expected));
}

// A tree's bits depend neither on other trees nor on the number of threads.
void ExpectSameBitsInCompany() {
  at::manual_seed(9);
  const at::Tensor storage = at::randn({700, 8 * 16});
  const auto run = [&](const Pack& pack) {
    const Fused in(storage.narrow(0, 0, pack.num_rows()), {4, 2, 16});
    const AttentionRule rule{.scale = 0.25};
    const AttentionOutput result =
        TreeAttention(in.q, in.k, in.v, pack.nodes, rule);
    Fused grad(at::empty_like(in.all), {4, 2, 16});
    TreeAttentionBackward(result.out_THC, in.q, in.k, in.v, result, pack.nodes,
                          rule, grad.q, grad.k, grad.v);
    return at::cat({grad.all, result.out_THC.flatten(1)}, 1).narrow(0, 0, 600);
  };
  const at::Tensor alone = run(Sequences("Alone", {600}));
  EXPECT_TRUE(at::equal(run(Sequences("InCompany", {600, 70, 30})), alone));
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  EXPECT_TRUE(at::equal(run(Sequences("OneThread", {600})), alone));
  at::set_num_threads(threads);
}

TEST(TreeAttentionTest, ATreeHasTheSameBitsInCompany) {
  ExpectSameBitsInCompany();
}

TEST_F(Bf16ArithmeticAttentionTest, ATreeHasTheSameBitsInCompany) {
  ExpectSameBitsInCompany();
}

TEST(TreeAttentionTest, CudaVarlenMatchesDenseAutograd) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const Pack& pack : Packs()) {
    for (const Heads& heads : kHeads) {
      CheckAgainstOracle(pack, heads,
                         at::TensorOptions(at::kBFloat16).device(at::kCUDA),
                         kEpsilonBf16, AttentionMethod::kFused);
    }
  }
}

TEST(TreeAttentionTest, CudaF32MatchesDenseAutograd) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const Pack& pack : Packs()) {
    CheckAgainstOracle(pack, kHeads[0],
                       at::TensorOptions(at::kFloat).device(at::kCUDA),
                       kEpsilonF32, AttentionMethod::kFused);
  }
}

// Rows [bad_begin, bad_end) of every input hold NaN. All rows that do not see
// them must have the same bits as in a run without NaN.
void ExpectNanStays(const Pack& pack, int64_t bad_begin, int64_t bad_end,
                    const AttentionRule& rule) {
  const Heads heads{4, 2, 16};
  const int64_t rows = pack.num_rows();
  at::manual_seed(5);
  at::Tensor storage = at::randn({rows, 8 * 16});
  at::Tensor dout = at::randn({rows, 4, 16});
  at::Tensor results[2];
  for (at::Tensor& result : results) {
    const Fused in(storage, heads);
    const AttentionOutput out =
        TreeAttention(in.q, in.k, in.v, pack.nodes, rule);
    Fused grad(at::empty_like(storage), heads);
    TreeAttentionBackward(dout, in.q, in.k, in.v, out, pack.nodes, rule, grad.q,
                          grad.k, grad.v);
    result = at::cat({grad.all, out.out_THC.flatten(1), out.lse_TH}, 1);
    storage.narrow(0, bad_begin, bad_end - bad_begin).fill_(NAN);
    dout.narrow(0, bad_begin, bad_end - bad_begin).fill_(NAN);
  }
  for (const auto& [begin, end] :
       {std::pair{int64_t{0}, bad_begin}, std::pair{bad_end, rows}}) {
    EXPECT_TRUE(at::equal(results[0].narrow(0, begin, end - begin),
                          results[1].narrow(0, begin, end - begin)))
        << pack.name;
  }
}

TEST(TreeAttentionTest, KeepsNanInItsSequence) {
  for (const AttentionRule& rule :
       {AttentionRule{.scale = 0.25},
        AttentionRule{.scale = 0.25, .window = 3, .softcap = 5}}) {
    ExpectNanStays(Sequences("Batched", {6, 6, 6}), 6, 12, rule);
    ExpectNanStays(Sequences("Ragged", {5, 7, 3}), 5, 12, rule);
    ExpectNanStays(Groups("Groups", 4, {{2, 3}, {3, 2}, {2, 2}}), 9, 18, rule);
  }
}

}  // namespace
}  // namespace weft::ops::tree_attention_test
