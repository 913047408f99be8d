// The activations of a gated feed-forward layer. Torch-free.
#ifndef WEFT_SRC_OPS_ACTIVATION_H_
#define WEFT_SRC_OPS_ACTIVATION_H_

namespace weft::ops {

// kSilu is x sigmoid(x). kGeluTanh is the tanh form of GELU: x (1 + tanh(sqrt(2
// / pi) (x + 0.044715 x^3))) / 2.
enum class Activation { kSilu, kGeluTanh };

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ACTIVATION_H_
