// The adapters' part of linear layers on CUDA: all segments, of any ranks and
// lengths, in a launch of kernels/cuda. Not there in a build without
// CUDA (src/ops/cuda_dispatch.h).
//
// Legend: as lora_linear.h. S: x A^T of all rows in one matrix [T, largest R],
// of which a segment has its rows and its first R columns.
#ifndef WEFT_SRC_LORA_LORA_CUDA_H_
#define WEFT_SRC_LORA_LORA_CUDA_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/cuda/lora_table.h"
#include "src/lora/lora_linear.h"

struct CUstream_st;  // CUDA's stream.

namespace weft::lora::cuda {

// True for bf16 on CUDA, of the rows (`dtype`, `device`) and of every segment's
// weights, with f32 gradients; false without segments.
[[nodiscard]] bool TakesSegments(const LoraRouting& routing,
                                 at::ScalarType dtype, at::Device device);

// Where a routing's rows, matrices and gradients are, on the device: one upload
// that all layers of a pass read, forwards and backwards. Its pointers are
// those of the segments' tensors, which must live as long as it is used; its
// own do not change. Of passes that use it one runs at a time.
class RoutingTable {
 public:
  // Queues the upload on the current stream and waits for nothing.
  RoutingTable(const LoraRouting& routing, const ModelShape& shape,
               at::Device device);
  RoutingTable(const RoutingTable&) = delete;
  RoutingTable& operator=(const RoutingTable&) = delete;

  [[nodiscard]] const kernels::cuda::LoraTable& table() const { return table_; }
  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  // The largest rank that a segment has in a slot of the table.
  [[nodiscard]] int64_t MaxRank(int64_t slot) const { return max_ranks_[slot]; }
  // LoraCounters for every product of the table, one launch after the other.
  [[nodiscard]] unsigned* counters() const {
    return counters_.defined() ? static_cast<unsigned*>(counters_.data_ptr())
                               : nullptr;
  }
  // Rows that the segments reach to.
  [[nodiscard]] int64_t end_row() const { return end_row_; }

 private:
  // The slots of one adapter's matrices; also raises max_ranks_.
  std::vector<kernels::cuda::LoraMatrix> SlotsOf(const AdapterLayout& layout);

  ModelShape shape_;
  std::vector<int32_t> max_ranks_;
  int64_t end_row_;
  at::Tensor bytes_;
  at::Tensor counters_;
  kernels::cuda::LoraTable table_;
};

// The functions below queue their work on `stream` and wait for nothing. They
// throw c10::Error. Shapes: x_TI [T, I], y_TO [T, O] contiguous bf16.
// Threads: engine thread only.
// Source:  lora_linear.cc's own way and the stacked and masked form; the tests
//          compare all in f64.

// S = x A^T. Undefined when no segment has anything at the site.
[[nodiscard]] at::Tensor Shrink(const at::Tensor& x_TI,
                                const RoutingTable& table, const LoraSite& site,
                                CUstream_st* stream);

// y += scale_a S B_a^T. Nothing for an undefined S.
void Expand(const at::Tensor& s_TR, const RoutingTable& table,
            const LoraSite& site, at::Tensor& y_TO, CUstream_st* stream);

// Adds dLoss/dA and dLoss/dB to the segments' gradients and, when dx_TI is
// defined, the adapters' part of dLoss/dx to it. Nothing for an undefined S.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_CUDA_H_
