// Reads the weight for the kernel of Int8FewRows (int8_weight.h): copies groups
// ahead to shared memory, and loads them from there to registers.
#ifndef WEFT_KERNELS_CUDA_INT8_FEW_ROWS_CUH_
#define WEFT_KERNELS_CUDA_INT8_FEW_ROWS_CUH_

#include "kernels/cuda/int8_weight.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft::kernels::cuda::few_int8 {

// A tensor-core product has 16 outputs and 8 rows of x. Four products cover a
// group. In each group, lane 4 g + t loads the t-th 16 integers of outputs g
// and g + 8, and the same 16 inputs of row g of x. Both operands thus have
// their inputs in the same permuted order, which does not change the product.
inline constexpr int kTileOutputs = 16;
inline constexpr int kTileRows = 8;
inline constexpr int kGroup = static_cast<int>(cpu::kInt8Group);
static_assert(kGroup == 4 * kInt8Chunk);

// A lane's part of the warp's ring in shared memory. It holds the chunks that
// the lane has started to load. No lane reads another lane's chunks.
class ChunkRing {
 public:
  __device__ explicit ChunkRing(unsigned* warp_ring)
      : chunks_(reinterpret_cast<uint4*>(warp_ring) + Lane()) {}

  // Starts to load a chunk. A chunk that does not exist becomes 0.
  __device__ void Start(const int8_t* from, bool exists, int place) const {
    if (exists) {
      CopyAsync(from, kInt8Chunk, chunks_ + place * kWarp);
    } else {
      chunks_[place * kWarp] = {};
    }
  }
  // Reads a chunk whose copies are complete.
  __device__ Int8Chunk Read(int place) const {
    return {.whole = chunks_[place * kWarp]};
  }

 private:
  uint4* chunks_;
};

// A lane's part of the weight. Chunk i belongs to output Lane() / 4 + 8 i of
// the block. Offsets in the block's rows have 32 bits, to save registers.
template <typename S>
class LaneWeight {
 public:
  // `ring` is the warp's shared memory of S::kWarpWords words.
  __device__ LaneWeight(const Int8Weight& weight, unsigned* ring)
      : rows_(weight.rows_OB + blockIdx.x * S::kOutputs * weight.stride),
        stride_(static_cast<unsigned>(weight.stride)),
        inputs_(static_cast<int>(weight.inputs)),
        outputs_(static_cast<int>(weight.outputs - blockIdx.x * S::kOutputs) -
                 Lane() / 4),
        ring_(ring) {}

  __device__ int num_groups() const { return (inputs_ + kGroup - 1) / kGroup; }
  // Starts to load a group to a stage of the ring, if the group exists.
  __device__ void Start(int group, int stage) const {
    if (group < num_groups()) {
#pragma unroll
      for (int i = 0; i < S::kChunks; ++i) {
        ring_.Start(PlaceOf(i, group), Exists(i) && InputOf(group) < inputs_,
                    stage * S::kChunks + i);
      }
    }
    EndCopyGroup();
  }
  // Reads chunk i of a group from a stage whose copies are complete.
  __device__ Int8Chunk Read(int i, int stage) const {
    return ring_.Read(stage * S::kChunks + i);
  }
  // Loads the bits of a group's scales, or 0 if the group does not exist.
  __device__ void LoadScales(int group, unsigned (&scales)[S::kChunks]) const {
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i) {
      scales[i] = Exists(i) && group < num_groups()
                      ? ScaleBitsOf(rows_ + RowOf(i), inputs_, group)
                      : 0;
    }
  }

 private:
  __device__ bool Exists(int i) const { return i * kTileRows < outputs_; }
  __device__ unsigned RowOf(int i) const {
    return (Lane() / 4 + i * kTileRows) * stride_;
  }
  static __device__ int InputOf(int group) {
    return group * kGroup + Lane() % 4 * kInt8Chunk;
  }
  __device__ const int8_t* PlaceOf(int i, int group) const {
    return rows_ + (RowOf(i) + static_cast<unsigned>(InputOf(group)));
  }

  const int8_t* rows_;  // The block's rows of the weight.
  unsigned stride_;
  int inputs_;
  int outputs_;  // Number of outputs from the lane's first output on.
  ChunkRing ring_;
};

}  // namespace weft::kernels::cuda::few_int8

#endif  // WEFT_KERNELS_CUDA_INT8_FEW_ROWS_CUH_
