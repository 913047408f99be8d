// LoRA of the output head, for one segment of score rows at a time. Private to
// src/loss.
//
// Legend: R score rows, but the LoRA rank in shrunk_nR, ds_nR and projected_nR;
// n rows of a segment, H hidden, V vocabulary, N parameters of an adapter. h is
// the hidden rows, z the logits, and p the softmax times the softcap's
// derivative. A is [rank, H], B is [V, rank]. Products are in the head's
// compute type.
#ifndef WEFT_SRC_LOSS_HEAD_LORA_H_
#define WEFT_SRC_LOSS_HEAD_LORA_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::loss {

// Computes the head's LoRA part for the segments whose adapters adapt lm_head.
// An argument `segment` is an index in the routing.
class HeadLora {
 public:
  // Keeps a reference to `routing`.
  HeadLora(const lora::LoraRouting& routing, at::ScalarType compute_type);

  // Returns h A^T [n, rank] of every segment. The tensor is undefined if the
  // segment's adapter does not adapt lm_head.
  [[nodiscard]] std::vector<at::Tensor> Shrink(
      const at::Tensor& hidden_RH) const;

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
  [[nodiscard]] at::Tensor B(size_t segment) const;
  // Returns whether the segment's adapter adapts lm_head.
  [[nodiscard]] bool Trains(size_t segment) const;

 private:
  // The rows of a segment that are also rows of a chunk.
  struct Overlap {
    size_t segment = 0;
    int64_t begin = 0;
    int64_t count = 0;
  };
  [[nodiscard]] std::vector<Overlap> OverlapsOf(int64_t chunk_begin,
                                                int64_t chunk_rows) const;
  [[nodiscard]] const lora::GroupLayout& Group(size_t segment) const;
  // Returns the head's factor. REQUIRES: Trains(segment).
  [[nodiscard]] const lora::LoraFactor& Factor(size_t segment) const;
  [[nodiscard]] at::Tensor A(size_t segment) const;

  const lora::LoraRouting& routing_;
  at::ScalarType compute_type_;
};

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_LORA_H_
