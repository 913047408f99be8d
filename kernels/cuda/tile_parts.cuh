// Adds up partial sums of a tile. Several blocks may compute the same tile,
// each over a part of the depth. A tile is a rectangle of a matrix product's
// output.
#ifndef WEFT_KERNELS_CUDA_TILE_PARTS_CUH_
#define WEFT_KERNELS_CUDA_TILE_PARTS_CUH_

#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

// Writes the block's `sums`, which are part number `part`, to `workspace`. The
// block that finishes last replaces its `sums` by the totals of all parts,
// added in order, and returns true. The other blocks return false. `workspace`
// has Tile::kFloats floats for each part. `counter` must be 0 before the first
// call, and is 0 again after the last. All threads of each block call it.
template <typename Tile>
__device__ bool AddParts(float* workspace, int part, int num_parts,
                         unsigned* counter, typename Tile::Sums* sums) {
  constexpr int kQuads = Tile::kRowFragments * Tile::kColumnFragments;
  __shared__ bool is_last;
  auto* quads = reinterpret_cast<float4*>(workspace) + threadIdx.x;
  float(*own)[4] = &sums->of[0][0];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    quads[(part * kQuads + i) * Tile::kThreads] = {own[i][0], own[i][1],
                                                   own[i][2], own[i][3]};
  }
  __threadfence();
  __syncthreads();
  const auto last = static_cast<unsigned>(num_parts - 1);
  if (threadIdx.x == 0) is_last = atomicInc(counter, last) == last;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  *sums = {};
  // If a part is small, unrolling lets the loop load several parts at once.
  [[maybe_unused]] constexpr int kPartsAtOnce = kQuads >= 8 ? 1 : 8 / kQuads;
#pragma unroll kPartsAtOnce
  for (int p = 0; p < num_parts; ++p) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 x = __ldcg(&quads[(p * kQuads + i) * Tile::kThreads]);
      own[i][0] += x.x;
      own[i][1] += x.y;
      own[i][2] += x.z;
      own[i][3] += x.w;
    }
  }
  return true;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_TILE_PARTS_CUH_
