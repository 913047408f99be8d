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
#include "src/ops/matmul.h"
#include "src/ops/small_products.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {
namespace {

using kernels::cpu::SoftmaxKeys;

// The softmax of one query over chunks of keys, in the type Real. Step does
// what softmax_step_row of kernels/cpu/kernels.h does, Gradient what
// softmax_gradient_row does.
template <typename Real>
struct SoftmaxRow;

template <>
struct SoftmaxRow<float> {
  using State = kernels::cpu::SoftmaxState;

  static float Step(const SoftmaxKeys& keys, float softcap, float* scores,
                    State* state) {
    return kernels::cpu::Kernels().softmax_step_row(keys, softcap, scores,
                                                    state);
  }
  static void Gradient(const SoftmaxKeys& keys, float softcap, float lse,
                       float delta, float* scores, float* dweights) {
    kernels::cpu::Kernels().softmax_gradient_row(keys, softcap, lse, delta,
                                                 scores, dweights);
  }
};

template <>
struct SoftmaxRow<double> {
  struct State {
    double max = -std::numeric_limits<double>::infinity();
    double sum = 0;
  };

  static double Step(const SoftmaxKeys& keys, double softcap, double* scores,
                     State* state) {
    const double before = state->max;
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      scores[i] = Capped(softcap, scores[i]);
      state->max = std::max(state->max, scores[i]);
    }
    if (keys.begin >= keys.end) {
      std::fill_n(scores, keys.size, 0.0);
      return 1;
    }
    const double shrink = std::exp(before - state->max);
    state->sum *= shrink;
    for (int64_t i = 0; i < keys.size; ++i) {
      const bool seen = i >= keys.begin && i < keys.end;
      scores[i] = seen ? std::exp(scores[i] - state->max) : 0;
      state->sum += scores[i];
    }
    return shrink;
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

 private:
  static double Capped(double softcap, double score) {
    return softcap > 0 ? softcap * std::tanh(score / softcap) : score;
  }
};

// Returns the last `count` rows (or all, if fewer) of the path that leads from
// the root to `node` and ends before row `end`.
std::vector<RowRange> PathRows(const std::vector<AttentionNode>& nodes,
                               int64_t node, int64_t end, int64_t count) {
  std::vector<RowRange> ranges;
  while (node >= 0 && count > 0) {
    const int64_t size = std::min(count, end - nodes[node].begin);
    if (size > 0) ranges.push_back({end - size, size});
    count -= size;
    node = nodes[node].parent;
    if (node >= 0) end = nodes[node].end;
  }
  std::ranges::reverse(ranges);
  return ranges;
}

// A sequence has `keys` keys. Returns how many of them are seen by at least one
// of the sequence's last `rows` tokens.
int64_t VisibleKeys(int64_t keys, int64_t rows, int64_t window) {
  return window > 0 ? std::min(keys, rows + window - 1) : keys;
}

// Consecutive key rows of a block. `first` is the number of the block's keys
// before the chunk.
struct Chunk {
  RowRange rows;
  int64_t first = 0;
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
                bool adds, double alpha) {
    if constexpr (std::is_same_v<Real, float>) {
      panels_.Multiply(out, a, b, adds, alpha);
    } else {
      // If beta is 0, addmm_out does not read the old `out`.
      at::addmm_out(out, out, a, b, /*beta=*/adds ? 1 : 0, alpha);
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

  // Returns the chunk's rows of x for one key head, a view [S, C].
  static at::Tensor Keys(const at::Tensor& x_TKC, const Chunk& chunk,
                         int64_t kv_head) {
    return x_TKC.select(1, kv_head)
        .narrow(0, chunk.rows.begin, chunk.rows.size);
  }

  // Returns the keys of the chunk that query i of the block sees. The block has
  // num_keys keys.
  SoftmaxKeys VisibleKeys(const AttentionBlock& block, const Chunk& chunk,
                          int64_t num_keys, int64_t i) const {
    const int64_t end = num_keys - block.queries.size + i + 1 - chunk.first;
    const int64_t window = inputs_.rule.window;
    const int64_t begin = window > 0 ? end - window : 0;
    const int64_t size = chunk.rows.size;
    return {.begin = std::clamp<int64_t>(begin, 0, size),
            .end = std::clamp<int64_t>(end, 0, size),
            .size = size};
  }

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

// The most keys of a chunk, so that the chunk's scores stay in a core's cache.
constexpr int64_t kMaxChunkKeys = 512;

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

std::vector<Chunk> ChunksOf(const AttentionBlock& block) {
  std::vector<Chunk> chunks;
  int64_t first = 0;
  for (const RowRange& range : block.keys) {
    for (int64_t done = 0; done < range.size; done += kMaxChunkKeys) {
      const int64_t size = std::min(kMaxChunkKeys, range.size - done);
      chunks.push_back({{range.begin + done, size}, first});
      first += size;
    }
  }
  return chunks;
}

template <typename Real>
Real* Data(const at::Tensor& x) {
  return x.mutable_data_ptr<Real>();
}

// Returns the number of keys of the longest chunk of these blocks, rounded up
// to whole vectors.
int64_t ChunkKeys(const std::vector<AttentionBlock>& blocks) {
  int64_t longest = 0;
  for (const AttentionBlock& block : blocks) {
    for (const RowRange& range : block.keys) {
      longest = std::max(longest, range.size);
    }
  }
  constexpr int64_t kPadding = kernels::cpu::kSoftmaxPadding;
  return std::min(kMaxChunkKeys,
                  (longest + kPadding - 1) / kPadding * kPadding);
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
  sum_MC_ = at::empty({rows, features_}, options);
  scores_MS_ = at::empty({rows, chunk_keys_}, options);
  states_.resize(rows);
  lse_.resize(rows);
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
void BlockWorker<Real>::Forward(const AttentionBlock& block, int64_t kv_head,
                                AttentionOutput& result) {
  const int64_t rows = group_ * block.queries.size;
  const int64_t num_keys = block.num_keys();
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  at::Tensor sum = sum_MC_.narrow(0, 0, rows);
  Real* const sums = Data<Real>(sum_MC_);
  Real* const score_rows = Data<Real>(scores_MS_);
  std::fill_n(states_.begin(), rows, typename SoftmaxRow<Real>::State());
  for (const Chunk& chunk : ChunksOf(block)) {
    at::Tensor scores =
        scores_MS_.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    Multiply(scores, q, Keys(inputs_.k_TKC, chunk, kv_head).t(),
             /*adds=*/false, inputs_.rule.scale);
    for (int64_t m = 0; m < rows; ++m) {
      const Real shrink = SoftmaxRow<Real>::Step(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size), softcap_,
          score_rows + m * chunk_keys_, &states_[m]);
      if (chunk.first == 0 || shrink == 1) continue;
      Scale(sums + m * features_, shrink, sums + m * features_);
    }
    Multiply(sum, scores, Keys(inputs_.v_TKC, chunk, kv_head),
             /*adds=*/chunk.first > 0, 1);
  }
  const HeadRows<Real> out(result.out_THC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    Scale(sums + m * features_, 1 / states_[m].sum, out.At(row, head));
  });
  const HeadRows<Real> lse(result.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    *lse.At(row, head) = states_[m].max + std::log(states_[m].sum);
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
  const int64_t rows = group_ * block.queries.size;
  const int64_t num_keys = block.num_keys();
  const double scale = inputs_.rule.scale;
  if (!dweights_MS_.defined()) {
    dout_MC_ = at::empty_like(q_MC_);
    dweights_MS_ = at::empty_like(scores_MS_);
  }
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  const at::Tensor dout = Gather(dout_THC, block, kv_head, dout_MC_);
  ReadForward(block, kv_head, dout, forward);
  at::Tensor dq = sum_MC_.narrow(0, 0, rows);
  Real* const score_rows = Data<Real>(scores_MS_);
  Real* const dweight_rows = Data<Real>(dweights_MS_);
  for (const Chunk& chunk : ChunksOf(block)) {
    const auto chunk_of = [&](const at::Tensor& x_MS) {
      return x_MS.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    };
    at::Tensor weights = chunk_of(scores_MS_);
    at::Tensor dscores = chunk_of(dweights_MS_);
    const at::Tensor k = Keys(inputs_.k_TKC, chunk, kv_head);
    Multiply(weights, q, k.t(), /*adds=*/false, scale);
    Multiply(dscores, dout, Keys(inputs_.v_TKC, chunk, kv_head).t(),
             /*adds=*/false, 1);
    for (int64_t m = 0; m < rows; ++m) {
      SoftmaxRow<Real>::Gradient(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size), softcap_,
          lse_[m], delta_[m], score_rows + m * chunk_keys_,
          dweight_rows + m * chunk_keys_);
    }
    MultiplyGradient(Keys(dv_TKC, chunk, kv_head), weights.t(), dout,
                     /*adds=*/true, 1);
    MultiplyGradient(Keys(dk_TKC, chunk, kv_head), dscores.t(), q,
                     /*adds=*/true, scale);
    MultiplyGradient(dq, dscores, k, /*adds=*/chunk.first > 0, scale);
  }
  const HeadRows<Real> dq_rows(dq_THC);
  const Real* const sums = Data<Real>(sum_MC_);
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

int64_t AttentionBlock::num_keys() const {
  int64_t count = 0;
  for (const RowRange& range : keys) count += range.size;
  return count;
}

std::vector<AttentionBlock> TreeBlocks(const std::vector<AttentionNode>& nodes,
                                       int64_t window, int64_t max_rows) {
  std::vector<AttentionBlock> blocks;
  int64_t tree = -1;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].parent < 0) ++tree;
    for (int64_t row = nodes[i].begin; row < nodes[i].end; row += max_rows) {
      const int64_t size = std::min(max_rows, nodes[i].end - row);
      const int64_t keys =
          VisibleKeys(std::numeric_limits<int64_t>::max(), size, window);
      blocks.push_back(
          {.queries = {row, size},
           .keys = PathRows(nodes, static_cast<int64_t>(i), row + size, keys),
           .tree = tree});
    }
  }
  return blocks;
}

std::vector<AttentionBlock> SuffixBlocks(
    const std::vector<SuffixRows>& sequences, int64_t window,
    int64_t max_rows) {
  std::vector<AttentionBlock> blocks;
  int64_t tree = 0;
  for (const SuffixRows& rows : sequences) {
    for (int64_t row = 0; row < rows.q_size; row += max_rows) {
      const int64_t size = std::min(max_rows, rows.q_size - row);
      const int64_t end = rows.k_size - rows.q_size + row + size;
      const int64_t keys = VisibleKeys(end, size, window);
      blocks.push_back({.queries = {rows.q_begin + row, size},
                        .keys = {{rows.k_begin + end - keys, keys}},
                        .tree = tree});
    }
    ++tree;
  }
  return blocks;
}

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
