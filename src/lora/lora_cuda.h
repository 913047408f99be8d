// The adapters' part of linear layers on CUDA. A launch of kernels/cuda
// computes many segments, whatever their ranks. A build without CUDA does not
// have these functions (src/ops/cuda_dispatch.h).
//
// Legend: as in lora_linear.h. S is x A^T of all rows in one matrix [T, Rmax],
// where Rmax is the largest R. Each segment uses its rows and the first R
// columns.
#ifndef WEFT_SRC_LORA_LORA_CUDA_H_
#define WEFT_SRC_LORA_LORA_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/lora/lora_table_builder.h"
#include "src/lora/lora_linear.h"

struct CUstream_st;  // A CUDA stream.

namespace weft::kernels::cuda {
// lora_product.h defines LoraProduct and LoraProjection.
struct LoraProduct;
struct LoraProjection;
}  // namespace weft::kernels::cuda

namespace weft::lora::cuda {

// Returns whether the routing has segments, `device` is CUDA, and the rows
// (`dtype`) and all adapters' weights are bf16.
bool TakesSegments(const LoraRouting& routing, at::ScalarType dtype,
                   at::Device device);

// A routing in the device's memory. For each segment it has the rows, the
// address of the weights, and for a backward pass the address of the gradient.
// One upload serves all layers of a pass, with the shared experts. For the
// other experts it serves decode passes alone (OfExperts, ExpertTable). The
// weights and gradients outlive the table. Only one pass at a time may use the
// table.
class RoutingTable {
 public:
  // Queues the upload on the current stream and does not wait. `gradients` and
  // `decode` are as for MakeRoutingTable. Throws c10::Error on a CUDA
  // error, or if a gradient is not f32.
  RoutingTable(const LoraRouting& routing, const LoraGradients& gradients,
               const model_config::ModelShape& shape, at::Device device,
               bool decode = false);
  RoutingTable(const RoutingTable&) = delete;
  RoutingTable& operator=(const RoutingTable&) = delete;
  ~RoutingTable() = default;

  const kernels::cuda::LoraTable& table() const { return table_; }
  const model_config::ModelShape& shape() const { return shape_; }
  // Returns the smallest number of rows that x and y may have.
  int64_t end_row() const { return end_row_; }
  // Return the arguments of the products by a site's stacked A, or by the B of
  // its projections. The caller adds the operands. The site's expert is
  // kNoExpert or the shared one.
  kernels::cuda::LoraProduct ProductsOfA(const LoraSite& site) const;
  kernels::cuda::LoraProduct ProductsOfB(const LoraSite& site) const;

  // Returns whether the kernels for few rows compute all rows, as in a decode
  // pass.
  bool is_decode() const { return is_decode_; }
  // Returns the table of a layer's experts, for rows that the device sorted by
  // expert. Like an ExpertTable, it describes a one-layer model whose MLP is
  // one expert. Queues the launch that finds the rows' adapters on `stream`.
  // This launch and those of the result depend only on the number of rows and
  // on the capacity of this table. This table outlives the result.
  // REQUIRES: is_decode(); and before the first product with the result, the
  // caller queues an ordinary launch (lora_table.h).
  std::shared_ptr<const RoutingTable> OfExperts(int layer,
                                                const at::Tensor& experts_TK,
                                                const at::Tensor& pairs_N,
                                                CUstream_st* stream) const;

 protected:
  // Makes a table without layouts and segments. Leaves `bytes_`, `counters_`
  // and `table_` empty.
  RoutingTable(const model_config::ModelShape& shape, int64_t end_row);

  // Adds a layout to the builder. Updates max_ranks_ with the layout's ranks.
  void AddLayout(const std::vector<kernels::cuda::LoraMatrix>& slots,
                 kernels::cuda::LoraTableBuilder& builder);
  // Uploads the builder's table, after all layouts and segments are added.
  void Upload(kernels::cuda::LoraTableBuilder& builder, at::Device device);
  // Returns the address of `counters_`, or null if there are none.
  unsigned* Counters() const;
  const model_config::ModelShape& ShapeAt(const LoraSite& site) const {
    return site.expert == kNoExpert ? shape_ : shared_shape_;
  }

  model_config::ModelShape shape_;
  model_config::ModelShape shared_shape_;  // That of the shared expert.
  std::vector<int32_t> max_ranks_;         // The largest rank of each slot.
  int64_t end_row_;
  bool is_decode_ = false;
  at::Tensor bytes_;
  // Counters for the kernels (LoraCounters in lora_product.h). Launches use
  // them one after another. A DecodeTable has none.
  at::Tensor counters_;
  kernels::cuda::LoraTable table_;
};

// The largest number of row blocks in a table. A row block has up to
// kernels::cuda::kLoraBlockRows rows of a segment. The grid of RunLoraExpand
// has one y index for each row block.
inline constexpr int64_t kMaxExpertBlocks = 65535;
// Returns whether the segments have at most kMaxExpertBlocks row blocks.
bool FitsExpertTable(const ExpertRouting& routing);

// The RoutingTable for the experts of one layer. Each segment has rows of one
// adapter and one expert, so that one launch computes all experts.
//
// The table describes a one-layer model whose MLP is one expert. So the caller
// uses the sites of layer 0, and shape() is the shape of this model. In an
// adapter's buffer, the matrices of every expert of a layer have the same
// offsets from the expert's first matrix. So a segment has the address of its
// expert's first matrix, and all experts of an adapter share these offsets.
//
// No sum over features is split into parts. If the number of parts depended on
// the number of segments, the bits of an adapter's results would depend on
// other adapters. Also, the workspace for the parts of short segments would be
// larger than the rows of these segments.
class ExpertTable : public RoutingTable {
 public:
  // Queues the upload on the current stream and does not wait. `shape` is the
  // model's, and `gradients` are as for MakeExpertTable. Throws c10::Error on a
  // CUDA error, or if weights are not bf16 or a gradient is not f32.
  // REQUIRES: the routing has segments, and FitsExpertTable(routing).
  ExpertTable(const ExpertRouting& routing, int layer,
              const LoraGradients& gradients,
              const model_config::ModelShape& shape, at::Device device);
};

// The capacity of a DecodeTable.
struct DecodeCapacity {
  int64_t rows = 0;     // All rows of a batch, with or without adapters.
  int64_t layouts = 1;  // Number of distinct adapter layouts.
  int64_t rank = 0;     // The largest rank of a projection.
};

// The routing of decode steps, in a fixed place and with a fixed size. A caller
// can record the launches of a step, upload a new routing, and replay the
// launches. This works because grids, workspaces and the shape of S depend only
// on the capacity. The few-rows kernels compute all rows, even if an adapter
// has many rows. If no adapter adapts a site, the kernels still run there and
// add nothing. The table leaves out LoRA of the head.
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
  DecodeTable(const DecodeCapacity& capacity,
              const model_config::ModelShape& shape);

  const DecodeCapacity& capacity() const { return capacity_; }
  size_t num_bytes() const { return layout_.num_bytes(); }
  // Sets the device address of the table's bytes, a multiple of 16. Call it
  // before the first pass.
  void Bind(const void* device) { table_ = layout_.At(device); }

  // Returns whether the table has room for the routing. An empty routing fits.
  // Does not check dtypes (see TakesSegments) or adapters of the head.
  bool Fits(const LoraRouting& routing) const;
  // Writes the routing as bytes to `host`. The adapters' weights outlive the
  // launches that read the bytes. Throws c10::Error if the routing does not
  // fit, or if the size of `host` is not num_bytes().
  void Write(const LoraRouting& routing, std::span<std::byte> host) const;

 private:
  DecodeCapacity capacity_;
  kernels::cuda::LoraTableCapacity layout_;
};

// The functions below queue their work on `stream` and do not wait.
// Shapes:  x_TI [T, I], y_TO [T, O] contiguous bf16.
// Errors:  throw c10::Error.
// Threads: engine thread only.
// Source:  the path by at::mm in lora_linear.cc, and a product with stacked and
// masked adapters.

// Computes y += scale_a x A_a^T B_a^T. Two launches compute all segments of at
// most 16 rows, and in a decode pass all rows. The launches of lora_product.h
// compute the other segments. Returns S if `keeps_shrunk` and some adapter
// adapts the site; otherwise an undefined tensor.
at::Tensor Forward(const at::Tensor& x_TI, const RoutingTable& table,
                   const LoraSite& site, bool keeps_shrunk, at::Tensor& y_TO,
                   CUstream_st* stream);

// Returns the S of Forward without computing y.
at::Tensor Shrink(const at::Tensor& x_TI, const RoutingTable& table,
                  const LoraSite& site, CUstream_st* stream);

// Adds dLoss/dA and dLoss/dB to the table's gradients. If dx_TI is defined,
// adds the adapters' part of dLoss/dx to it. `s_TR` is the S of Forward. Does
// nothing if S is undefined.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const at::Tensor& s_TR, const RoutingTable& table,
              const LoraSite& site, at::Tensor& dx_TI, CUstream_st* stream);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_CUDA_H_
