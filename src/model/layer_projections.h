// The projections before and after attention, or before and after what replaces
// it.
//
// Legend: T packed tokens, H hidden, W the width of all input projections, or
// of the input of the output projection.
#ifndef WEFT_SRC_MODEL_LAYER_PROJECTIONS_H_
#define WEFT_SRC_MODEL_LAYER_PROJECTIONS_H_

#include <ATen/core/Tensor.h>

#include "src/model/layer.h"

namespace weft::model {

// Returns the input projections of stream.normed_TH, and frees it. `tape` may
// be null.
at::Tensor ProjectInputs(const Layer& layer, Stream& stream, const Pass& pass,
                         LayerTape* tape);
// Given the gradient of ProjectInputs' result, adds that of its input to d_TH,
// the gradient of the residual stream. The first layer does so only if an
// adapter trains the embedding. Adds to pass.gradients.
void ProjectInputsBackward(const Layer& layer, const at::Tensor& d_inputs_TW,
                           const BackwardPass& pass, const LayerTape& tape,
                           at::Tensor& d_TH);

// Returns the stream after attention. `attended_TW` is the input of the output
// projection. `tape` may be null.
Stream ProjectOutput(const Layer& layer, const at::Tensor& x_TH,
                     const at::Tensor& attended_TW, const Pass& pass,
                     LayerTape* tape);
// Returns the gradient of attended_TW, given d_TH, the gradient of the residual
// stream after attention. Adds to pass.gradients.
at::Tensor ProjectOutputBackward(const Layer& layer, const at::Tensor& d_TH,
                                 const at::Tensor& attended_TW,
                                 const BackwardPass& pass,
                                 const LayerTape& tape);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_LAYER_PROJECTIONS_H_
