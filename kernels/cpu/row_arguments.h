// Arguments of the kernels over rows and elements; see kernels.h.
#ifndef WEFT_KERNELS_CPU_ROW_ARGUMENTS_H_
#define WEFT_KERNELS_CPU_ROW_ARGUMENTS_H_

#include <cstdint>

namespace weft::kernels::cpu {

// The options for one row of logits x. Its scores are z = softcap(x) /
// temperature.
struct VocabRowOptions {
  float softcap = 0;           // 0: none; else softcap * tanh(x / softcap).
  float temperature = 1;       // > 0.
  bool write_softmax = false;  // If true, overwrites the row by softmax(z) *
                               // softcap'(x).
};

// The buffer for a row of scores has room for SoftmaxKeys::size floats, rounded
// up to a multiple of this number, because kernels write whole vectors.
inline constexpr int64_t kSoftmaxPadding = 16;
// The keys of one query: element i of a row of `size` scores belongs to key i.
// The query sees only the keys [begin, end).
struct SoftmaxKeys {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size = 0;
};

// The softmax of one query over some keys: the factor that turns its weights
// into shares of 1, and the log-sum-exp of the softcapped scores.
struct SoftmaxSum {
  float factor = 0;
  float lse = -__builtin_inff();
};

// The constants of AdamW update number t. The first update has t = 1. The
// caller computes the constants.
struct AdamWScalars {
  float gradient_scale = 1;  // Multiplies the gradient, to clip it.
  float beta1 = 0;
  float one_minus_beta1 = 1;
  float beta2 = 0;
  float one_minus_beta2 = 1;
  float weight_scale = 1;        // 1 - lr * decay.
  float step_size = 0;           // lr / (1 - beta1^t).
  float inverse_sqrt_bias2 = 1;  // 1 / sqrt(1 - beta2^t).
  float eps = 0;
};

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_ROW_ARGUMENTS_H_
