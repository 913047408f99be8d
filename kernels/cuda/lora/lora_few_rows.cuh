// Types and functions that the kernels of lora_few_rows.h share.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_CUH_
#define WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/lora/lora_few_rows.h"
#include "kernels/cuda/mma.cuh"

namespace weft::kernels::cuda::few_rows {

using Bf16 = __nv_bfloat16;

// A warp's product has 16 rows and 8 columns, and sums over kDepth elements.
// Lane 4 g + t loads the t-th 16 bytes of row g, of row g + 8 and of column g.
// The depth of both operands is permuted in the same way, which does not change
// their product.
inline constexpr int kRows = kLoraFewRows;
inline constexpr int kColumns = 8;
inline constexpr int kChunk = 8;
inline constexpr int kDepth = 4 * kChunk;
static_assert(kRows == 16);

// For RunLoraFewRowsShrink: the fewest features in a part of S (the last part
// may have fewer), and the most parts.
inline constexpr int64_t kPartFeatures = 1024;
inline constexpr int64_t kMaxParts = 16;

// The most blocks of a shrink or an expansion. If there are more items, a block
// computes several of them in turn. Without this limit, a table with many
// unused entries would launch many empty blocks.
inline constexpr int64_t kMaxBlocks = 2048;

union Chunk {
  uint4 whole;
  unsigned pairs[kChunk / 2];
  uint16_t elements[kChunk];
};

// Returns elements [begin, begin + 8) of a row of `count` elements. Elements
// beyond the row are 0, and all are 0 if the row does not exist. If kAligned,
// `begin` and `count` are multiples of 8, and the row begins at a multiple of
// 16 bytes.
template <bool kAligned>
__device__ Chunk Load(const Bf16* row, int begin, int count, bool exists) {
  Chunk chunk = {};
  if (!exists || begin >= count) return chunk;
  if constexpr (kAligned) {
    chunk.whole = *reinterpret_cast<const uint4*>(row + begin);
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(row);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (begin + i < count) chunk.elements[i] = bits[begin + i];
    }
  }
  return chunk;
}

// Writes a chunk to elements [begin, begin + 8) of a row of `count` elements,
// but nothing beyond the row. kAligned is as for Load.
template <bool kAligned>
__device__ void Save(const Chunk& chunk, Bf16* row, int begin, int count,
                     bool exists) {
  if (!exists || begin >= count) return;
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(row + begin) = chunk.whole;
  } else {
    auto* bits = reinterpret_cast<uint16_t*>(row);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (begin + i < count) bits[begin + i] = chunk.elements[i];
    }
  }
}

__device__ inline Bf16 Rounded(float x) { return __float2bfloat16_rn(x); }
__device__ inline uint16_t BitsOf(Bf16 x) {
  uint16_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
// Extracts the element from its pair. If this function read `elements`, nvcc
// would keep the chunk as 8 halves, in twice the registers.
__device__ inline float ElementOf(const Chunk& chunk, int i) {
  const unsigned pair = chunk.pairs[i / 2];
  return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000U);
}

// Returns whether 16-byte loads can read all rows of a matrix.
__device__ inline bool IsAligned(const Bf16* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChunk == 0;
}

__device__ inline void Multiply(const Chunk& upper, const Chunk& lower,
                                const Chunk& columns, float (&sums)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    MultiplyAdd({upper.pairs[2 * half], lower.pairs[2 * half],
                 upper.pairs[2 * half + 1], lower.pairs[2 * half + 1]},
                {columns.pairs[2 * half], columns.pairs[2 * half + 1]}, sums);
  }
}

// Returns the matrix in `slot` of the adapter of `rows`.
__device__ inline LoraMatrix MatrixOf(const LoraTable& table,
                                      const LoraFewRows& rows, int64_t slot) {
  return table.matrices[rows.layout * table.num_slots + slot];
}

// The arguments of a launch: the product, and sizes that the host computes.
struct Task {
  LoraFewRowsProduct product;
  LoraParts parts;
  int inputs = 0;
  int part_features = 0;
  unsigned tiles = 0;  // Items per entry (shrink: items per entry and part).
};

// Returns where part `part` of S begins for a row of the entry `rows`.
__device__ inline float* PartOf(const LoraParts& parts, const LoraFewRows& rows,
                                int row, int part) {
  const int64_t place = rows.place + row;
  return parts.data + (place * parts.count + part) * parts.stride;
}

inline bool IsEmpty(const LoraFewRowsProduct& product) {
  return product.table.max_few == 0 || product.max_rank == 0;
}

inline int64_t PartFeatures(int64_t inputs) {
  const int64_t most = CeilDiv(inputs, kMaxParts * kDepth) * kDepth;
  return most > kPartFeatures ? most : kPartFeatures;
}

inline Task TaskOf(const LoraFewRowsProduct& product, int64_t tiles) {
  return {.product = product,
          .parts = LoraFewRowsParts(product),
          .inputs = static_cast<int>(product.inputs),
          .part_features = static_cast<int>(PartFeatures(product.inputs)),
          .tiles = static_cast<unsigned>(tiles)};
}

inline int64_t NumBlocks(const LoraFewRowsProduct& product,
                         int64_t items_per_entry) {
  const int64_t items = product.table.max_few * items_per_entry;
  return items < kMaxBlocks ? items : kMaxBlocks;
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_CUH_
