// The output head of distillation: the divergence between the student's and a
// teacher's distribution over the whole vocabulary, for each row.
//
// Legend: R rows, H hidden, V vocabulary. h is the student's hidden rows
// [R, H], and W the head's weight [V, H].
//
// z = softcap(logits) / temperature, also for the teacher. With p = softmax(z)
// of the student, q that of the teacher and m = beta q + (1 - beta) p, a row's
// loss and its gradient dz are
//   forward KL  sum q (log q - log p)           p - q
//   reverse KL  sum p (log p - log q)           p (log p - log q - loss)
//   JS          beta KL(q | m)                  p (g - sum p g), with
//               + (1 - beta) KL(p | m)          g = (1 - beta) log(p / m)
//
// Forward, for each chunk of rows: the logits of both, in two buffers
// [chunk, V]; their log-softmax, in place; the row's sums; and, if a gradient
// is wanted, dz times the softcap's derivative D in place of the student's, and
// U = (dz * D) W [R, H], which is kept. Operations between are on blocks of few
// rows. So the head takes one buffer more than without a teacher, and the
// backward pass of rows without LoRA of lm_head is dh = w / temperature * U for
// the rows' weights w. Rows with such LoRA also keep (dz * D) B, and dB needs
// both logits again.
//
// Ranks that share the vocabulary exchange two log-sum-exps and up to four sums
// of each row.
// Source: GKD, Agarwal et al. 2024, for JS with beta.
#ifndef WEFT_SRC_LOSS_DISTILL_HEAD_H_
#define WEFT_SRC_LOSS_DISTILL_HEAD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"
#include "src/loss/fused_head.h"
#include "src/request/train.h"

namespace weft::loss {

struct Divergence {
  LossFunction function = LossFunction::kForwardKl;  // Or kReverseKl, kJs.
  double beta = 0.5;                                 // kJs only; in (0, 1).

  friend bool operator==(const Divergence&, const Divergence&) = default;
};

// The rows to compare. Each row has one target, and `scores` has no filters.
struct DistillRows {
  ScoreRows scores;  // Of the student.
  lora::LoraRouting teacher_routing;
  std::vector<Divergence> divergences;  // [R].
};

struct DistillResult {
  at::Tensor logprobs_R;     // Of the targets, under the student.
  at::Tensor divergences_R;  // f32, or f64 for f64 weights, as all others.
  at::Tensor entropies_R;    // The student's; undefined if not wanted.
  // Undefined without gradient. With a part of the vocabulary, U and
  // projected_nR are the rank's terms of sums over ranks.
  at::Tensor projection_RH;              // U.
  std::vector<at::Tensor> projected_nR;  // (dz * D) B of each segment.
  // What a second pass over the logits needs: h A^T of both, their log-sum-exp,
  // and the sum in dz.
  std::vector<at::Tensor> shrunk_nR;
  std::vector<at::Tensor> teacher_shrunk_nR;
  at::Tensor lse_R;
  at::Tensor teacher_lse_R;
  at::Tensor mean_R;
};

// Returns the bytes of the temporaries of ScoreDistillation, besides the two
// buffers, for f32 logits.
int64_t DistillBlockBytes(int64_t vocab, bool is_cpu);

// Compares the rows hidden_RH of the student with teacher_RH.
// Shapes:  both [R, H]; otherwise as ScoreHead, with weight, options and ranks.
// Errors:  throws c10::Error; std::exception if a rank is lost.
// Threads: engine thread only. Does not wait for the device.
DistillResult ScoreDistillation(const at::Tensor& hidden_RH,
                                const at::Tensor& teacher_RH,
                                const at::Tensor& weight_VH,
                                const DistillRows& rows,
                                const HeadOptions& options, bool want_gradient,
                                bool want_entropy);

// Returns dLoss/dhidden [R, H] in the dtype of hidden, for g_R =
// dLoss/ddivergence [R] f32. Adds the gradients of lm_head's LoRA of the
// student to `gradients` [N]. The other arguments are those of
// ScoreDistillation, which was called with want_gradient. Consumes `forward`.
// Errors and threads as there.
at::Tensor DistillBackward(DistillResult forward, const at::Tensor& hidden_RH,
                           const at::Tensor& teacher_RH,
                           const at::Tensor& weight_VH, const DistillRows& rows,
                           const HeadOptions& options, const at::Tensor& g_R,
                           const lora::LoraGradients& gradients);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_DISTILL_HEAD_H_
