// The activations of a gated feed-forward layer. Torch-free.
#ifndef WEFT_SRC_OPS_ACTIVATION_H_
#define WEFT_SRC_OPS_ACTIVATION_H_

namespace weft::ops {

// kSilu is x sigmoid(x). kGeluTanh is the tanh form of GELU: x (1 + tanh(sqrt(2
// / pi) (x + 0.044715 x^3))) / 2. kClampedSilu (gpt-oss) is g sigmoid(1.702 g),
// where g = min(x, 7). The layer multiplies kSilu and kGeluTanh by `up`, the
// up projection, and kClampedSilu by clamp(up, -7, 7) + 1.
enum class Activation { kSilu, kGeluTanh, kClampedSilu };

inline constexpr double kClampedSiluLimit = 7;
inline constexpr double kClampedSiluSlope = 1.702;

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ACTIVATION_H_
