// The reads of keys and values by a warp in paged attention. In a step, a warp
// multiplies 16 tokens with up to 8 query heads on tensor cores. Each lane
// reads its keys and values directly from global memory, 16 bytes at a time if
// rows are aligned. The products may take the features in any order, so each
// lane takes adjacent features.
//
// Tensor cores multiply bf16, so a number with more bits is split into a sum of
// bf16 parts. An f32 number has three parts. If values are bf16, a token's
// weight has two parts, whose error is far below the error of the values.
// kWeightParts tells which products of parts are added.
//
// Legend: lane 4 g + t as in mma.cuh. The lane reads the keys of tokens g and
// g + 8 and the values of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9. It has the
// scores and sums of heads 2 t and 2 t + 1.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_PIECES_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_PIECES_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/paged_attention.h"

namespace weft::kernels::cuda {

inline constexpr int kStepTokens = 16;
// The most query heads of a block. They share one key/value head.
inline constexpr int kStepHeads = 8;
// The number of features in a piece, which a lane reads at once.
inline constexpr int kPiece = 8;
// The number of features in a chunk. For values, 8 lanes read a chunk with one
// read each. For keys, 4 lanes read it with two reads each.
inline constexpr int kFeatureChunk = 64;

// The number of bf16 parts of a query's, key's or value's feature.
template <typename T>
inline constexpr int kParts = sizeof(T) == 2 ? 1 : 3;
// The number of bf16 parts of a token's weight. Part i of a weight times part j
// of a value is left out if i + j is at least this number, because the product
// is too small to matter. In a score, part i of a query times part j of a key
// is left out if i + j is at least kParts.
template <typename T>
inline constexpr int kWeightParts = sizeof(T) == 2 ? 2 : 3;

// A piece as bf16, two features in a word.
struct Words {
  unsigned at[kPiece / 2];
};

// A piece of a query, key or value in its stored dtype.
template <typename T>
struct Piece {
  uint4 raw[kPiece * sizeof(T) / 16];
};

// Returns features [first, first + 8) of a row of `count` features. `from`
// points to feature `first`. Without kWide, features beyond the row are zeros.
// With kWide, the row begins at a multiple of 16 bytes and `count` is a
// multiple of 8. To avoid a branch, LoadPiece<T, true> returns the row's first
// piece if the requested piece is beyond the row. This is harmless: keys are
// multiplied with zeros of the query, and sums of values are not stored.
// `is_inside` means that the piece is known to be inside the row.
template <typename T, bool kWide>
__device__ Piece<T> LoadPiece(const T* from, int first, int count,
                              bool is_inside) {
  constexpr int kLoads = static_cast<int>(sizeof(Piece<T>) / sizeof(uint4));
  Piece<T> piece;
  if constexpr (kWide) {
    const auto* wide = reinterpret_cast<const uint4*>(
        from - (is_inside || first < count ? 0 : first));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) piece.raw[i] = wide[i];
  } else {
    unsigned words[4 * kLoads] = {};
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (first + i >= count) continue;
      if constexpr (sizeof(T) == 2) {
        const unsigned bits = reinterpret_cast<const uint16_t*>(from)[i];
        words[i / 2] |= bits << 16 * (i % 2);
      } else {
        words[i] = __float_as_uint(from[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      piece.raw[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2],
                      words[4 * i + 3]};
    }
  }
  return piece;
}

// Splits each of two numbers into kCount bf16 parts, which add up to about the
// number. Word i has part i of both numbers.
template <int kCount>
__device__ void SplitPair(float low, float high, unsigned (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    words[i] = PackBf16(low, high);
    low -= __uint_as_float(words[i] << 16);
    high -= __uint_as_float(words[i] & 0xFFFF0000U);
  }
}

template <typename T>
__device__ void SplitPiece(const Piece<T>& piece, Words (&parts)[kParts<T>]) {
  if constexpr (sizeof(T) == 2) {
    const uint4& raw = piece.raw[0];
    parts[0] = {{raw.x, raw.y, raw.z, raw.w}};
  } else {
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i) {
      const uint4& raw = piece.raw[i / 2];
      unsigned words[kParts<T>];
      SplitPair(__uint_as_float(i % 2 == 0 ? raw.x : raw.z),
                __uint_as_float(i % 2 == 0 ? raw.y : raw.w), words);
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        parts[part].at[i] = words[part];
      }
    }
  }
}

// Gives the addresses at which one lane reads the rows of one key/value head.
template <typename T>
struct LaneRows {
  const T* data;        // The lane's first feature in slot 0.
  unsigned slot_bytes;  // Distance between slots.
  int features;         // Number of features in a row.

  __device__ LaneRows(const void* pages, const PagedAttentionBatch& batch,
                      int kv_head, int first)
      : data(static_cast<const T*>(pages) + kv_head * batch.head_features +
             first),
        slot_bytes(static_cast<unsigned>(batch.num_kv_heads *
                                         batch.head_features * sizeof(T))),
        features(static_cast<int>(batch.head_features)) {}
  __device__ const T* Of(unsigned slot) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(data) +
                                      uint64_t{slot} * slot_bytes);
  }
};

// True if a lane reads all its keys or values of a step before it multiplies
// them. Otherwise it reads them piece by piece, because they do not fit the
// registers or are not aligned.
template <typename T, int kChunks, bool kWide>
inline constexpr bool kAtOnce = kChunks * sizeof(T) <= 8 && kWide;

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_PIECES_CUH_
