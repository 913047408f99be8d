// The adapters' part of a linear layer on CUDA: all segments, of any ranks and
// lengths, in a launch or two of kernels/cuda. Not there in a build without
// CUDA (src/ops/cuda_dispatch.h).
//
// Legend: as lora_linear.h. S: x A^T of all rows in one matrix [T, largest R],
// of which a segment has its rows and its first R columns.
#ifndef WEFT_SRC_LORA_LORA_CUDA_H_
#define WEFT_SRC_LORA_LORA_CUDA_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

struct CUstream_st;  // CUDA's stream.

namespace weft::lora::cuda {

// True for bf16 on CUDA, of the rows and of every segment's weights, with f32
// gradients.
[[nodiscard]] bool TakesSegments(const at::Tensor& x_TI,
                                 const LoraRouting& routing);

// The functions below queue their work on `stream` and wait for nothing. They
// throw c10::Error. Shapes: x_TI [T, I], y_TO [T, O] contiguous bf16.
// Threads: engine thread only.
// Source:  lora_linear.cc's own way; the tests compare both with f64.

// x A^T of every segment, views into one S; undefined where the adapter has
// nothing at the site.
[[nodiscard]] ShrunkInputs Shrink(const at::Tensor& x_TI,
                                  const LoraRouting& routing,
                                  const LoraSite& site, CUstream_st* stream);

// y += scale_a S B_a^T. `shrunk` comes from Shrink of the same routing.
void Expand(const ShrunkInputs& shrunk, const LoraRouting& routing,
            const LoraSite& site, const ModelShape& shape, at::Tensor& y_TO,
            CUstream_st* stream);

// Adds dLoss/dA and dLoss/dB to the segments' gradients, segment after segment
// where they share one, and, when dx_TI is defined, the adapters' part of
// dLoss/dx to it.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraRouting& routing, const LoraSite& site,
              const ModelShape& shape, const ShrunkInputs& shrunk,
              at::Tensor& dx_TI, CUstream_st* stream);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_CUDA_H_
