// The adapters' part of linear layers in f32 on a CPU. A parallel loop goes
// over many segments of a batch, so that threads do not wait for each other
// after every segment.
//
// Legend: as in lora_linear.h. n counts the rows of a segment.
#ifndef WEFT_SRC_LORA_LORA_CPU_H_
#define WEFT_SRC_LORA_LORA_CPU_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/lora/lora_linear.h"

namespace weft::lora::cpu {

// Shapes:  x_TI [T, I] contiguous; y_TO and dy_TO [T, O] and dx_TI [T, I] with
// unit stride in the last dimension.
// Errors:  throw c10::Error.
// Threads: any, for distinct outputs.
// Source:  the path by at::mm in lora_linear.cc.

// Here `shrunk` is scale_a x A_a^T. So it is multiplied by B, and by dy, as it
// is.

// Computes y += (scale_a x A_a^T) B_a^T, and returns scale_a x A_a^T. If y_TO
// is undefined, computes only the latter. The bits of a row depend only on the
// row and its adapter.
ShrunkInputs Forward(const at::Tensor& x_TI, const LoraPass& pass,
                     const LoraSite& site, const at::Tensor& y_TO);

// Adds dLoss/dA and dLoss/dB to the gradients. If dx_TI is defined, adds the
// adapters' part of dLoss/dx to it. Each element of a gradient adds its rows
// one after another, in the order of the rows. So its bits depend only on the
// rows of its adapter, and not on how they are cut into batches.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraPass& pass, const LoraSite& site,
              const ShrunkInputs& shrunk, const LoraGradients& gradients,
              const at::Tensor& dx_TI);

// Adds dLoss/dA and dLoss/dB to the gradients. Returns ds = scale_a dy B_a [T,
// Rmax], where Rmax is the largest R of a segment. The rows of a segment use
// the first R columns; all other elements are zero.
at::Tensor AddGradients(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                        const LoraPass& pass, const LoraSite& site,
                        const ShrunkInputs& shrunk,
                        const LoraGradients& gradients);

// A matrix in f32. The elements of a row are adjacent.
struct Rows {
  float* data = nullptr;  // Null for an undefined tensor.
  int64_t stride = 0;

  Rows(float* first, int64_t row_stride) : data(first), stride(row_stride) {}
  explicit Rows(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.size(1) < 2 || tensor.stride(1) == 1,
                "the elements of a row are ", tensor.stride(1), " apart");
    data = tensor.data_ptr<float>();
    stride = tensor.stride(0);
  }

  // Returns the matrix that begins at this row and column.
  Rows From(int64_t row, int64_t column = 0) const {
    return {data + row * stride + column, stride};
  }
};

// Multiplies the first `columns` columns of the rows by `scale`.
void ScaleColumns(const Rows& rows, int64_t num_rows, int64_t columns,
                  double scale);

// Computes y += shrunk W, where W [rank, features] is packed in `panels`.
// Computes a few rows at a time, so that the processor reads and writes few
// memory streams at once.
inline void AddExpansion(const Rows& shrunk, int64_t rank, const float* panels,
                         int64_t num_rows, const Rows& y, int64_t features) {
  constexpr int64_t kStep = 8;
  for (int64_t row = 0; row < num_rows; row += kStep) {
    kernels::cpu::Kernels().panel_product(
        {.left_MK = shrunk.From(row).data,
         .m_stride = shrunk.stride,
         .right_KN = panels,
         .num_rows = std::min(kStep, num_rows - row),
         .num_terms = rank,
         .num_columns = features,
         .adds = true,
         .out_MN = y.From(row).data,
         .out_stride = y.stride});
  }
}

// Rows [begin, end) of the packed batch, which belong to one segment: the work
// of one thread.
struct RowChunk {
  size_t segment = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Appends the chunks of a segment to `chunks`, in the order of its rows.
void AddChunks(const LoraRouting& routing, size_t segment,
               std::vector<RowChunk>& chunks);

// The functions that ForEachChunk calls. `memory` belongs to the calling
// thread.
struct ChunkWork {
  int64_t num_floats = 0;  // The size of `memory`.
  // Before a thread runs its first chunk of a segment, the thread calls
  // `begin`.
  std::function<void(size_t segment, float* memory)> begin;
  std::function<void(size_t chunk, float* memory)> run;
};

// Calls work.run for the indices of all chunks, on the available threads. The
// chunks of a segment are adjacent in `chunks`.
void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work);

// Computes y += (scale_a x A_a^T) B_a^T on raw pointers, because a tensor
// operation for every adapter and projection would cost more than the products
// of few rows. Shapes: x_TI [T, I] contiguous.
void Add(const float* x_TI, const LoraRouting& routing, const LoraSite& site,
         const model_config::ModelShape& shape, const Rows& y_TO);

}  // namespace weft::lora::cpu

#endif  // WEFT_SRC_LORA_LORA_CPU_H_
