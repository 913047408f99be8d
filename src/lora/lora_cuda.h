// The adapters' part of linear layers on CUDA. One launch of kernels/cuda
// computes all segments, whatever their ranks and lengths. A build without CUDA
// does not have these functions (src/ops/cuda_dispatch.h).
//
// Legend: as in lora_linear.h. S is x A^T of all rows in one matrix [T, largest
// R]; each segment uses its rows and its first R columns.
#ifndef WEFT_SRC_LORA_LORA_CUDA_H_
#define WEFT_SRC_LORA_LORA_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/lora_table_builder.h"
#include "src/lora/lora_linear.h"

struct CUstream_st;  // A CUDA stream.

namespace weft::kernels::cuda {
struct LoraProduct;  // Both are declared in lora_product.h.
struct LoraProjection;
}  // namespace weft::kernels::cuda

namespace weft::lora::cuda {

// Returns whether there are segments and all of them are bf16 on CUDA: their
// weights, and the rows, which have `dtype` and are on `device`.
[[nodiscard]] bool TakesSegments(const LoraRouting& routing,
                                 at::ScalarType dtype, at::Device device);

// A routing on the device: the places of its rows and matrices, and of the
// gradients to which a backward pass adds. One upload serves all layers of a
// pass. The table points into weights and gradients, which outlive it. The
// addresses of its own arrays do not change. Only one pass at a time may use
// it.
class RoutingTable {
 public:
  // Queues the upload on the current stream and does not wait. Throws
  // c10::Error if a gradient is not f32. `decode_rows` is as for
  // MakeRoutingTable.
  RoutingTable(const LoraRouting& routing, const LoraGradients& gradients,
               const ModelShape& shape, at::Device device,
               int64_t decode_rows = 0);
  RoutingTable(const RoutingTable&) = delete;
  RoutingTable& operator=(const RoutingTable&) = delete;
  ~RoutingTable() = default;

  [[nodiscard]] const kernels::cuda::LoraTable& table() const { return table_; }
  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  // Returns the end of the last segment's rows.
  [[nodiscard]] int64_t end_row() const { return end_row_; }
  // Returns the number of rows, if each has an entry of few rows; otherwise 0.
  [[nodiscard]] int64_t decode_rows() const { return decode_rows_; }
  // Returns the largest rank of a projection.
  [[nodiscard]] int64_t max_rank() const;
  // Returns the B of a module, also if no adapter has it.
  [[nodiscard]] kernels::cuda::LoraProjection ProjectionOf(
      const LoraSite& site, TargetModule module) const;
  // Arguments that all products of a site share: those by its stacked A, and
  // those by B of its projections.
  [[nodiscard]] kernels::cuda::LoraProduct ProductsOfA(
      const LoraSite& site) const;
  [[nodiscard]] kernels::cuda::LoraProduct ProductsOfB(
      const LoraSite& site) const;

 protected:
  // For a table whose bytes another object owns.
  RoutingTable(const ModelShape& shape, std::vector<int32_t> max_ranks,
               int64_t end_row, int64_t decode_rows);

  // Null if no product counts.
  [[nodiscard]] unsigned* Counters() const;

  ModelShape shape_;
  std::vector<int32_t> max_ranks_;  // Largest rank in each slot, over segments.
  int64_t end_row_;
  int64_t decode_rows_;
  at::Tensor bytes_;
  // LoraCounters that all products use, one launch after the other. A decode
  // table has none.
  at::Tensor counters_;
  kernels::cuda::LoraTable table_;
};

// The capacity of a table for decode iterations.
struct DecodeCapacity {
  int64_t rows = 0;     // Rows of the batch, with or without an adapter.
  int64_t layouts = 1;  // Number of distinct adapter layouts.
  int64_t rank = 0;     // The largest LoRA rank.
};

// The routing of decode iterations, at a fixed place and with a fixed size, for
// forward passes without the head. Recorded launches of a LoraPass with this
// table can be replayed after new content is uploaded. Grids, workspaces and
// the shape of S depend only on the capacity. Sites that no adapter has are
// launched too and add nothing. All rows use the kernels of few rows, even if
// an adapter has many rows. Every row of the capacity has an entry, also
// padding and rows without an adapter, because lora_decode.h computes all rows.
//
//   DecodeTable table(capacity, shape);      // Once.
//   table.Bind(device + offset);             // Needs table.num_bytes() there.
//   if (table.Fits(routing)) {               // In each iteration.
//     table.Write(routing, pinned + offset); // Then upload these bytes.
//   }
//
// Threads: engine thread only.
class DecodeTable : public RoutingTable {
 public:
  DecodeTable(const DecodeCapacity& capacity, const ModelShape& shape);

  [[nodiscard]] const DecodeCapacity& capacity() const { return capacity_; }
  [[nodiscard]] size_t num_bytes() const { return layout_.num_bytes(); }
  // Sets the device address of the table's bytes, a multiple of 16. Call it
  // before the first pass.
  void Bind(const void* device) { table_ = layout_.At(device); }

  // Returns whether the table has room for the routing. An empty routing fits.
  // Checks neither dtypes (see TakesSegments) nor the head.
  [[nodiscard]] bool Fits(const LoraRouting& routing) const;
  // Writes the routing as bytes. The routing's weights outlive the launches
  // that read the bytes. REQUIRES: Fits(routing), and `host` has num_bytes()
  // bytes.
  void Write(const LoraRouting& routing, std::span<std::byte> host) const;

 private:
  DecodeCapacity capacity_;
  kernels::cuda::LoraTableCapacity layout_;
};

// The functions below queue their work on `stream` and do not wait.
// Shapes:  x_TI [T, I], y_TO [T, O] contiguous bf16.
// Errors:  throw c10::Error.
// Threads: engine thread only.
// Source:  the other path in lora_linear.cc, and the stacked and masked form.
// The tests compare all three in f64.

// y += scale_a x A_a^T B_a^T. Segments of at most 16 rows take two launches
// together; longer ones take those of lora_product.h. Returns S if
// `keeps_shrunk` and some segment has the site; otherwise an undefined tensor.
at::Tensor Forward(const at::Tensor& x_TI, const RoutingTable& table,
                   const LoraSite& site, bool keeps_shrunk, at::Tensor& y_TO,
                   CUstream_st* stream);

// Returns the S of Forward without computing y.
[[nodiscard]] at::Tensor Shrink(const at::Tensor& x_TI,
                                const RoutingTable& table, const LoraSite& site,
                                CUstream_st* stream);

// Adds dLoss/dA and dLoss/dB to the table's gradients. If dx_TI is defined,
// adds the adapters' part of dLoss/dx to it. Does nothing if S is undefined.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_CUDA_H_
