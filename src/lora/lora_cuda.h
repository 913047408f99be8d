// The adapters' part of linear layers on CUDA: all segments, of any ranks and
// lengths, in a launch of kernels/cuda. Not there in a build without
// CUDA (src/ops/cuda_dispatch.h).
//
// Legend: as lora_linear.h. S: x A^T of all rows in one matrix [T, largest R],
// of which a segment has its rows and its first R columns.
#ifndef WEFT_SRC_LORA_LORA_CUDA_H_
#define WEFT_SRC_LORA_LORA_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/lora_table_builder.h"
#include "src/lora/lora_linear.h"

struct CUstream_st;  // CUDA's stream.

namespace weft::kernels::cuda {
struct LoraProduct;  // lora_product.h.
}  // namespace weft::kernels::cuda

namespace weft::lora::cuda {

// True when the rows (`dtype`, `device`) and every segment's weights are bf16
// on CUDA; false without segments.
[[nodiscard]] bool TakesSegments(const LoraRouting& routing,
                                 at::ScalarType dtype, at::Device device);

// Where a routing's rows and matrices are, and the gradients that a backward
// pass adds to, on the device: one upload that all layers of a pass read. It
// points into weights and gradients, which must live as long as it is used; the
// addresses of its own arrays do not change. At most one pass that uses it runs
// at a time.
class RoutingTable {
 public:
  // Queues the upload on the current stream and waits for nothing. Gradients
  // that are not f32 throw c10::Error.
  RoutingTable(const LoraRouting& routing, const LoraGradients& gradients,
               const ModelShape& shape, at::Device device);
  RoutingTable(const RoutingTable&) = delete;
  RoutingTable& operator=(const RoutingTable&) = delete;
  ~RoutingTable() = default;

  [[nodiscard]] const kernels::cuda::LoraTable& table() const { return table_; }
  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  // Rows that the segments reach to.
  [[nodiscard]] int64_t end_row() const { return end_row_; }
  // What all products of a site's stacked A have in common, and what those of
  // its projections' B have.
  [[nodiscard]] kernels::cuda::LoraProduct ProductsOfA(
      const LoraSite& site) const;
  [[nodiscard]] kernels::cuda::LoraProduct ProductsOfB(
      const LoraSite& site) const;

 protected:
  // For a table whose bytes belong to somebody else.
  RoutingTable(const ModelShape& shape, std::vector<int32_t> max_ranks,
               int64_t end_row);

  // Null before there are any.
  [[nodiscard]] unsigned* Counters() const;

  ModelShape shape_;
  std::vector<int32_t> max_ranks_;  // The largest of a segment, by slot.
  int64_t end_row_;
  at::Tensor bytes_;
  // LoraCounters for every product, one launch after the other. A decode table
  // has no product that counts.
  at::Tensor counters_;
  kernels::cuda::LoraTable table_;
};

// What a table of one decode iteration has room for.
struct DecodeCapacity {
  int64_t rows = 0;     // All rows of the batch, with or without an adapter.
  int64_t layouts = 1;  // Configurations of adapters that differ.
  int64_t rank = 0;     // The largest of a factor.
};

// The routing of decode iterations, for forward passes without the head, at one
// place and of one size. Launches that were recorded with it in a LoraPass run
// again with whatever was written and uploaded there since. Grids, workspaces
// and the shape of S depend on the capacity alone; sites that no adapter has at
// the moment are launched too, and add nothing. All rows go through the kernels
// of few rows, however many rows an adapter has.
//
//   DecodeTable table(capacity, shape);      // Once.
//   table.Bind(device + offset);             // table.num_bytes() are there.
//   if (!table.Fits(routing)) ...            // Each iteration: otherwise.
//   table.Write(routing, pinned + offset);   // Then one upload of everything.
//
// Threads: engine thread only.
class DecodeTable : public RoutingTable {
 public:
  DecodeTable(const DecodeCapacity& capacity, const ModelShape& shape);

  [[nodiscard]] const DecodeCapacity& capacity() const { return capacity_; }
  [[nodiscard]] size_t num_bytes() const { return layout_.num_bytes(); }
  // Where the device has the bytes, a multiple of 16. Before the first pass.
  void Bind(const void* device) { table_ = layout_.At(device); }

  // True when it has room for the routing. An empty one fits: no row then has
  // an adapter. Says nothing of dtypes (TakesSegments) or the head.
  [[nodiscard]] bool Fits(const LoraRouting& routing) const;
  // The routing, which Fits, as bytes. Its weights must live until the device
  // has run what reads them.
  // Shapes: host num_bytes().
  void Write(const LoraRouting& routing, std::span<std::byte> host) const;

 private:
  DecodeCapacity capacity_;
  kernels::cuda::LoraTableCapacity layout_;
};

// The functions below queue their work on `stream` and wait for nothing.
// Shapes:  x_TI [T, I], y_TO [T, O] contiguous bf16.
// Errors:  throw c10::Error.
// Threads: engine thread only.
// Source:  lora_linear.cc's own way and the stacked and masked form; the tests
//          compare all in f64.

// y += scale_a x A_a^T B_a^T: two launches for segments of at most 16 rows, and
// those of lora_product.h for longer ones. Returns S if `keeps_shrunk`;
// otherwise, and when no segment has anything at the site, it is undefined.
at::Tensor Forward(const at::Tensor& x_TI, const RoutingTable& table,
                   const LoraSite& site, bool keeps_shrunk, at::Tensor& y_TO,
                   CUstream_st* stream);

// The S of Forward, without y.
[[nodiscard]] at::Tensor Shrink(const at::Tensor& x_TI,
                                const RoutingTable& table, const LoraSite& site,
                                CUstream_st* stream);

// Adds dLoss/dA and dLoss/dB to the table's gradients and, when dx_TI is
// defined, the adapters' part of dLoss/dx to it. Nothing for an undefined S.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_CUDA_H_
