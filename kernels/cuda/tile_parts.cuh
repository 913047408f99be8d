// Adds up the parts of a tile's sums, if several blocks each sum over a part of
// the tile's depth. A tile is a rectangle of a product's output.
#ifndef WEFT_KERNELS_CUDA_TILE_PARTS_CUH_
#define WEFT_KERNELS_CUDA_TILE_PARTS_CUH_

#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

// Writes the block's `sums`, which are part `part`, to `workspace`. Returns
// true only in the block that finishes last. There, replaces `sums` by the sums
// of all parts, added in order. `workspace` has Tile::kFloats floats for each
// part. `counter` is 0 before the first part and after the last. All threads of
// each block call it.
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
  // The unrolled loop loads several parts at once if a part is small.
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
