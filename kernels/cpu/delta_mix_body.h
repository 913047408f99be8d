// Implements delta_mix_row, delta_mix_backward_row, multiply_row and the gated
// norm of kernels.h. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_DELTA_MIX_BODY_H_
#define WEFT_KERNELS_CPU_DELTA_MIX_BODY_H_

#include "kernels/cpu/gated_delta.h"
#include "kernels/cpu/rms_norm_body.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Loads up to kWidth of the `rest` floats at p; other lanes get 0.
WEFT_INLINE Vec LoadUpTo(const float* p, int64_t rest) {
  return rest >= kWidth ? Load(p) : LoadPart(p, rest, 0);
}

WEFT_INLINE void StoreUpTo(float* p, Vec v, int64_t rest) {
  if (rest >= kWidth) {
    Store(p, v);
  } else {
    StorePart(p, v, rest);
  }
}

// Returns the convolution of up to kWidth of the `rest` features from i on.
WEFT_INLINE Vec Convolve(const DeltaMixRow& row, int64_t i, int64_t rest) {
  Vec sum = row.bias ? LoadUpTo(row.bias + i, rest) : Vec{};
  for (int64_t tap = 0; tap < row.num_taps; ++tap) {
    if (row.taps[tap] == nullptr) continue;
    sum = MultiplyAdd(LoadUpTo(row.weights + tap * row.num_features + i, rest),
                      LoadUpTo(row.taps[tap] + i, rest), sum);
  }
  return sum;
}

// Writes silu of the convolution of features [begin, end), and returns the sum
// of its squares.
WEFT_INLINE float ConvolveSilu(const DeltaMixRow& row, int64_t begin,
                               int64_t end, float* mixed) {
  Vec squares = {};
  for (int64_t i = begin; i < end; i += kWidth) {
    const Vec conv = Convolve(row, i, end - i);
    const Vec y = conv * Sigmoid(conv);
    squares += y * y;
    StoreUpTo(mixed + i, y, end - i);
  }
  return Sum(squares);
}

// Returns the features of q and k.
WEFT_INLINE int64_t NormedFeatures(const DeltaMixRow& row) {
  return 2 * row.num_key_heads * row.key_features;
}

WEFT_INLINE float ScaleOfHead(const DeltaMixRow& row, int64_t begin) {
  return begin < NormedFeatures(row) / 2 ? row.query_scale : 1.0F;
}

void MixDeltaRow(const DeltaMixRow& row, float* mixed) {
  const int64_t normed = NormedFeatures(row);
  for (int64_t begin = 0; begin < normed; begin += row.key_features) {
    const int64_t end = begin + row.key_features;
    const float squares = ConvolveSilu(row, begin, end, mixed);
    const float factor =
        ScaleOfHead(row, begin) / __builtin_sqrtf(squares + row.l2_eps);
    for (int64_t i = begin; i < end; i += kWidth) {
      StoreUpTo(mixed + i, LoadUpTo(mixed + i, end - i) * factor, end - i);
    }
  }
  static_cast<void>(ConvolveSilu(row, normed, row.num_features, mixed));
}

// Replaces the gradients d of features [begin, end) of silu(conv) by those of
// the convolution. If the features are a head of length 1 / inverse, d are the
// gradients of the normed head, y its features before the norm, and the slope
// is inverse^2 (d . y); otherwise inverse is 1 and slope is 0.
WEFT_INLINE void SiluGradient(const DeltaMixRow& row, int64_t begin,
                              int64_t end, float inverse, float slope,
                              float* d) {
  for (int64_t i = begin; i < end; i += kWidth) {
    const Vec conv = Convolve(row, i, end - i);
    const Vec sigmoid = Sigmoid(conv);
    const Vec dy =
        inverse * (LoadUpTo(d + i, end - i) - conv * sigmoid * slope);
    StoreUpTo(d + i, dy * sigmoid * (1.0F + conv * (1.0F - sigmoid)), end - i);
  }
}

void MixDeltaBackwardRow(const DeltaMixRow& row, float* d) {
  const int64_t normed = NormedFeatures(row);
  for (int64_t begin = 0; begin < normed; begin += row.key_features) {
    const int64_t end = begin + row.key_features;
    Vec squares = {}, dots = {};
    for (int64_t i = begin; i < end; i += kWidth) {
      const Vec conv = Convolve(row, i, end - i);
      const Vec y = conv * Sigmoid(conv);
      squares += y * y;
      dots += y * LoadUpTo(d + i, end - i);
    }
    const float square = 1.0F / (Sum(squares) + row.l2_eps);
    SiluGradient(row, begin, end,
                 ScaleOfHead(row, begin) * __builtin_sqrtf(square),
                 square * Sum(dots), d);
  }
  SiluGradient(row, normed, row.num_features, 1, 0, d);
}

void MultiplyRow(const float* x, const float* weight, int64_t count, bool adds,
                 float* y) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t rest = count - i;
    const Vec before = adds ? LoadUpTo(y + i, rest) : Vec{};
    StoreUpTo(
        y + i,
        MultiplyAdd(LoadUpTo(x + i, rest), LoadUpTo(weight + i, rest), before),
        rest);
  }
}

void GatedNormRow(const float* x, const float* z, const float* weight,
                  int64_t features, float eps, float* y) {
  const float inverse = InverseRms(x, features, eps);
  for (int64_t i = 0; i < features; i += kWidth) {
    const int64_t rest = features - i;
    const Vec gate = LoadUpTo(z + i, rest);
    StoreUpTo(y + i,
              LoadUpTo(x + i, rest) * inverse * LoadUpTo(weight + i, rest) *
                  (gate * Sigmoid(gate)),
              rest);
  }
}

// With n = x / rms and d = dy * weight * silu(z): dx = (d - n mean(d n)) / rms.
void GatedNormBackwardRow(const float* dy, const float* x, const float* z,
                          const float* weight, int64_t features, float eps,
                          float* dx, float* dz) {
  const float inverse = InverseRms(x, features, eps);
  Vec dots = {};
  for (int64_t i = 0; i < features; i += kWidth) {
    const int64_t rest = features - i;
    const Vec gate = LoadUpTo(z + i, rest);
    const Vec sigmoid = Sigmoid(gate);
    const Vec d = LoadUpTo(dy + i, rest) * LoadUpTo(weight + i, rest);
    const Vec n = LoadUpTo(x + i, rest) * inverse;
    const Vec dn = d * (gate * sigmoid);
    dots += dn * n;
    StoreUpTo(dx + i, dn, rest);
    StoreUpTo(dz + i, d * n * sigmoid * (1.0F + gate * (1.0F - sigmoid)), rest);
  }
  const float slope = Sum(dots) * inverse / static_cast<float>(features);
  WEFT_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < features; ++i) {
    dx[i] = (dx[i] - x[i] * slope) * inverse;
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_DELTA_MIX_BODY_H_
