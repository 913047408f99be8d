#include "src/ops/blocked_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>

#include "src/ops/block_worker.h"

namespace weft::ops {
namespace {

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
