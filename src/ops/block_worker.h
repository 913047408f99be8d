// Computes attention block by block, for one thread. Private to
// blocked_attention.cc.
//
// Legend: N rows of a block, G query heads of a key head, M = G N rows of a
// product (head g of query i is row g N + i), S keys of a chunk, and the
// letters of tree_attention.h.
#ifndef WEFT_SRC_OPS_BLOCK_WORKER_H_
#define WEFT_SRC_OPS_BLOCK_WORKER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "src/ops/attention_blocks.h"
#include "src/ops/bf16_multiplier.h"
#include "src/ops/panel_multiplier.h"
#include "src/ops/softmax_rows.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {

// Consecutive key rows of a block. `first` is the number of the block's keys
// before the chunk.
struct Chunk {
  RowRange rows;
  int64_t first = 0;
};

// Returns the number of keys of the longest chunk of these blocks, rounded up
// to whole vectors.
[[nodiscard]] int64_t ChunkKeys(const std::vector<AttentionBlock>& blocks);

// Computes blocks of one call of BlockedAttention or BlockedAttentionBackward,
// one after another. Threads: each thread has its own object.
template <typename Real>
class BlockWorker {
 public:
  // Takes blocks of at most `block_rows` rows, with chunks of at most
  // `chunk_keys` keys. `inputs` outlives the object.
  BlockWorker(const AttentionInputs& inputs, int64_t block_rows,
              int64_t chunk_keys);

  // Writes the output and the log-sum-exp of the block's rows, for the query
  // heads of `kv_head`.
  void Forward(const AttentionBlock& block, int64_t kv_head,
               AttentionOutput& result);

  // Adds the block's gradients to dk and dv, and writes the block's rows of dq,
  // for the query heads of `kv_head`.
  void Backward(const AttentionBlock& block, int64_t kv_head,
                const at::Tensor& dout_THC, const AttentionOutput& forward,
                at::Tensor& dq_THC, const at::Tensor& dk_TKC,
                const at::Tensor& dv_TKC);

 private:
  // Writes to = from * factor, for one row [C].
  void Scale(const Real* from, Real factor, Real* to) const {
#pragma omp simd
    for (int64_t c = 0; c < features_; ++c) to[c] = from[c] * factor;
  }

  // Calls f(row of the product, row of the tensor, query head) for each of the
  // block's rows and each query head of `kv_head`.
  template <typename Function>
  void ForRows(const AttentionBlock& block, int64_t kv_head, Function f) const {
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t i = 0; i < block.queries.size; ++i) {
        f(g * block.queries.size + i, block.queries.begin + i,
          kv_head * group_ + g);
      }
    }
  }

  // Computes out = alpha a b, or adds this product to out if `adds`, in the
  // dtype of the operands.
  void Multiply(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                bool adds, double alpha);

  // Computes a gradient of q, k or v: out = alpha a b, or adds this product to
  // out if `adds`. Uses bf16 if rounded_ is set. Other products never use bf16,
  // because the gradient of a score may be a small difference of large
  // products.
  void MultiplyGradient(const at::Tensor& out, const at::Tensor& a,
                        const at::Tensor& b, bool adds, double alpha);

  // Returns the block's rows of x, for the query heads of `kv_head`, as [M, C]:
  // a view if G is 1, otherwise a copy in `scratch_MC`.
  [[nodiscard]] at::Tensor Gather(const at::Tensor& x_THC,
                                  const AttentionBlock& block, int64_t kv_head,
                                  const at::Tensor& scratch_MC) const;

  // Returns the chunk's rows of x for one key head, a view [S, C].
  [[nodiscard]] static at::Tensor Keys(const at::Tensor& x_TKC,
                                       const Chunk& chunk, int64_t kv_head) {
    return x_TKC.select(1, kv_head)
        .narrow(0, chunk.rows.begin, chunk.rows.size);
  }

  // Returns the keys of the chunk that query i of the block sees. The block has
  // num_keys keys.
  [[nodiscard]] SoftmaxKeys VisibleKeys(const AttentionBlock& block,
                                        const Chunk& chunk, int64_t num_keys,
                                        int64_t i) const;

  // Copies the log-sum-exp of the block's rows to lse_, and writes the inner
  // products of out and dout to delta_.
  void ReadForward(const AttentionBlock& block, int64_t kv_head,
                   const at::Tensor& dout_MC, const AttentionOutput& forward);

  const AttentionInputs& inputs_;
  const int64_t group_;
  const int64_t features_;
  const int64_t chunk_keys_;
  const Real softcap_;
  at::Tensor q_MC_, sum_MC_, scores_MS_;
  at::Tensor dout_MC_, dweights_MS_;  // Only for the backward pass.
  std::vector<typename SoftmaxRow<Real>::State> states_;
  std::vector<Real> lse_, delta_;
  PanelMultiplier panels_;
  // Set if MultiplyGradient computes in bf16 (AreBf16ProductsAllowed).
  std::optional<Bf16Multiplier> rounded_;
};

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BLOCK_WORKER_H_
