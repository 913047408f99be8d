// Weights of a small model in 8 bits, and the same weights dequantized.
#ifndef WEFT_TESTS_MODEL_INT8_WEIGHTS_H_
#define WEFT_TESTS_MODEL_INT8_WEIGHTS_H_

#include <ATen/ATen.h>

#include "src/model/decoder_weights.h"
#include "src/ops/int8_weight.h"
#include "tests/ops/quantized.h"

namespace weft::testing {

// Applies `change` to every matrix that MatrixFormat::kInt8 holds in 8 bits.
template <typename Change>
model::DecoderWeights WithMatrices(model::DecoderWeights w, Change change) {
  const auto replace = [&](at::Tensor& matrix) {
    if (matrix.defined()) matrix = change(matrix);
  };
  const bool tied = w.head_VH.is_same(w.embedding_VH);
  replace(w.embedding_VH);
  if (tied) {
    w.head_VH = w.embedding_VH;
  } else {
    replace(w.head_VH);
  }
  for (model::LayerWeights& layer : w.layers) {
    for (at::Tensor* matrix :
         {&layer.qkv.weight_OI, &layer.o.weight_OI, &layer.gate_up.weight_OI,
          &layer.down.weight_OI, &layer.experts.gate_up_GH,
          &layer.experts.down_DF, &layer.experts.shared_gate_up_S2H,
          &layer.experts.shared_down_HS}) {
      replace(*matrix);
    }
  }
  return w;
}

inline model::DecoderWeights Quantized(const model::DecoderWeights& weights) {
  return WithMatrices(weights, QuantizedRows);
}

inline model::DecoderWeights Widened(const model::DecoderWeights& weights) {
  return WithMatrices(weights, [](const at::Tensor& matrix) {
    return ops::Widened(matrix, at::kFloat);
  });
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_INT8_WEIGHTS_H_
