// Legend: N rows of a block, G query heads of a key head, M = G N rows of a
// product (head g of query i is row g N + i), S keys of a chunk.
#include "src/ops/blocked_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/softmax_rows.h"

namespace weft::ops {
namespace {

// A chunk's scores stay in the cache of a core.
constexpr int64_t kChunkKeys = 512;
constexpr int64_t kProductRows = 192;
constexpr int64_t kMinBlockRows = 16;
constexpr int64_t kMaxBlockRows = 128;
// The gradients of keys are sums over blocks. The blocks of a tree are dealt out
// to lanes, so that several threads can add.
constexpr int64_t kMaxLanes = 4;
constexpr int64_t kBlocksPerLane = 4;

// A tensor [T, heads, C] with unit stride in C.
template <typename Real>
struct HeadRows {
  explicit HeadRows(const at::Tensor& x_TMC)
      : data(x_TMC.mutable_data_ptr<Real>()),
        row_stride(x_TMC.stride(0)),
        head_stride(x_TMC.stride(1)) {}

  [[nodiscard]] Real* At(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }

  Real* data;
  int64_t row_stride;
  int64_t head_stride;
};

// Consecutive keys of a block. `first` is the number of keys before them.
struct Chunk {
  RowRange rows;
  int64_t first = 0;
};

std::vector<Chunk> ChunksOf(const AttentionBlock& block) {
  std::vector<Chunk> chunks;
  int64_t first = 0;
  for (const RowRange& range : block.keys) {
    for (int64_t done = 0; done < range.size; done += kChunkKeys) {
      const int64_t size = std::min(kChunkKeys, range.size - done);
      chunks.push_back({{range.begin + done, size}, first});
      first += size;
    }
  }
  return chunks;
}

// Computes out = beta * out + alpha * a b. With beta 0 the old `out` is not read.
void Multiply(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
              double beta, double alpha) {
  at::addmm_out(out, out, a, b, beta, alpha);
}

// Computes blocks of one call, one after another. Threads: one has its own.
template <typename Real>
class BlockWorker {
 public:
  BlockWorker(const AttentionInputs& inputs, int64_t block_rows)
      : inputs_(inputs),
        group_(inputs.q_THC.size(1) / inputs.k_TKC.size(1)),
        features_(inputs.q_THC.size(2)),
        softcap_(static_cast<Real>(inputs.rule.softcap)) {
    const int64_t rows = group_ * block_rows;
    const auto options = inputs.q_THC.options();
    q_MC_ = at::empty({rows, features_}, options);
    sum_MC_ = at::empty({rows, features_}, options);
    dout_MC_ = at::empty({rows, features_}, options);
    scores_MS_ = at::empty({rows, kChunkKeys}, options);
    dweights_MS_ = at::empty({rows, kChunkKeys}, options);
    states_.resize(rows);
    lse_.resize(rows);
    delta_.resize(rows);
  }

  void Forward(const AttentionBlock& block, int64_t kv_head,
               AttentionOutput& result);

  // Adds to dk and dv [T, K, C], and writes the rows of dq.
  void Backward(const AttentionBlock& block, int64_t kv_head,
                const at::Tensor& dout_THC, const AttentionOutput& forward,
                at::Tensor& dq_THC, const at::Tensor& dk_TKC,
                const at::Tensor& dv_TKC);

 private:
  [[nodiscard]] static Real* Data(const at::Tensor& x) {
    return x.mutable_data_ptr<Real>();
  }

  // Writes to = from * factor, for one row [C].
  void Scale(const Real* from, Real factor, Real* to) const {
#pragma omp simd
    for (int64_t c = 0; c < features_; ++c) to[c] = from[c] * factor;
  }

  // Calls f(row of the product, row of the tensor, query head) for all rows.
  template <typename Function>
  void ForRows(const AttentionBlock& block, int64_t kv_head, Function f) const {
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t i = 0; i < block.queries.size; ++i) {
        f(g * block.queries.size + i, block.queries.begin + i,
          kv_head * group_ + g);
      }
    }
  }

  // Returns the block's rows of [T, H, C] as [M, C]: a view if there is one query
  // head, otherwise a copy in `scratch_MC`.
  [[nodiscard]] at::Tensor Gather(const at::Tensor& x_THC,
                                  const AttentionBlock& block, int64_t kv_head,
                                  const at::Tensor& scratch_MC) const;

  // Returns the rows of a chunk of [T, K, C] as [S, C].
  [[nodiscard]] static at::Tensor Keys(const at::Tensor& x_TKC,
                                       const Chunk& chunk, int64_t kv_head) {
    return x_TKC.select(1, kv_head).narrow(0, chunk.rows.begin,
                                           chunk.rows.size);
  }

  // Returns the keys of a chunk that query i of the block sees.
  [[nodiscard]] SoftmaxKeys VisibleKeys(const AttentionBlock& block,
                                        const Chunk& chunk, int64_t num_keys,
                                        int64_t i) const;

  // Reads the log-sum-exp of the block's rows, and computes the inner products
  // of outputs and their gradients.
  void ReadForward(const AttentionBlock& block, int64_t kv_head,
                   const at::Tensor& dout_THC, const AttentionOutput& forward);

  const AttentionInputs& inputs_;
  const int64_t group_;
  const int64_t features_;
  const Real softcap_;
  at::Tensor q_MC_, sum_MC_, dout_MC_, scores_MS_, dweights_MS_;
  std::vector<typename SoftmaxRow<Real>::State> states_;
  std::vector<Real> lse_, delta_;
};

template <typename Real>
at::Tensor BlockWorker<Real>::Gather(const at::Tensor& x_THC,
                                     const AttentionBlock& block,
                                     int64_t kv_head,
                                     const at::Tensor& scratch_MC) const {
  if (group_ == 1) {
    return x_THC.select(1, kv_head).narrow(0, block.queries.begin,
                                           block.queries.size);
  }
  const HeadRows<Real> x(x_THC);
  Real* const rows = Data(scratch_MC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(x.At(row, head), features_, rows + m * features_);
  });
  return scratch_MC.narrow(0, 0, group_ * block.queries.size);
}

template <typename Real>
SoftmaxKeys BlockWorker<Real>::VisibleKeys(const AttentionBlock& block,
                                           const Chunk& chunk,
                                           int64_t num_keys, int64_t i) const {
  const int64_t end = num_keys - block.queries.size + i + 1 - chunk.first;
  const int64_t window = inputs_.rule.window;
  const int64_t begin = window > 0 ? end - window : 0;
  const int64_t size = chunk.rows.size;
  return {.begin = std::clamp<int64_t>(begin, 0, size),
          .end = std::clamp<int64_t>(end, 0, size),
          .size = size};
}

template <typename Real>
void BlockWorker<Real>::Forward(const AttentionBlock& block, int64_t kv_head,
                                AttentionOutput& result) {
  const int64_t rows = group_ * block.queries.size;
  const int64_t num_keys = block.num_keys();
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  at::Tensor sum = sum_MC_.narrow(0, 0, rows);
  Real* const sums = Data(sum_MC_);
  Real* const score_rows = Data(scores_MS_);
  std::fill_n(states_.begin(), rows, typename SoftmaxRow<Real>::State());
  for (const Chunk& chunk : ChunksOf(block)) {
    at::Tensor scores =
        scores_MS_.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    Multiply(scores, q, Keys(inputs_.k_TKC, chunk, kv_head).t(), 0,
             inputs_.rule.scale);
    for (int64_t m = 0; m < rows; ++m) {
      const Real shrink = SoftmaxRow<Real>::Step(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size),
          softcap_, score_rows + m * kChunkKeys, &states_[m]);
      if (chunk.first == 0 || shrink == 1) continue;
      Scale(sums + m * features_, shrink, sums + m * features_);
    }
    Multiply(sum, scores, Keys(inputs_.v_TKC, chunk, kv_head),
             chunk.first == 0 ? 0 : 1, 1);
  }
  const HeadRows<Real> out(result.out_THC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    Scale(sums + m * features_, 1 / states_[m].sum, out.At(row, head));
  });
  if (!result.lse_TH.defined()) return;
  const HeadRows<Real> lse(result.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    *lse.At(row, head) = states_[m].max + std::log(states_[m].sum);
  });
}

template <typename Real>
void BlockWorker<Real>::ReadForward(const AttentionBlock& block,
                                    int64_t kv_head,
                                    const at::Tensor& dout_THC,
                                    const AttentionOutput& forward) {
  const HeadRows<Real> douts(dout_THC);
  const HeadRows<Real> outs(forward.out_THC);
  const HeadRows<Real> lse(forward.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    const Real* dout = douts.At(row, head);
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
  ReadForward(block, kv_head, dout_THC, forward);
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  const at::Tensor dout = Gather(dout_THC, block, kv_head, dout_MC_);
  at::Tensor dq = sum_MC_.narrow(0, 0, rows);
  Real* const score_rows = Data(scores_MS_);
  Real* const dweight_rows = Data(dweights_MS_);
  for (const Chunk& chunk : ChunksOf(block)) {
    const auto chunk_of = [&](const at::Tensor& x_MS) {
      return x_MS.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    };
    at::Tensor weights = chunk_of(scores_MS_);
    at::Tensor dscores = chunk_of(dweights_MS_);
    const at::Tensor k = Keys(inputs_.k_TKC, chunk, kv_head);
    Multiply(weights, q, k.t(), 0, scale);
    Multiply(dscores, dout, Keys(inputs_.v_TKC, chunk, kv_head).t(), 0, 1);
    for (int64_t m = 0; m < rows; ++m) {
      SoftmaxRow<Real>::Gradient(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size),
          softcap_, lse_[m], delta_[m], score_rows + m * kChunkKeys,
          dweight_rows + m * kChunkKeys);
    }
    Multiply(Keys(dv_TKC, chunk, kv_head), weights.t(), dout, 1, 1);
    Multiply(Keys(dk_TKC, chunk, kv_head), dscores.t(), q, 1, scale);
    Multiply(dq, dscores, k, chunk.first == 0 ? 0 : 1, scale);
  }
  const HeadRows<Real> dq_rows(dq_THC);
  const Real* const sums = Data(sum_MC_);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(sums + m * features_, features_, dq_rows.At(row, head));
  });
}

// Runs every task once on all threads. A free thread takes the next task, so
// long tasks should come first.
template <typename Worker, typename Task>
void RunTasks(const std::vector<Task>& tasks, const AttentionInputs& inputs,
              int64_t block_rows,
              const std::function<void(Worker&, const Task&)>& run) {
  std::atomic<size_t> next = 0;
  const auto threads = std::min<int64_t>(at::get_num_threads(),
                                         static_cast<int64_t>(tasks.size()));
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Worker worker(inputs, block_rows);
    for (size_t i = next++; i < tasks.size(); i = next++) {
      run(worker, tasks[i]);
    }
  });
}

// Blocks that one thread computes in order, for one key head.
struct LaneTask {
  std::vector<const AttentionBlock*> blocks;
  int64_t lane = 0;
  int64_t kv_head = 0;
  int64_t products = 0;  // Queries times keys.
};

// Returns the lanes of each tree, as many as the tree's blocks call for, for
// every key head.
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
  // Every block is a task of its own.
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
  RunTasks<BlockWorker<Real>, LaneTask>(
      tasks, inputs, BlockRows(inputs),
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
  // The first lane adds to the gradients themselves.
  std::vector<at::Tensor> dk = {gradients.dk_TKC.zero_()};
  std::vector<at::Tensor> dv = {gradients.dv_TKC.zero_()};
  while (static_cast<int64_t>(dk.size()) < lanes) {
    dk.push_back(at::zeros(dk[0].sizes(), dk[0].options()));
    dv.push_back(at::zeros(dv[0].sizes(), dv[0].options()));
  }
  RunTasks<BlockWorker<Real>, LaneTask>(
      tasks, inputs, BlockRows(inputs),
      [&](BlockWorker<Real>& worker, const LaneTask& task) {
        for (const AttentionBlock* block : task.blocks) {
          worker.Backward(*block, task.kv_head, dout_THC, forward,
                          gradients.dq_THC, dk[task.lane], dv[task.lane]);
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
