// Which rows and states the gated delta rule reads over prefix trees. Private
// to src/ops. Legend: that of gated_delta.h.
#ifndef WEFT_SRC_OPS_DELTA_PLAN_H_
#define WEFT_SRC_OPS_DELTA_PLAN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/cpu/gated_delta.h"
#include "src/ops/gated_delta.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {

// Rows [begin, end) of one node. `start` and `stop` are the indices of the
// states before and after them. -1: starts with zeros, or nothing follows. A
// state may be replaced in place (start == stop).
struct DeltaChunk {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t start = -1;
  int64_t stop = -1;
};

// Copies of a plan on the device. Undefined until a kernel needs them.
struct DeltaDevicePlan {
  at::Tensor earlier_TR;
  // [M, 4] and [trees + 1]. The states of a plan with slots are their slots.
  at::Tensor chunks_M4, tree_chunks;
  // The rows that read each row: those of row t have the numbers [offsets[t],
  // offsets[t + 1]) of later_N2, which has a row and its tap.
  at::Tensor offsets, later_N2;
};

struct DeltaPlan {
  // [T, R]: element r of row t is the row R - r steps before it on its path.
  // Before the first row of a root is row -1, which has zeros, or, if roots
  // continue sequences, row T + i R + r of sequence i's last R rows.
  std::vector<int64_t> earlier_TR;
  std::vector<DeltaChunk> chunks;    // In the order of their rows.
  std::vector<int64_t> tree_chunks;  // The first chunk of each root, and the
                                     // number of chunks.
  int64_t num_states = 0;
  // Only if roots continue sequences. last_QR [Q, R] has the R rows before the
  // row after each sequence, like earlier_TR. State i is at slots_Q[i] of all
  // states; the caller of PlanDelta sets it.
  std::vector<int64_t> last_QR;
  at::Tensor slots_Q;
  // What the kernels for CUDA read, made on the first use.
  mutable DeltaDevicePlan on_device;
};

DeltaPlan PlanDelta(const std::vector<AttentionNode>& nodes,
                    int64_t num_earlier, DeltaStateUse use);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_DELTA_PLAN_H_
