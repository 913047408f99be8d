// Functions of kernels.h as plain loops in f64, for tests and benches.
#ifndef WEFT_TESTS_KERNELS_CPU_REFERENCE_H_
#define WEFT_TESTS_KERNELS_CPU_REFERENCE_H_

#include <cstddef>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu::reference {

std::vector<double> RmsNormRow(const std::vector<float>& x,
                               const std::vector<float>& weight, double eps);

// Returns dLoss/dx. The kernel adds it to dx instead.
std::vector<double> RmsNormBackwardRow(const std::vector<float>& dy,
                                       const std::vector<float>& x,
                                       const std::vector<float>& weight,
                                       double eps);

std::vector<double> RotaryHead(const std::vector<float>& x,
                               const std::vector<float>& cos,
                               const std::vector<float>& sin, bool inverse);

std::vector<double> SwiGluRow(const std::vector<float>& gate,
                              const std::vector<float>& up);

// Returns y [B, O] = x W^T + bias for x [B, I], weight W [O, I] and bias [O].
// An empty bias adds nothing.
std::vector<double> RowProduct(const std::vector<float>& x,
                               const std::vector<float>& weight,
                               const std::vector<float>& bias, size_t num_rows,
                               size_t num_outputs);

// Returns the product [M, N] of left [M, K] and right [K, N].
std::vector<double> Product(const std::vector<float>& left,
                            const std::vector<float>& right, size_t num_rows,
                            size_t num_columns);

struct GatedGradient {
  std::vector<double> gate;
  std::vector<double> up;
};
GatedGradient SwiGluBackwardRow(const std::vector<float>& dout,
                                const std::vector<float>& gate,
                                const std::vector<float>& up);

std::vector<double> GeGluRow(const std::vector<float>& gate,
                             const std::vector<float>& up);
GatedGradient GeGluBackwardRow(const std::vector<float>& dout,
                               const std::vector<float>& gate,
                               const std::vector<float>& up);

std::vector<double> ClampedSwiGluRow(const std::vector<float>& gate,
                                     const std::vector<float>& up);
GatedGradient ClampedSwiGluBackwardRow(const std::vector<float>& dout,
                                       const std::vector<float>& gate,
                                       const std::vector<float>& up);

struct VocabRow {
  std::vector<double> logprobs;  // One for every token of the vocabulary.
  std::vector<double> softmax;   // The softmax times the softcap's derivative.
  double entropy = 0;
};
VocabRow ScoreVocabRow(const std::vector<float>& logits, double softcap,
                       double temperature);

// The softmax of one query over the keys that it sees, and the gradients of its
// scores. The weights and gradients of other keys are 0.
struct SoftmaxRow {
  std::vector<double> weights;
  std::vector<double> dscores;
  double lse = 0;
};
// `dweights` is dLoss/dweights. `delta` is the sum of weights * dweights.
SoftmaxRow SoftmaxOfRow(const std::vector<float>& scores,
                        const std::vector<float>& dweights,
                        const SoftmaxKeys& keys, double softcap, double delta);

struct AdamWState {
  std::vector<double> weights;
  std::vector<double> moment1;
  std::vector<double> moment2;
};
AdamWState AdamW(const AdamWScalars& scalars, const AdamWState& before,
                 const std::vector<float>& gradient);

}  // namespace weft::kernels::cpu::reference

#endif  // WEFT_TESTS_KERNELS_CPU_REFERENCE_H_
