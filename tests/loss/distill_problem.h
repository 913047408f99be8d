// Makes pairs of rows of a student and a teacher, and computes the expected
// divergences and gradients by dense autograd.
#ifndef WEFT_TESTS_LOSS_DISTILL_PROBLEM_H_
#define WEFT_TESTS_LOSS_DISTILL_PROBLEM_H_

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "src/loss/distill_head.h"
#include "tests/loss/head_problem.h"

namespace weft::loss {

// The divergences that the rows have in turn.
inline const std::vector<Divergence>& AllDivergences() {
  static const auto* const kAll =
      new std::vector<Divergence>{{.function = LossFunction::kForwardKl},
                                  {.function = LossFunction::kReverseKl},
                                  {.function = LossFunction::kJs, .beta = 0.5},
                                  {.function = LossFunction::kJs, .beta = 0.1}};
  return *kAll;
}

struct Distillation {
  Problem student;  // `rows` are those of `rows.scores`.
  Problem teacher;  // Of `rows`, only the routing counts.
  DistillRows rows;
};

// Makes rows in runs of one divergence.
inline Distillation MakeDistillation(int64_t num_rows, at::ScalarType dtype,
                                     Adapters student = Adapters::kNone,
                                     Adapters teacher = Adapters::kNone) {
  constexpr int64_t kRun = 3;
  Distillation made;
  made.teacher = MakeProblem(num_rows, dtype, teacher);
  made.student = MakeProblem(num_rows, dtype, student);
  made.student.hidden = at::randn({num_rows, kHidden}, at::kDouble).to(dtype);
  ScoreRows& scores = made.student.rows;
  scores.row_offsets = {0};
  scores.targets.clear();
  for (int64_t r = 0; r < num_rows; ++r) {
    scores.targets.push_back((r * 29) % kVocab);
    scores.row_offsets.push_back(r + 1);
    made.rows.divergences.push_back(
        AllDivergences()[r / kRun % AllDivergences().size()]);
  }
  made.student.g = at::randn({num_rows}, at::kFloat);
  made.rows.scores = scores;
  made.rows.teacher_routing = made.teacher.rows.routing;
  return made;
}

struct DistillOracle {
  Oracle scores;  // `logprobs` of the targets; gradients of the student.
  at::Tensor divergences;
  // The largest sum over the vocabulary of p |log p - log q|, at least 1. An
  // error of a logit changes a divergence by this many times as much, and dz.
  double spread = 1;
};

// Returns log-probabilities [R, V] in f64. Appends the leaves of the adapters.
inline at::Tensor DenseLogProbs(const Problem& problem,
                                const at::Tensor& hidden,
                                const std::vector<float>& temperatures,
                                double softcap,
                                std::vector<at::Tensor>& leaves) {
  at::Tensor z = hidden.matmul(problem.weight.to(at::kDouble).t());
  leaves = AddDenseLora(problem, hidden, z);
  if (softcap > 0) z = softcap * (z / softcap).tanh();
  return (z / at::tensor(temperatures).to(at::kDouble).unsqueeze(1))
      .log_softmax(1);
}

// Returns the definition of a row's divergence, [V] to a number.
inline at::Tensor DenseDivergence(const Divergence& divergence,
                                  const at::Tensor& lp, const at::Tensor& lq) {
  const at::Tensor p = lp.exp();
  const at::Tensor q = lq.exp();
  switch (divergence.function) {
    case LossFunction::kForwardKl:
      return (q * (lq - lp)).sum();
    case LossFunction::kReverseKl:
      return (p * (lp - lq)).sum();
    default: {
      const double beta = divergence.beta;
      const at::Tensor lm = (beta * q + (1 - beta) * p).log();
      return beta * (q * (lq - lm)).sum() + (1 - beta) * (p * (lp - lm)).sum();
    }
  }
}

inline DistillOracle DenseDistillation(const Distillation& made,
                                       double softcap) {
  const std::vector<float>& temperatures = made.rows.scores.temperatures;
  const Problem& student = made.student;
  at::Tensor hidden =
      student.hidden.to(at::kDouble).detach().clone().requires_grad_(true);
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> constants;
  const at::Tensor lp =
      DenseLogProbs(student, hidden, temperatures, softcap, leaves);
  Problem teacher = made.teacher;
  teacher.weight = student.weight;
  const at::Tensor lq = DenseLogProbs(teacher, teacher.hidden.to(at::kDouble),
                                      temperatures, softcap, constants)
                            .detach();
  std::vector<at::Tensor> rows;
  for (size_t r = 0; r < made.rows.divergences.size(); ++r) {
    const auto row = static_cast<int64_t>(r);
    rows.push_back(DenseDivergence(made.rows.divergences[r], lp[row], lq[row]));
  }
  const at::Tensor divergences =
      rows.empty() ? at::zeros({0}, at::kDouble) : at::stack(rows);
  if (!rows.empty()) {
    (divergences * student.g.to(at::kDouble)).sum().backward();
  }
  DistillOracle oracle;
  oracle.divergences = divergences.detach();
  oracle.scores = {
      lp.gather(1, at::tensor(made.rows.scores.targets, at::kLong).unsqueeze(1))
          .squeeze(1)
          .detach(),
      -(lp.exp() * lp).sum(1).detach(),
      hidden.grad().defined() ? hidden.grad() : at::zeros_like(hidden),
      {}};
  for (const at::Tensor& leaf : leaves) {
    oracle.scores.dadapters.push_back(leaf.defined() ? leaf.grad()
                                                     : at::Tensor());
  }
  if (!rows.empty()) {
    oracle.spread =
        std::max(1.0, (lp.exp() * (lp - lq)).abs().sum(1).max().item<double>());
  }
  return oracle;
}

inline DistillResult Compare(const Distillation& made,
                             const HeadOptions& options,
                             bool want_gradient = true) {
  return ScoreDistillation(made.student.hidden, made.teacher.hidden,
                           made.student.weight, made.rows, options,
                           want_gradient, /*want_entropy=*/true);
}

inline at::Tensor CompareBackward(const Distillation& made,
                                  DistillResult result,
                                  const HeadOptions& options) {
  return DistillBackward(std::move(result), made.student.hidden,
                         made.teacher.hidden, made.student.weight, made.rows,
                         options, made.student.g, made.student.gradients);
}

}  // namespace weft::loss

#endif  // WEFT_TESTS_LOSS_DISTILL_PROBLEM_H_
