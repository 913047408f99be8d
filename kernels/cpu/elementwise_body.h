// Implements rotary_head, add_row, sigmoid_row, adamw, sum_of_squares and exp
// of kernels.h. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_ELEMENTWISE_BODY_H_
#define WEFT_KERNELS_CPU_ELEMENTWISE_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

void RotaryHead(float* x, const float* cos, const float* sin,
                int64_t half_features, bool inverse) {
  const float sign = inverse ? -1.0F : 1.0F;
  float* first = x;
  float* second = x + half_features;
  int64_t i = 0;
  for (; i + kWidth <= half_features; i += kWidth) {
    const Vec a = Load(first + i), b = Load(second + i);
    const Vec c = Load(cos + i), s = Load(sin + i) * sign;
    Store(first + i, a * c - b * s);
    Store(second + i, b * c + a * s);
  }
  for (; i < half_features; ++i) {
    const float a = first[i], b = second[i], s = sin[i] * sign;
    first[i] = a * cos[i] - b * s;
    second[i] = b * cos[i] + a * s;
  }
}

void AddRow(const float* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    Store(y + i, Load(y + i) + Load(x + i));
  for (; i < count; ++i) y[i] += x[i];
}

// Has one loop for whole and part vectors, so that an element has the same bits
// in both.
void SigmoidRow(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kWidth) {
    StoreFirst(y + i, Sigmoid(LoadFirst(x + i, count - i)), count - i);
  }
}

// Runs a plain loop, because the vector extension has no square root. The
// compiler vectorises the loop. Its iterations are independent, even if
// weights_out and `weights` are the same buffer.
void AdamW(const AdamWScalars& scalars, int64_t count, const float* weights,
           const float* gradient, float* moment1, float* moment2,
           float* weights_out) {
  const AdamWScalars k = scalars;
  WEFT_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * k.gradient_scale;
    const float m = moment1[i] * k.beta1 + g * k.one_minus_beta1;
    const float v = moment2[i] * k.beta2 + g * g * k.one_minus_beta2;
    const float deviation = __builtin_sqrtf(v) * k.inverse_sqrt_bias2 + k.eps;
    moment1[i] = m;
    moment2[i] = v;
    weights_out[i] = weights[i] * k.weight_scale - k.step_size * m / deviation;
  }
}

double SumOfSquares(const float* x, int64_t count) {
  typedef float HalfVec __attribute__((vector_size(kWidth * 2)));
  typedef double DoubleVec __attribute__((vector_size(kWidth * 4)));
  constexpr int64_t kHalf = kWidth / 2;
  DoubleVec sums[kUnroll] = {};
  int64_t i = 0;
  for (; i + kHalf * kUnroll <= count; i += kHalf * kUnroll) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      HalfVec part;
      __builtin_memcpy(&part, x + i + u * kHalf, sizeof(part));
      const DoubleVec wide = __builtin_convertvector(part, DoubleVec);
      sums[u] += wide * wide;
    }
  }
  const DoubleVec folded = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (int64_t lane = 0; lane < kHalf; ++lane) total += folded[lane];
  for (; i < count; ++i) total += static_cast<double>(x[i]) * x[i];
  return total;
}

void ExpAll(const float* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Store(y + i, Exp(Load(x + i)));
  if (const int64_t rest = count - i; rest > 0) {
    StorePart(y + i, Exp(LoadPart(x + i, rest, 0)), rest);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ELEMENTWISE_BODY_H_
