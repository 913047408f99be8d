// The decoder in textbook form: dense, in f64, differentiated by autograd. It
// is slow. It shares with src/ only the structs that it reads.
#ifndef WEFT_TESTS_MODEL_REFERENCE_DECODER_H_
#define WEFT_TESTS_MODEL_REFERENCE_DECODER_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/model/decoder_weights.h"
#include "src/model/packed_batch.h"
#include "src/model_config/model_config.h"

namespace weft::testing {

struct ReferenceResult {
  at::Tensor y_TH;                    // The output of the final norm.
  std::vector<at::Tensor> gradients;  // dLoss/dweights of each segment.
};

// Runs with a loss whose dLoss/dy is dy_TH.
ReferenceResult RunReference(const model_config::ModelConfig& config,
                             const model::DecoderWeights& weights,
                             const model::PackedBatch& batch,
                             const at::Tensor& dy_TH);

}  // namespace weft::testing

#endif  // WEFT_TESTS_MODEL_REFERENCE_DECODER_H_
