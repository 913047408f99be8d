// Implements SwiGLU, GEGLU and the clamped SwiGLU of kernels.h. Compiled only
// in table_*.cc.
#ifndef WEFT_KERNELS_CPU_GATED_BODY_H_
#define WEFT_KERNELS_CPU_GATED_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_math.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// An activation has the form x sigmoid(z(x)) with x = Gate(gate), and is
// multiplied by Up(up). In SiLU and GELU, Gate and Up change nothing.
struct PlainInputs {
  static WEFT_INLINE Vec Gate(Vec gate) { return gate; }
  static WEFT_INLINE Vec Up(Vec up) { return up; }
  // GateGradient returns the gradient of `gate`, given the gradient d of
  // Gate(gate). UpGradient returns the gradient of `up`, given the gradient d
  // of Up(up).
  static WEFT_INLINE Vec GateGradient(Vec d, Vec /*gate*/) { return d; }
  static WEFT_INLINE Vec UpGradient(Vec d, Vec /*up*/) { return d; }
};

struct Silu : PlainInputs {  // z = x.
  static WEFT_INLINE Vec Z(Vec x) { return x; }
  static WEFT_INLINE Vec ZSlope(Vec /*x*/) { return Fill(1.0F); }
};

struct GeluTanh : PlainInputs {  // z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
  static constexpr float kLinear = 1.595769121605731F;
  static constexpr float kCubic = 0.071354816272600F;
  static WEFT_INLINE Vec Z(Vec x) { return x * (kLinear + kCubic * (x * x)); }
  static WEFT_INLINE Vec ZSlope(Vec x) {
    return kLinear + 3.0F * kCubic * (x * x);
  }
};

// z = 1.702 x with x = min(gate, 7); up becomes clamp(up, -7, 7) + 1.
struct ClampedSilu {
  static constexpr float kLimit = 7.0F;
  static constexpr float kSlope = 1.702F;
  static WEFT_INLINE Vec Gate(Vec gate) {
    return gate > kLimit ? Fill(kLimit) : gate;
  }
  static WEFT_INLINE Vec Up(Vec up) {
    const Vec below = up > kLimit ? Fill(kLimit) : up;
    return 1.0F + (below < -kLimit ? Fill(-kLimit) : below);
  }
  static WEFT_INLINE Vec GateGradient(Vec d, Vec gate) {
    return gate > kLimit ? Vec{} : d;
  }
  static WEFT_INLINE Vec UpGradient(Vec d, Vec up) {
    const Vec below = up > kLimit ? Vec{} : d;
    return up < -kLimit ? Vec{} : below;
  }
  static WEFT_INLINE Vec Z(Vec x) { return kSlope * x; }
  static WEFT_INLINE Vec ZSlope(Vec /*x*/) { return Fill(kSlope); }
};

template <typename Activation>
WEFT_INLINE Vec GatedValue(Vec gate, Vec up) {
  const Vec x = Activation::Gate(gate);
  return x * Sigmoid(Activation::Z(x)) * Activation::Up(up);
}

template <typename Activation>
void GatedRow(const float* gate, const float* up, int64_t features,
              float* out) {
  int64_t i = 0;
  for (; i + kWidth <= features; i += kWidth) {
    Store(out + i, GatedValue<Activation>(Load(gate + i), Load(up + i)));
  }
  if (const int64_t rest = features - i; rest > 0) {
    StorePart(out + i,
              GatedValue<Activation>(LoadPart(gate + i, rest, 0),
                                     LoadPart(up + i, rest, 0)),
              rest);
  }
}

struct GatedGradient {
  Vec gate;
  Vec up;
};

template <typename Activation>
WEFT_INLINE GatedGradient GatedSlope(Vec dout, Vec gate, Vec up) {
  const Vec x = Activation::Gate(gate);
  const Vec sigmoid = Sigmoid(Activation::Z(x));
  const Vec value = x * sigmoid;
  // The derivative of x s(z), where s is the sigmoid, is s + x s (1 - s) dz/dx.
  const Vec slope = sigmoid + value * (1.0F - sigmoid) * Activation::ZSlope(x);
  return {Activation::GateGradient(dout * Activation::Up(up) * slope, gate),
          Activation::UpGradient(dout * value, up)};
}

template <typename Activation>
void GatedBackwardRow(const float* dout, int64_t features, float* gate,
                      float* up) {
  int64_t i = 0;
  for (; i + kWidth <= features; i += kWidth) {
    const GatedGradient d =
        GatedSlope<Activation>(Load(dout + i), Load(gate + i), Load(up + i));
    Store(gate + i, d.gate);
    Store(up + i, d.up);
  }
  if (const int64_t rest = features - i; rest > 0) {
    const GatedGradient d = GatedSlope<Activation>(LoadPart(dout + i, rest, 0),
                                                   LoadPart(gate + i, rest, 0),
                                                   LoadPart(up + i, rest, 0));
    StorePart(gate + i, d.gate, rest);
    StorePart(up + i, d.up, rest);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_GATED_BODY_H_
