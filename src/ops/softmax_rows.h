// The softmax of one query over chunks of keys: by the CPU kernels for f32, and
// by plain loops for f64. Private to src/ops.
#ifndef WEFT_SRC_OPS_SOFTMAX_ROWS_H_
#define WEFT_SRC_OPS_SOFTMAX_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/kernels.h"

namespace weft::ops {

using kernels::cpu::SoftmaxKeys;

// Computes in the type Real. Step does what softmax_step_row of
// kernels/cpu/kernels.h does. Gradient does what softmax_gradient_row does.
template <typename Real>
struct SoftmaxRow;

template <>
struct SoftmaxRow<float> {
  using State = kernels::cpu::SoftmaxState;

  static float Step(const SoftmaxKeys& keys, float softcap, float* scores,
                    State* state) {
    return kernels::cpu::Kernels().softmax_step_row(keys, softcap, scores,
                                                    state);
  }
  static void Gradient(const SoftmaxKeys& keys, float softcap, float lse,
                       float delta, float* scores, float* dweights) {
    kernels::cpu::Kernels().softmax_gradient_row(keys, softcap, lse, delta,
                                                 scores, dweights);
  }
};

template <>
struct SoftmaxRow<double> {
  struct State {
    double max = -std::numeric_limits<double>::infinity();
    double sum = 0;
  };

  static double Step(const SoftmaxKeys& keys, double softcap, double* scores,
                     State* state) {
    const double before = state->max;
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      scores[i] = Capped(softcap, scores[i]);
      state->max = std::max(state->max, scores[i]);
    }
    if (keys.begin >= keys.end) {
      std::fill_n(scores, keys.size, 0.0);
      return 1;
    }
    const double shrink = std::exp(before - state->max);
    state->sum *= shrink;
    for (int64_t i = 0; i < keys.size; ++i) {
      const bool seen = i >= keys.begin && i < keys.end;
      scores[i] = seen ? std::exp(scores[i] - state->max) : 0;
      state->sum += scores[i];
    }
    return shrink;
  }

  static void Gradient(const SoftmaxKeys& keys, double softcap, double lse,
                       double delta, double* scores, double* dweights) {
    for (int64_t i = 0; i < keys.size; ++i) {
      if (i < keys.begin || i >= keys.end) {
        scores[i] = dweights[i] = 0;
        continue;
      }
      const double capped = Capped(softcap, scores[i]);
      const double ratio = softcap > 0 ? capped / softcap : 0;
      scores[i] = std::exp(capped - lse);
      dweights[i] = scores[i] * (dweights[i] - delta) * (1 - ratio * ratio);
    }
  }

 private:
  static double Capped(double softcap, double score) {
    return softcap > 0 ? softcap * std::tanh(score / softcap) : score;
  }
};

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_SOFTMAX_ROWS_H_
