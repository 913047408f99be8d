// The activations of kernels/cuda/gated_product.h, with their derivatives.
#ifndef WEFT_KERNELS_CUDA_GATED_PRODUCT_CUH_
#define WEFT_KERNELS_CUDA_GATED_PRODUCT_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/gated_product.h"

namespace weft::kernels::cuda {

// Each activation of a gate x is x sigmoid(z). SiLU has z = x. The tanh form of
// GELU has z = 2 sqrt(2 / pi) (x + 0.044715 x^3). The clamped SiLU first
// replaces x by min(x, 7), has z = 1.702 x, and replaces `up` by clamp(up, -7,
// 7) + 1.
inline constexpr float kGeluScale = 1.5957691216057308F;
inline constexpr float kGeluCubic = 0.044715F;
inline constexpr float kClampedSlope = 1.702F;
inline constexpr float kClampedLimit = 7.0F;

struct Gate {
  float value;
  float slope;
};

template <GateActivation kActivation>
__device__ Gate Activate(float x) {
  float z = x;
  float dz = 1;
  if constexpr (kActivation == GateActivation::kGeluTanh) {
    const float square = kGeluCubic * x * x;
    z = kGeluScale * x * (1 + square);
    dz = kGeluScale * (1 + 3 * square);
  }
  bool is_clamped = false;
  if constexpr (kActivation == GateActivation::kClampedSilu) {
    is_clamped = x > kClampedLimit;
    x = is_clamped ? kClampedLimit : x;  // Unlike fminf, keeps NaN.
    z = kClampedSlope * x;
    dz = kClampedSlope;
  }
  const float sigmoid = 1 / (1 + expf(-z));
  const float value = x * sigmoid;
  return {value, is_clamped ? 0.0F : sigmoid + value * (1 - sigmoid) * dz};
}

// Returns the factor that multiplies the activated gate, and the factor's
// derivative with respect to `up`.
template <GateActivation kActivation>
__device__ Gate Factor(float up) {
  if constexpr (kActivation != GateActivation::kClampedSilu) return {up, 1};
  if (up > kClampedLimit) return {kClampedLimit + 1, 0};
  if (up < -kClampedLimit) return {1 - kClampedLimit, 0};
  return {up + 1, 1};
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_GATED_PRODUCT_CUH_
