// The matrix products of the head and of its LoRA. Private to src/loss.
//
// In all of src/loss, the head's weight may be in 8 bits (ops/int8_weight.h). V
// and H are then the sizes of the dequantized weight. Products dequantize to
// f32 on a CPU and to bf16 on CUDA. The logits of few rows on CUDA are an
// exception: their product does not round the dequantized weight
// (ops::Int8FewRows).
//
// Legend: R rows, H hidden, V vocabulary.
#ifndef WEFT_SRC_LOSS_HEAD_PRODUCTS_H_
#define WEFT_SRC_LOSS_HEAD_PRODUCTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::loss {

// Returns the dtype of logits, statistics and U: f64 for f64 weights, otherwise
// f32.
at::ScalarType HeadComputeType(const at::Tensor& weight_VH);

// Computes logits = hidden W^T, with sums in f32 or wider.
// Shapes: logits_RV in the compute type; the others as in ScoreHead.
void ComputeLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                   at::Tensor& logits_RV);

// Computes out = p W, which is a sum over the vocabulary.
// Shapes: out_RH in the compute type, and on a CPU p_RV too.
void ComputeProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                       at::Tensor& out_RH);

// Computes out = p W without blocks of small probabilities. A block of the
// vocabulary adds to a row only if one of the row's probabilities in the block
// is at least the row's filter [R], or is NaN.
// Source: the gradient filter of Wijmans et al. 2024, but by rows instead of
// tiles, so that a row's result does not depend on other rows.
void ComputeFilteredProjection(const at::Tensor& p_RV,
                               const at::Tensor& weight_VH,
                               const at::Tensor& filter_R, at::Tensor& out_RH);

// Computes LoRA of the output head, for one segment of score rows at a time,
// for the segments whose adapters adapt lm_head. An argument `segment` is an
// index in the routing.
//
// Legend: R score rows, but the LoRA rank in shrunk_nR, ds_nR and projected_nR;
// n rows of a segment, H hidden, V vocabulary, N parameters of an adapter. h is
// the hidden rows, z the logits, and p the softmax times the softcap's
// derivative. A is [rank, H], B is [V, rank]. Products are in the head's
// compute type.
class HeadLora {
 public:
  // Keeps a reference to `routing`.
  HeadLora(const lora::LoraRouting& routing, at::ScalarType compute_type);

  // Returns h A^T [n, rank] of every segment. The tensor is undefined if the
  // segment's adapter does not adapt lm_head.
  std::vector<at::Tensor> Shrink(const at::Tensor& hidden_RH) const;

  // Adds scale (h A^T) B^T to the logits of a chunk. `shrunk_nR` is h A^T of
  // every segment, and `chunk_begin` is the chunk's first row.
  void AddLogits(const std::vector<at::Tensor>& shrunk_nR, int64_t chunk_begin,
                 at::Tensor& logits_RV) const;

  // Writes p B of a chunk's rows to the tensors [n, rank] of their segments. If
  // a segment's tensor is undefined, allocates it.
  void Project(const at::Tensor& p_RV, int64_t chunk_begin,
               std::vector<at::Tensor>& projected_nR) const;

  // REQUIRES, for this method and the next three: Trains(segment).
  // Computes dhidden += scale ds A for the rows of a segment, where ds = dz B
  // [n, rank].
  void AddGradientOfHidden(size_t segment, const at::Tensor& ds_nR,
                           at::Tensor& dhidden_RH) const;
  // Computes dA += scale ds^T h in `gradient_N`, which belongs to the segment's
  // version.
  void AddGradientOfA(size_t segment, const at::Tensor& ds_nR,
                      const at::Tensor& hidden_RH,
                      const at::Tensor& gradient_N) const;
  // Computes dB += scale dz^T (h A^T) in `gradient_N`. dz_RV has consecutive
  // rows of the segment, of which `begin` is the first.
  void AddGradientOfB(size_t segment, const at::Tensor& dz_RV, int64_t begin,
                      const at::Tensor& shrunk_nR,
                      const at::Tensor& gradient_N) const;

  // Returns B of a segment in the compute type.
  at::Tensor B(size_t segment) const;
  // Returns whether the segment's adapter adapts lm_head.
  bool Trains(size_t segment) const;

 private:
  // The rows of a segment that are also rows of a chunk.
  struct Overlap {
    size_t segment = 0;
    int64_t begin = 0;
    int64_t count = 0;
  };
  std::vector<Overlap> OverlapsOf(int64_t chunk_begin,
                                  int64_t chunk_rows) const;
  const lora::GroupLayout& Group(size_t segment) const;
  // Returns the head's factor. REQUIRES: Trains(segment).
  const lora::LoraFactor& Factor(size_t segment) const;
  at::Tensor A(size_t segment) const;

  const lora::LoraRouting& routing_;
  at::ScalarType compute_type_;
};

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_PRODUCTS_H_
