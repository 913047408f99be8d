#include "src/ops/blocked_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/attention_blocks.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/matmul.h"
#include "src/ops/small_products.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {
namespace {

using kernels::cpu::kAttentionChunk;
using kernels::cpu::kSoftmaxPadding;
using kernels::cpu::SoftmaxKeys;

// The softmax of one query over a chunk of keys, in the type Real. Run does
// what softmax_row of kernels/cpu/kernels.h does, Gradient what
// softmax_gradient_row does, and Merge what lse_merge_rows does.
template <typename Real>
struct SoftmaxRow;

template <>
struct SoftmaxRow<float> {
  static kernels::cpu::SoftmaxSum Run(const SoftmaxKeys& keys, float softcap,
                                      float* scores) {
    return kernels::cpu::Kernels().softmax_row(keys, softcap, scores);
  }
  static void Gradient(const SoftmaxKeys& keys, float softcap, float lse,
                       float delta, float* scores, float* dweights) {
    kernels::cpu::Kernels().softmax_gradient_row(keys, softcap, lse, delta,
                                                 scores, dweights);
  }
  static void Merge(const float* part, const float* part_lse, int64_t rows,
                    int64_t features, float* out, float* lse) {
    kernels::cpu::Kernels().lse_merge_rows(part, part_lse, rows, features, out,
                                           lse);
  }
};

template <>
struct SoftmaxRow<double> {
  struct Sum {
    double factor = 0;
    double lse = -std::numeric_limits<double>::infinity();
  };

  static Sum Run(const SoftmaxKeys& keys, double softcap, double* scores) {
    double max = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      scores[i] = Capped(softcap, scores[i]);
      max = std::max(max, scores[i]);
    }
    for (int64_t i = 0; i < keys.size; ++i) {
      const bool seen = i >= keys.begin && i < keys.end;
      scores[i] = seen ? std::exp(scores[i] - max) : 0;
      total += scores[i];
    }
    if (keys.begin >= keys.end) return {};
    return {.factor = 1 / total, .lse = max + std::log(total)};
  }

  static void Gradient(const SoftmaxKeys& keys, double softcap, double lse,
                       double delta, double* scores, double* dweights) {
    for (int64_t i = 0; i < keys.size; ++i) {
      if (i < keys.begin || i >= keys.end) {
        scores[i] = dweights[i] = 0;
        continue;
      }
      const double capped = Capped(softcap, scores[i]);
      const double ratio = softcap > 0 ? capped / softcap : 0;
      scores[i] = std::exp(capped - lse);
      dweights[i] = scores[i] * (dweights[i] - delta) * (1 - ratio * ratio);
    }
  }

  static void Merge(const double* part, const double* part_lse, int64_t rows,
                    int64_t features, double* out, double* lse) {
    for (int64_t row = 0; row < rows; ++row) {
      if (std::isinf(part_lse[row])) continue;  // It sees no key of the part.
      if (std::isinf(lse[row])) {  // It saw none before, and may hold NaN.
        std::copy_n(part + row * features, features, out + row * features);
        lse[row] = part_lse[row];
        continue;
      }
      const double high = std::max(lse[row], part_lse[row]);
      const double both = high + std::log(std::exp(lse[row] - high) +
                                          std::exp(part_lse[row] - high));
      for (int64_t i = row * features; i < (row + 1) * features; ++i) {
        out[i] = out[i] * std::exp(lse[row] - both) +
                 part[i] * std::exp(part_lse[row] - both);
      }
      lse[row] = both;
    }
  }

 private:
  static double Capped(double softcap, double score) {
    return softcap > 0 ? softcap * std::tanh(score / softcap) : score;
  }
};

// Computes blocks of one call of BlockedAttention or BlockedAttentionBackward,
// one after another. Threads: each thread has its own object.
//
// Legend: N rows of a block, G query heads of a key head, M = G N rows of a
// product (head g of query i is row g N + i), S keys of a chunk, and the
// letters of tree_attention.h.
template <typename Real>
class BlockWorker {
 public:
  // Takes blocks of at most `block_rows` rows, with chunks of at most
  // `chunk_keys` keys, of which there is a whole number of vectors. `inputs`
  // outlives the object.
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
                bool adds, double alpha) {
    if constexpr (std::is_same_v<Real, float>) {
      panels_.Multiply(out, a, b, adds, alpha);
    } else {
      // If beta is 0, addmm_out does not read the old `out`.
      at::addmm_out(out, out, a, b, /*beta=*/adds ? 1 : 0, alpha);
    }
  }

  // Computes out = a b, or adds this product to out if `adds`, term by term. So
  // the bits do not depend on where keys are cut into pieces.
  void MultiplyInOrder(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                       bool adds) {
    if constexpr (std::is_same_v<Real, float>) {
      panels_.MultiplyInOrder(out, a, b, adds);
    } else {
      Multiply(out, a, b, adds, 1);
    }
  }

  // Computes a gradient of q, k or v: out = alpha a b, or adds this product to
  // out if `adds`. Uses bf16 if rounded_ is set. Other products never use bf16,
  // because the gradient of a score may be a small difference of large
  // products.
  void MultiplyGradient(const at::Tensor& out, const at::Tensor& a,
                        const at::Tensor& b, bool adds, double alpha) {
    if (rounded_.has_value()) {
      rounded_->Multiply(out, a, b, adds, alpha);
    } else {
      Multiply(out, a, b, adds, alpha);
    }
  }

  // Returns the block's rows of x, for the query heads of `kv_head`, as [M, C]:
  // a view if G is 1, otherwise a copy in `scratch_MC`.
  at::Tensor Gather(const at::Tensor& x_THC, const AttentionBlock& block,
                    int64_t kv_head, const at::Tensor& scratch_MC) const;

  // Returns rows of x for one key head, a view [S, C].
  static at::Tensor Keys(const at::Tensor& x_TKC, const RowRange& rows,
                         int64_t kv_head) {
    return x_TKC.select(1, kv_head).narrow(0, rows.begin, rows.size);
  }

  // Computes alpha a x^T for the chunk's keys x of one key head. The result
  // [M, S] is a view of `scratch_MS`.
  at::Tensor MultiplyKeys(const at::Tensor& a_MC, const at::Tensor& x_TKC,
                          const KeyChunk& chunk, int64_t kv_head, double alpha,
                          const at::Tensor& scratch_MS);

  // Returns the keys of the chunk that query i of the block sees. The last
  // query sees the keys before position `last` of the sequence.
  SoftmaxKeys VisibleKeys(const AttentionBlock& block, const KeyChunk& chunk,
                          int64_t last, int64_t i) const {
    const int64_t end = last - block.queries.size + i + 1 - chunk.first;
    const int64_t window = inputs_.rule.window;
    const int64_t begin = window > 0 ? end - window : 0;
    return {.begin = std::clamp<int64_t>(begin, 0, chunk.size),
            .end = std::clamp<int64_t>(end, 0, chunk.size),
            .size = chunk.size};
  }

  // Writes the attention of the block's queries q over one chunk.
  void AttendChunk(const AttentionBlock& block, int64_t kv_head,
                   const at::Tensor& q_MC, const KeyChunk& chunk,
                   at::Tensor out, Real* lse);

  // Copies the log-sum-exp of the block's rows to lse_, and writes the inner
  // products of out and dout to delta_.
  void ReadForward(const AttentionBlock& block, int64_t kv_head,
                   const at::Tensor& dout_MC, const AttentionOutput& forward);

  const AttentionInputs& inputs_;
  const int64_t group_;
  const int64_t features_;
  const int64_t chunk_keys_;
  const Real softcap_;
  at::Tensor q_MC_, out_MC_, scores_MS_;
  at::Tensor part_MC_;                // Only if a block has several chunks.
  at::Tensor dout_MC_, dweights_MS_;  // Only for the backward pass.
  std::vector<Real> lse_, part_lse_, factors_, delta_;
  PanelMultiplier panels_;
  // Set if MultiplyGradient computes in bf16 (AreBf16ProductsAllowed).
  std::optional<Bf16Multiplier> rounded_;
};

// A tensor [T, heads, C] with unit stride in C, or a tensor [T, heads].
template <typename Real>
struct HeadRows {
  explicit HeadRows(const at::Tensor& x_TMC)
      : data(x_TMC.mutable_data_ptr<Real>()),
        row_stride(x_TMC.stride(0)),
        head_stride(x_TMC.stride(1)) {}

  Real* At(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }

  Real* data;
  int64_t row_stride;
  int64_t head_stride;
};

template <typename Real>
Real* Data(const at::Tensor& x) {
  return x.mutable_data_ptr<Real>();
}

// Returns the most keys of a chunk of these blocks, rounded up to whole
// vectors.
int64_t ChunkKeys(const std::vector<AttentionBlock>& blocks) {
  int64_t longest = 0;
  for (const AttentionBlock& block : blocks) {
    longest = std::max(longest, block.num_keys());
  }
  return std::min(kAttentionChunk,
                  CeilDiv(longest, kSoftmaxPadding) * kSoftmaxPadding);
}

template <typename Real>
BlockWorker<Real>::BlockWorker(const AttentionInputs& inputs,
                               int64_t block_rows, int64_t chunk_keys)
    : inputs_(inputs),
      group_(inputs.q_THC.size(1) / inputs.k_TKC.size(1)),
      features_(inputs.q_THC.size(2)),
      chunk_keys_(chunk_keys),
      softcap_(static_cast<Real>(inputs.rule.softcap)) {
  const int64_t rows = group_ * block_rows;
  const auto options = inputs.q_THC.options();
  q_MC_ = at::empty({rows, features_}, options);
  out_MC_ = at::empty({rows, features_}, options);
  scores_MS_ = at::empty({rows, chunk_keys_}, options);
  lse_.resize(rows);
  part_lse_.resize(rows);
  factors_.resize(rows);
  delta_.resize(rows);
  if (AreBf16ProductsAllowed() && std::is_same_v<Real, float>) {
    rounded_.emplace();
  }
}

template <typename Real>
at::Tensor BlockWorker<Real>::Gather(const at::Tensor& x_THC,
                                     const AttentionBlock& block,
                                     int64_t kv_head,
                                     const at::Tensor& scratch_MC) const {
  if (group_ == 1) {
    return x_THC.select(1, kv_head)
        .narrow(0, block.queries.begin, block.queries.size);
  }
  const HeadRows<Real> x(x_THC);
  Real* const rows = Data<Real>(scratch_MC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(x.At(row, head), features_, rows + m * features_);
  });
  return scratch_MC.narrow(0, 0, group_ * block.queries.size);
}

template <typename Real>
at::Tensor BlockWorker<Real>::MultiplyKeys(const at::Tensor& a_MC,
                                           const at::Tensor& x_TKC,
                                           const KeyChunk& chunk,
                                           int64_t kv_head, double alpha,
                                           const at::Tensor& scratch_MS) {
  at::Tensor result =
      scratch_MS.narrow(0, 0, a_MC.size(0)).narrow(1, 0, chunk.size);
  for (const KeyChunk::Piece& piece : chunk.pieces) {
    Multiply(result.narrow(1, piece.column, piece.rows.size), a_MC,
             Keys(x_TKC, piece.rows, kv_head).t(), /*adds=*/false, alpha);
  }
  return result;
}

template <typename Real>
void BlockWorker<Real>::AttendChunk(const AttentionBlock& block,
                                    int64_t kv_head, const at::Tensor& q_MC,
                                    const KeyChunk& chunk, at::Tensor out,
                                    Real* lse) {
  const int64_t rows = q_MC.size(0), last = block.end_key();
  const at::Tensor scores = MultiplyKeys(q_MC, inputs_.k_TKC, chunk, kv_head,
                                         inputs_.rule.scale, scores_MS_);
  for (int64_t m = 0; m < rows; ++m) {
    const auto sum = SoftmaxRow<Real>::Run(
        VisibleKeys(block, chunk, last, m % block.queries.size), softcap_,
        Data<Real>(scores_MS_) + m * chunk_keys_);
    factors_[m] = sum.factor;
    lse[m] = sum.lse;
  }
  for (const KeyChunk::Piece& piece : chunk.pieces) {
    MultiplyInOrder(out, scores.narrow(1, piece.column, piece.rows.size),
                    Keys(inputs_.v_TKC, piece.rows, kv_head),
                    /*adds=*/piece.column > 0);
  }
  Real* const sums = Data<Real>(out);
  for (int64_t m = 0; m < rows; ++m) {
    Scale(sums + m * features_, factors_[m], sums + m * features_);
  }
}

template <typename Real>
void BlockWorker<Real>::Forward(const AttentionBlock& block, int64_t kv_head,
                                AttentionOutput& result) {
  const int64_t rows = group_ * block.queries.size;
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  const std::vector<KeyChunk> chunks = ChunksOf(block);
  AttendChunk(block, kv_head, q, chunks[0], out_MC_.narrow(0, 0, rows),
              lse_.data());
  Real* const outs = Data<Real>(out_MC_);
  for (size_t i = 1; i < chunks.size(); ++i) {
    if (!part_MC_.defined()) part_MC_ = at::empty_like(out_MC_);
    AttendChunk(block, kv_head, q, chunks[i], part_MC_.narrow(0, 0, rows),
                part_lse_.data());
    SoftmaxRow<Real>::Merge(Data<Real>(part_MC_), part_lse_.data(), rows,
                            features_, outs, lse_.data());
  }
  const HeadRows<Real> out(result.out_THC), lse(result.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(outs + m * features_, features_, out.At(row, head));
    *lse.At(row, head) = lse_[m];
  });
}

template <typename Real>
void BlockWorker<Real>::ReadForward(const AttentionBlock& block,
                                    int64_t kv_head, const at::Tensor& dout_MC,
                                    const AttentionOutput& forward) {
  const HeadRows<Real> outs(forward.out_THC);
  const HeadRows<Real> lse(forward.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    const Real* dout = Data<Real>(dout_MC) + m * dout_MC.stride(0);
    const Real* out = outs.At(row, head);
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < features_; ++c) sum += dout[c] * out[c];
    delta_[m] = sum;
    lse_[m] = *lse.At(row, head);
  });
}

template <typename Real>
void BlockWorker<Real>::Backward(const AttentionBlock& block, int64_t kv_head,
                                 const at::Tensor& dout_THC,
                                 const AttentionOutput& forward,
                                 at::Tensor& dq_THC, const at::Tensor& dk_TKC,
                                 const at::Tensor& dv_TKC) {
  const int64_t rows = group_ * block.queries.size, last = block.end_key();
  const double scale = inputs_.rule.scale;
  if (!dweights_MS_.defined()) {
    dout_MC_ = at::empty_like(q_MC_);
    dweights_MS_ = at::empty_like(scores_MS_);
  }
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  const at::Tensor dout = Gather(dout_THC, block, kv_head, dout_MC_);
  ReadForward(block, kv_head, dout, forward);
  at::Tensor dq = out_MC_.narrow(0, 0, rows);
  bool adds = false;
  for (const KeyChunk& chunk : ChunksOf(block)) {
    const at::Tensor weights =
        MultiplyKeys(q, inputs_.k_TKC, chunk, kv_head, scale, scores_MS_);
    const at::Tensor dscores = MultiplyKeys(dout, inputs_.v_TKC, chunk, kv_head,
                                            /*alpha=*/1, dweights_MS_);
    for (int64_t m = 0; m < rows; ++m) {
      SoftmaxRow<Real>::Gradient(
          VisibleKeys(block, chunk, last, m % block.queries.size), softcap_,
          lse_[m], delta_[m], Data<Real>(scores_MS_) + m * chunk_keys_,
          Data<Real>(dweights_MS_) + m * chunk_keys_);
    }
    for (const KeyChunk::Piece& piece : chunk.pieces) {
      const auto of_piece = [&](const at::Tensor& x_MS) {
        return x_MS.narrow(1, piece.column, piece.rows.size);
      };
      MultiplyGradient(Keys(dv_TKC, piece.rows, kv_head), of_piece(weights).t(),
                       dout, /*adds=*/true, 1);
      MultiplyGradient(Keys(dk_TKC, piece.rows, kv_head), of_piece(dscores).t(),
                       q, /*adds=*/true, scale);
      MultiplyGradient(dq, of_piece(dscores),
                       Keys(inputs_.k_TKC, piece.rows, kv_head), adds, scale);
      adds = true;
    }
  }
  const HeadRows<Real> dq_rows(dq_THC);
  const Real* const sums = Data<Real>(out_MC_);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(sums + m * features_, features_, dq_rows.At(row, head));
  });
}

constexpr int64_t kProductRows = 192;
constexpr int64_t kMinBlockRows = 16;
constexpr int64_t kMaxBlockRows = 128;
// The gradients of keys and values are sums over blocks. The blocks of a tree
// are divided into lanes. Each lane has its own sums, so that several threads
// can add at the same time.
constexpr int64_t kMaxLanes = 4;
constexpr int64_t kBlocksPerLane = 4;
// The number of multiplications q[c] * k[c] that is worth waking a thread.
constexpr int64_t kProductsPerThread = 1 << 20;

// Blocks that one thread computes in order, for one key head. In the backward
// pass, they are the blocks of one lane of a tree.
struct LaneTask {
  std::vector<const AttentionBlock*> blocks;
  int64_t lane = 0;
  int64_t kv_head = 0;
  int64_t products = 0;  // Queries times keys.
};

// Calls run(worker, task) once for every task. The more work there is, the more
// threads take part (kProductsPerThread). A free thread takes the next task, so
// long tasks should come first.
template <typename Real, typename Run>
void RunTasks(const std::vector<LaneTask>& tasks, const AttentionInputs& inputs,
              const std::vector<AttentionBlock>& blocks, const Run& run) {
  int64_t rows = 0, products = 0;
  for (const AttentionBlock& block : blocks) {
    rows = std::max(rows, block.queries.size);
  }
  for (const LaneTask& task : tasks) products += task.products;
  products *=
      inputs.q_THC.size(1) / inputs.k_TKC.size(1) * inputs.q_THC.size(2);
  const int64_t threads = std::min<int64_t>(
      {at::get_num_threads(), static_cast<int64_t>(tasks.size()),
       products / kProductsPerThread + 1});
  const int64_t chunk_keys = ChunkKeys(blocks);
  std::atomic<size_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    // The results may be inference tensors, which only a thread in inference
    // mode may write. Other threads do not inherit the caller's mode.
    const c10::InferenceMode guard;
    BlockWorker<Real> worker(inputs, rows, chunk_keys);
    for (size_t i = next++; i < tasks.size(); i = next++) {
      run(worker, tasks[i]);
    }
  });
}

// Returns a task for each lane of each tree and each key head, the longest task
// first. A tree has one lane per kBlocksPerLane blocks, but at least one and at
// most `max_lanes`.
std::vector<LaneTask> DealOut(const std::vector<AttentionBlock>& blocks,
                              int64_t max_lanes, int64_t kv_heads) {
  std::vector<LaneTask> tasks;
  for (size_t begin = 0; begin < blocks.size();) {
    size_t end = begin;
    while (end < blocks.size() && blocks[end].tree == blocks[begin].tree) ++end;
    const auto count = static_cast<int64_t>(end - begin);
    const int64_t lanes =
        std::clamp<int64_t>(count / kBlocksPerLane, 1, max_lanes);
    std::vector<LaneTask> tree(lanes);
    for (size_t i = begin; i < end; ++i) {
      LaneTask& task = tree[(i - begin) % lanes];
      task.lane = static_cast<int64_t>(i - begin) % lanes;
      task.blocks.push_back(&blocks[i]);
      task.products += blocks[i].queries.size * blocks[i].num_keys();
    }
    for (const LaneTask& task : tree) {
      for (int64_t k = 0; k < kv_heads; ++k) {
        tasks.push_back(task);
        tasks.back().kv_head = k;
      }
    }
    begin = end;
  }
  std::ranges::stable_sort(tasks, std::ranges::greater(), &LaneTask::products);
  return tasks;
}

template <typename Real>
void RunForward(const AttentionInputs& inputs,
                const std::vector<AttentionBlock>& blocks,
                AttentionOutput& result) {
  // Makes a task for each pair of a block and a key head.
  const int64_t kv_heads = inputs.k_TKC.size(1);
  std::vector<LaneTask> tasks;
  for (const AttentionBlock& block : blocks) {
    for (int64_t k = 0; k < kv_heads; ++k) {
      tasks.push_back({.blocks = {&block},
                       .kv_head = k,
                       .products = block.queries.size * block.num_keys()});
    }
  }
  std::ranges::stable_sort(tasks, std::ranges::greater(), &LaneTask::products);
  RunTasks<Real>(tasks, inputs, blocks,
                 [&](BlockWorker<Real>& worker, const LaneTask& task) {
                   worker.Forward(*task.blocks[0], task.kv_head, result);
                 });
}

template <typename Real>
void RunBackward(const at::Tensor& dout_THC, const AttentionInputs& inputs,
                 const AttentionOutput& forward,
                 const std::vector<AttentionBlock>& blocks,
                 AttentionGradients gradients) {
  const std::vector<LaneTask> tasks =
      DealOut(blocks, kMaxLanes, inputs.k_TKC.size(1));
  int64_t lanes = 1;
  for (const LaneTask& task : tasks) lanes = std::max(lanes, task.lane + 1);
  // Lane 0 adds to the gradients themselves. Each other lane has its own sums,
  // which are added to the gradients at the end.
  std::vector<at::Tensor> dk = {gradients.dk_TKC.zero_()};
  std::vector<at::Tensor> dv = {gradients.dv_TKC.zero_()};
  while (static_cast<int64_t>(dk.size()) < lanes) {
    dk.push_back(at::zeros(dk[0].sizes(), dk[0].options()));
    dv.push_back(at::zeros(dv[0].sizes(), dv[0].options()));
  }
  RunTasks<Real>(tasks, inputs, blocks,
                 [&](BlockWorker<Real>& worker, const LaneTask& task) {
                   for (const AttentionBlock* block : task.blocks) {
                     worker.Backward(*block, task.kv_head, dout_THC, forward,
                                     gradients.dq_THC, dk[task.lane],
                                     dv[task.lane]);
                   }
                 });
  for (int64_t lane = 1; lane < lanes; ++lane) {
    dk[0].add_(dk[lane]);
    dv[0].add_(dv[lane]);
  }
}

}  // namespace

bool BlockedSupports(const at::Tensor& q_THC) {
  return q_THC.is_cpu() && (q_THC.scalar_type() == at::kFloat ||
                            q_THC.scalar_type() == at::kDouble);
}

int64_t BlockRows(const AttentionInputs& inputs) {
  const int64_t group = inputs.q_THC.size(1) / inputs.k_TKC.size(1);
  return std::clamp(kProductRows / group, kMinBlockRows, kMaxBlockRows);
}

void BlockedAttention(const AttentionInputs& inputs,
                      const std::vector<AttentionBlock>& blocks,
                      AttentionOutput& result) {
  if (inputs.q_THC.scalar_type() == at::kDouble) {
    RunForward<double>(inputs, blocks, result);
  } else {
    RunForward<float>(inputs, blocks, result);
  }
}

void BlockedAttentionBackward(const at::Tensor& dout_THC,
                              const AttentionInputs& inputs,
                              const AttentionOutput& forward,
                              const std::vector<AttentionBlock>& blocks,
                              AttentionGradients gradients) {
  if (inputs.q_THC.scalar_type() == at::kDouble) {
    RunBackward<double>(dout_THC, inputs, forward, blocks, gradients);
  } else {
    RunBackward<float>(dout_THC, inputs, forward, blocks, gradients);
  }
}

int64_t BlockedBackwardBytes(int64_t num_rows, int64_t kv_width,
                             int64_t element_bytes) {
  return (kMaxLanes - 1) * 2 * num_rows * kv_width * element_bytes;
}

}  // namespace weft::ops
