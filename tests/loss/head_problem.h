// Makes score rows with adapters of lm_head, and computes the expected values
// by dense autograd.
#ifndef WEFT_TESTS_LOSS_HEAD_PROBLEM_H_
#define WEFT_TESTS_LOSS_HEAD_PROBLEM_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "src/loss/fused_head.h"
#include "tests/loss/head_supports.h"
#include "tests/support/tensors_near.h"

namespace weft::loss {

// Says which adapters train lm_head, and on which rows.
enum class Adapters { kNone, kOne, kDistinct, kSkewed };

inline constexpr int64_t kHidden = 24;
inline constexpr double kLargestLogit = 40;

// Makes rows. Row r has r % 3 + 1 targets and its own temperature.
inline ScoreRows MakeRows(int64_t num_rows) {
  ScoreRows rows;
  rows.row_offsets = {0};
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i <= r % 3; ++i) {
      rows.targets.push_back((r * 29 + i * 53) % kVocab);
    }
    rows.row_offsets.push_back(static_cast<int64_t>(rows.targets.size()));
    rows.temperatures.push_back(0.6F + 0.2F * static_cast<float>(r % 6));
  }
  return rows;
}

// Makes an adapter that has only lm_head, with random weights.
inline lora::AdapterVersionPtr HeadVersion(int rank, at::ScalarType dtype) {
  auto version = std::make_shared<lora::AdapterVersion>();
  version->layout = std::make_shared<lora::AdapterLayout>(
      model_config::ModelShape{.hidden = kHidden, .vocab = kVocab},
      LoraConfig{
          .rank = rank, .alpha = 6, .target_modules = {TargetModule::kLmHead}});
  version->compute_N =
      (at::randn({version->layout->num_parameters()}, at::kDouble) * 0.3)
          .to(dtype);
  return version;
}

inline void AddSegment(lora::LoraRouting& routing, int64_t begin, int64_t end,
                       int rank, at::ScalarType dtype) {
  if (begin >= end) return;
  routing.push_back(
      {.begin = begin, .end = end, .version = HeadVersion(rank, dtype)});
}

// Makes the routing. kSkewed gives the first row its own adapter, and most rows
// a second adapter. One row of an adapter without lm_head and rows of the base
// model follow.
inline lora::LoraRouting MakeRouting(Adapters adapters, int64_t num_rows,
                                     at::ScalarType dtype) {
  lora::LoraRouting routing;
  if (adapters == Adapters::kOne) AddSegment(routing, 0, num_rows, 3, dtype);
  if (adapters == Adapters::kDistinct) {
    for (int64_t r = 0; r < num_rows; ++r) {
      AddSegment(routing, r, r + 1, static_cast<int>(r % 4) + 1, dtype);
    }
  }
  if (adapters == Adapters::kSkewed) {
    AddSegment(routing, 0, std::min<int64_t>(num_rows, 1), 2, dtype);
    AddSegment(routing, 1, num_rows - num_rows / 4, 5, dtype);
    if (num_rows >= 8) {
      auto version = std::make_shared<lora::AdapterVersion>();
      version->layout = std::make_shared<lora::AdapterLayout>(
          model_config::ModelShape{.hidden = kHidden, .vocab = kVocab},
          LoraConfig());
      const int64_t begin = num_rows - num_rows / 4;
      routing.push_back({.begin = begin, .end = begin + 1, .version = version});
    }
  }
  return routing;
}

// Returns zeros for every segment's version, except for adapters without
// lm_head.
inline lora::LoraGradients HeadGradients(const lora::LoraRouting& routing) {
  lora::LoraGradients gradients;
  for (const lora::LoraSegment& segment : routing) {
    const at::Tensor& weights_N = segment.version->compute_N;
    if (!weights_N.defined()) continue;
    // bf16 adapters have f32 gradients, like all adapters in production.
    const bool exact = weights_N.scalar_type() == at::kDouble;
    gradients.push_back({.version = segment.version,
                         .gradient_N = at::zeros_like(
                             weights_N, exact ? at::kDouble : at::kFloat)});
  }
  return gradients;
}

struct Problem {
  at::Tensor hidden;
  at::Tensor weight;
  ScoreRows rows;
  at::Tensor g;
  lora::LoraGradients gradients;  // The backward pass adds to these gradients.

  // Returns the gradient of a segment's adapter.
  at::Tensor Gradient(size_t segment) const {
    return GradientOf(gradients, rows.routing[segment].version);
  }
};

inline HeadResult Score(const Problem& problem, const HeadOptions& options = {},
                        bool want_gradient = true, bool want_entropy = false) {
  return ScoreHead(problem.hidden, problem.weight, problem.rows, options,
                   want_gradient, want_entropy);
}

// Returns a copy, because the backward pass consumes its argument.
inline HeadResult Copy(HeadResult result) {
  if (result.projection_RH.defined()) {
    result.projection_RH = result.projection_RH.clone();
  }
  for (at::Tensor& projected : result.projected_nR) {
    if (projected.defined()) projected = projected.clone();
  }
  return result;
}

inline at::Tensor Backward(const HeadResult& result, const Problem& problem,
                           const HeadOptions& options = {}) {
  return HeadBackward(Copy(result), problem.hidden, problem.weight,
                      problem.rows, options, problem.g, problem.gradients);
}

// Makes a problem whose upstream gradient is signed and sums to zero.
inline Problem MakeProblem(int64_t num_rows, at::ScalarType dtype,
                           Adapters adapters = Adapters::kNone) {
  at::manual_seed(5);
  Problem problem{at::randn({num_rows, kHidden}, at::kDouble).to(dtype),
                  at::randn({kVocab, kHidden}, at::kDouble).to(dtype),
                  MakeRows(num_rows),
                  {},
                  {}};
  at::Tensor g = at::randn({static_cast<int64_t>(problem.rows.targets.size())},
                           at::kDouble);
  if (g.numel() > 1) g -= g.mean();
  problem.g = g.to(at::kFloat);
  problem.rows.routing = MakeRouting(adapters, num_rows, dtype);
  problem.gradients = HeadGradients(problem.rows.routing);
  return problem;
}

struct Oracle {
  at::Tensor logprobs;
  at::Tensor entropies;
  at::Tensor dhidden;
  std::vector<at::Tensor> dadapters;  // One flat tensor per segment.
};

// Adds every segment's LoRA to the dense logits. Returns the autograd leaves.
inline std::vector<at::Tensor> AddDenseLora(const Problem& problem,
                                            const at::Tensor& hidden,
                                            at::Tensor& z) {
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> deltas;
  int64_t done = 0;
  for (const lora::LoraSegment& segment : problem.rows.routing) {
    const lora::AdapterVersion& version = *segment.version;
    const auto& factors =
        version.layout->group(0, lora::ProjectionGroup::kLmHead).factors;
    leaves.emplace_back();
    if (factors.empty()) continue;
    leaves.back() = version.compute_N.to(at::kDouble).clone();
    leaves.back().requires_grad_(true);
    const int64_t count = segment.end - segment.begin;
    deltas.push_back(at::zeros({segment.begin - done, kVocab}, at::kDouble));
    deltas.push_back(hidden.narrow(0, segment.begin, count)
                         .matmul(version.A(leaves.back(), factors[0]).t())
                         .matmul(version.B(leaves.back(), factors[0]).t()) *
                     factors[0].scale);
    done = segment.end;
  }
  deltas.push_back(at::zeros({z.size(0) - done, kVocab}, at::kDouble));
  z = z + at::cat(deltas);
  return leaves;
}

// Computes dense logits and log_softmax under f64 autograd.
inline Oracle DenseOracle(const Problem& problem, double softcap) {
  const ScoreRows& rows = problem.rows;
  at::Tensor hidden =
      problem.hidden.to(at::kDouble).detach().clone().requires_grad_(true);
  at::Tensor z = hidden.matmul(problem.weight.to(at::kDouble).t());
  const std::vector<at::Tensor> leaves = AddDenseLora(problem, hidden, z);
  if (softcap > 0) z = softcap * (z / softcap).tanh();
  z = z / at::tensor(rows.temperatures).to(at::kDouble).unsqueeze(1);
  const at::Tensor log_p = MaskLogits(z, rows).log_softmax(1);
  const at::Tensor row_of_entry =
      at::repeat_interleave(at::tensor(rows.row_offsets, at::kLong).diff());
  const at::Tensor logprobs =
      log_p.index({row_of_entry, at::tensor(rows.targets, at::kLong)});
  (logprobs * problem.g.to(at::kDouble)).sum().backward();
  Oracle oracle{logprobs.detach(),
                -(log_p.exp() * log_p.clamp_min(-1e30)).sum(1).detach(),
                hidden.grad(),
                {}};
  for (const at::Tensor& leaf : leaves) {
    oracle.dadapters.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
  }
  return oracle;
}

inline void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                        double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_LE(MaxDifference(actual, expected), tolerance);
}

inline double Epsilon(at::ScalarType dtype) {
  return dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
}

// An adapter's gradient is a sum over its rows, and every probability in it has
// the rounding error of its logit.
inline void ExpectAdaptersClose(const Problem& problem, const Oracle& oracle,
                                double epsilon) {
  for (size_t s = 0; s < problem.rows.routing.size(); ++s) {
    const lora::LoraSegment& segment = problem.rows.routing[s];
    if (!oracle.dadapters[s].defined()) continue;
    const double size = MaxAbs(oracle.dadapters[s]);
    EXPECT_GT(size, 0);
    ExpectClose(problem.Gradient(s), oracle.dadapters[s],
                Tolerance(epsilon, kHidden + segment.end - segment.begin,
                          std::max(size, kLargestLogit)));
  }
}

}  // namespace weft::loss

#endif  // WEFT_TESTS_LOSS_HEAD_PROBLEM_H_
