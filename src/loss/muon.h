// Muon for the LoRA matrices of one adapter.
// Legend: N parameters of the adapter.
#ifndef WEFT_SRC_LOSS_MUON_H_
#define WEFT_SRC_LOSS_MUON_H_

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "src/lora/adapter_layout.h"
#include "src/request/train.h"

namespace weft::loss {

// Makes one part of a Muon step: call it with `part` 0, 1 and so on, until it
// returns true. A part takes about 0.3 s at most on one core, unless a single
// matrix takes longer. The last part also writes momentum_N and weights_out_N;
// until then, gradient_N and momentum_N must stay, and update_N, too.
//
// The step is that of torch.optim.Muon with the adjustment "match_rms_adamw".
// It multiplies the gradient g that it reads by GradientScale (adamw.h). For
// each matrix A and B of the layout, by itself:
//   m = momentum * m + (1 - momentum) * g
//   u = (1 - momentum) * g + momentum * m    with nesterov, otherwise m
//   x = u / max(|u|, 1e-7)                   |u| is the Frobenius norm
//   x = 3.4445 x - 4.7750 (x x^T) x + 2.0315 (x x^T)^2 x     ns_steps times
//   weights_out = weights * (1 - lr * decay)
//                 - lr * 0.2 * sqrt(max(rows, columns)) * x
// x has the singular vectors of u, and singular values near 1. The factor
// before x gives an element of the update a root mean square near 0.2 lr, as in
// a step of AdamW. So A [r, n] and B [n, r] move alike, and learning rates of
// AdamW serve. A matrix whose momentum is zero only decays.
//
// The iteration runs on x x^T, or on x^T x if a matrix has more rows than
// columns: it is at most [r, r]. In exact arithmetic this gives the same x:
// every step multiplies x by a polynomial of x x^T, and the polynomials
// commute, so their product is multiplied with u once. x x^T is f64, because
// each step may multiply the rounding error of a small eigenvalue by 12.
//
// Shapes:  all [N] f32 contiguous on one device; f64 for tests. update_N is
//          work space. weights_out_N may be weights_N itself.
// Units:   memory beside the arguments: three times the matrices of a product,
//          which have at most 4M elements, or are one larger matrix, and four
//          products in f64. Time on two cores of an EPYC: 0.2 s for 20M
//          parameters of rank 32, 0.5 s for 42M of rank 16, 4 s for 81M of rank
//          128; AdamW takes 16, 76 and 118 ms.
// Errors:  throws c10::Error, and changes nothing but update_N.
// Threads: engine thread only.
// Source:  Keller Jordan et al. 2024, "Muon: An optimizer for hidden layers in
//          neural networks"; the factor is that of Liu et al. 2025, "Muon is
//          scalable for LLM training".
[[nodiscard]] bool MuonPart(size_t part, const MuonConfig& config,
                            double grad_norm, const lora::AdapterLayout& layout,
                            const at::Tensor& weights_N,
                            const at::Tensor& gradient_N,
                            at::Tensor& momentum_N, at::Tensor& update_N,
                            at::Tensor& weights_out_N);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_MUON_H_
