// Implements rms_norm_row and rms_norm_backward_row of kernels.h. Compiled only
// in table_*.cc.
#ifndef WEFT_KERNELS_CPU_RMS_NORM_BODY_H_
#define WEFT_KERNELS_CPU_RMS_NORM_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Returns 1 / sqrt(mean(x^2) + eps) of a row.
WEFT_INLINE float InverseRms(const float* x, int64_t features, float eps) {
  Vec sums[kUnroll] = {};
  int64_t i = 0;
  for (; i + kStride <= features; i += kStride) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const Vec v = Load(x + i + u * kWidth);
      sums[u] += v * v;
    }
  }
  for (; i + kWidth <= features; i += kWidth) {
    const Vec v = Load(x + i);
    sums[0] += v * v;
  }
  const Vec v = LoadPart(x + i, features - i, 0);
  sums[1] += v * v;
  const float total = Sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0F / __builtin_sqrtf(total / static_cast<float>(features) + eps);
}

void RmsNormRow(const float* x, const float* weight, int64_t features,
                float eps, float* y) {
  const float inverse = InverseRms(x, features, eps);
  int64_t i = 0;
  for (; i + kWidth <= features; i += kWidth) {
    Store(y + i, Load(x + i) * inverse * Load(weight + i));
  }
  for (; i < features; ++i) y[i] = x[i] * inverse * weight[i];
}

// Adds (d - n * mean(d * n)) / rms to dx, with rms = sqrt(mean(x^2) + eps), n =
// x / rms and d = dy * weight.
void RmsNormBackwardRow(const float* dy, const float* x, const float* weight,
                        int64_t features, float eps, float* dx) {
  const float inverse = InverseRms(x, features, eps);
  Vec dots[kUnroll] = {};
  int64_t i = 0;
  for (; i + kStride <= features; i += kStride) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const int64_t at = i + u * kWidth;
      dots[u] += Load(dy + at) * Load(weight + at) * Load(x + at);
    }
  }
  for (; i + kWidth <= features; i += kWidth) {
    dots[0] += Load(dy + i) * Load(weight + i) * Load(x + i);
  }
  const int64_t rest = features - i;
  dots[1] += LoadPart(dy + i, rest, 0) * LoadPart(weight + i, rest, 0) *
             LoadPart(x + i, rest, 0);
  const float dot = Sum((dots[0] + dots[1]) + (dots[2] + dots[3]));
  const float slope =
      dot * inverse * inverse * inverse / static_cast<float>(features);
  for (i = 0; i + kWidth <= features; i += kWidth) {
    const Vec d = Load(dy + i) * Load(weight + i);
    Store(dx + i, Load(dx + i) + (d * inverse - Load(x + i) * slope));
  }
  for (; i < features; ++i) {
    dx[i] += dy[i] * weight[i] * inverse - x[i] * slope;
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_RMS_NORM_BODY_H_
