// Computes one output tile of a product on tensor cores, in steps along the
// depth. While a block multiplies one step, it copies the operands of later
// steps. The sums stay in registers.
//
// Legend: as in operand_tile.cuh.
#ifndef WEFT_KERNELS_CUDA_TILE_CUH_
#define WEFT_KERNELS_CUDA_TILE_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/operand_tile.cuh"

namespace weft::kernels::cuda {

// A thread's sums, in the layout of MultiplyAdd.
template <int kRowFragments, int kColumnFragments>
struct TileSums {
  float of[kRowFragments][kColumnFragments][4];
};

// A tile of kRows x kColumns sums. A step covers kDepth elements of the depth.
// Shared memory holds the operands of kStages steps. If kStages is 1, Multiply
// takes at most one step: end - begin <= kDepth.
template <int kRows, int kColumns, int kDepth, int kStages,
          bool kLeftDepthIsRows, bool kRightDepthIsRows>
struct Tile {
  // Up to 8 warps share the tile. Each warp computes a rectangle of at least 16
  // x 16 sums.
  static constexpr int kShort = kRows < kColumns ? kRows : kColumns;
  static constexpr int kLong = kRows < kColumns ? kColumns : kRows;
  static constexpr int kMostWarps = kShort * kLong / (kFragment * kFragment);
  static constexpr int kWarps = kMostWarps < 8 ? kMostWarps : 8;
  static constexpr int kMostAlong = kLong / kFragment;
  static constexpr int kWarpsAlong = kShort > 2 * kFragment ? (kWarps + 1) / 2
                                     : kWarps < kMostAlong  ? kWarps
                                                            : kMostAlong;
  static constexpr int kWarpsDown =
      kRows < kColumns ? kWarps / kWarpsAlong : kWarpsAlong;
  static constexpr int kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kWarpRows = kRows / kWarpsDown;
  static constexpr int kWarpColumns = kColumns / kWarpsAcross;
  static constexpr int kRowFragments = kWarpRows / kFragment;
  static constexpr int kColumnFragments = kWarpColumns / kChunk;
  static constexpr int64_t kFloats = int64_t{kRows} * kColumns;
  static_assert(kWarpRows % kFragment == 0 && kWarpColumns % kFragment == 0);

  using Left = OperandTile<kRows, kDepth, kLeftDepthIsRows, kThreads>;
  using Right = OperandTile<kColumns, kDepth, kRightDepthIsRows, kThreads>;
  struct Stage {
    Left left;
    Right right;
  };
  struct Memory {
    Stage stages[kStages];
  };
  using Sums = TileSums<kRowFragments, kColumnFragments>;

  static __device__ int FirstRow() {
    return WarpIndex() / kWarpsAcross * kWarpRows;
  }
  static __device__ int FirstColumn() {
    return WarpIndex() % kWarpsAcross * kWarpColumns;
  }

  // Adds the products of kFragment elements of the depth, from d on.
  static __device__ void MultiplyFragments(const Left& left, const Right& right,
                                           int d, Sums* sums) {
    unsigned rows[kRowFragments][4];
    unsigned columns[kColumnFragments / 2][4];
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
      left.template Load<true>(FirstRow() + i * kFragment, d, rows[i]);
    }
#pragma unroll
    for (int j = 0; j < kColumnFragments / 2; ++j) {
      right.template Load<false>(FirstColumn() + j * kFragment, d, columns[j]);
    }
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
        const unsigned column[2] = {columns[j / 2][j % 2 * 2],
                                    columns[j / 2][j % 2 * 2 + 1]};
        MultiplyAdd(rows[i], column, sums->of[i][j]);
      }
    }
  }

  static __device__ void MultiplyStage(const Stage& stage, Sums* sums) {
#pragma unroll
    for (int d = 0; d < kDepth; d += kFragment) {
      MultiplyFragments(stage.left, stage.right, d, sums);
    }
  }

  // Computes sums(i, j) = sum over d in [begin, end) of left(i, d) right(j, d).
  // The views begin at the tile's first outer index and at depth 0. `begin` is
  // a multiple of kDepth. `end` is the operands' depth or a multiple of kDepth.
  // All threads call it.
  static __device__ void Multiply(const MatrixView& left,
                                  const MatrixView& right, int begin, int end,
                                  Memory* memory, Sums* sums) {
    constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
    // A warp has no work if all its sums are beyond the operands.
    const bool has_sums =
        FirstRow() < (kLeftDepthIsRows ? left.num_columns : left.num_rows) &&
        FirstColumn() <
            (kRightDepthIsRows ? right.num_columns : right.num_rows);
    const bool left_is_aligned = left.IsAligned();
    const bool right_is_aligned = right.IsAligned();
    const int num_steps = (end - begin + kDepth - 1) / kDepth;
    const auto copy = [&](int step) {
      if (step < num_steps) {
        const int d = begin + step * kDepth;
        Stage& stage = memory->stages[step % kStages];
        stage.left.Copy(
            kLeftDepthIsRows ? left.Shifted(d, 0) : left.Shifted(0, d),
            left_is_aligned);
        stage.right.Copy(
            kRightDepthIsRows ? right.Shifted(d, 0) : right.Shifted(0, d),
            right_is_aligned);
      }
      EndCopyGroup();
    };
    for (int step = 0; step < kAhead; ++step) copy(step);
    *sums = {};
    for (int step = 0; step < num_steps; ++step) {
      WaitForCopies<kAhead - 1>();
      // After this barrier all threads see this step's operands. The copy below
      // may overwrite the previous step's operands, which no thread still uses.
      __syncthreads();
      copy(step + kAhead);
      if (has_sums) MultiplyStage(memory->stages[step % kStages], sums);
    }
  }

  // Calls run(row, column, sum, next) for each pair of adjacent sums of this
  // thread: `sum` is at (row, column), and `next` is at (row, column + 1).
  template <typename Run>
  static __device__ void ForPairs(const Sums& sums, Run run) {
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          run(FirstRow() + i * kFragment + half * 8 + Lane() / 4,
              FirstColumn() + j * kChunk + Lane() % 4 * 2,
              sums.of[i][j][2 * half], sums.of[i][j][2 * half + 1]);
        }
      }
    }
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_TILE_CUH_
