// One step of a warp in paged attention: 16 tokens against up to 8 query heads
// on tensor cores. Keys and values come from global memory to the lanes that
// multiply them, 16 bytes at a time, through no shared memory: a product may
// add up its terms in any order, so each lane takes features that lie side by
// side.
//
// Tensor cores take bf16. A number that has more digits is a sum of parts:
// three for f32, two for the weight of a token, whose error then is far below
// that of the values it multiplies. Products of parts that count are added up.
//
// Lane 4 g + t: see mma.cuh. It reads the keys of tokens g and g + 8,
// the values of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, and has the scores and
// sums of heads 2 t and 2 t + 1.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_STEP_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_STEP_CUH_

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/paged_attention.h"

namespace weft::kernels::cuda {

inline constexpr int kStepTokens = 16;
// Query heads of a block: those of one key/value head, in chunks.
inline constexpr int kStepHeads = 8;
// Features that a lane reads at once.
inline constexpr int kPiece = 8;
// Features are counted in chunks that 8 lanes read at once as values, and 4
// lanes at twice as keys.
inline constexpr int kFeatureChunk = 64;

template <typename T>
inline constexpr int kParts = sizeof(T) == 2 ? 1 : 3;
// Parts of a token's weight. A product of parts i and j is left out when i + j
// is no less: it is below the last digit of what is kept.
template <typename T>
inline constexpr int kWeightParts = sizeof(T) == 2 ? 2 : 3;

// 8 features as bf16.
struct Words {
  unsigned at[kPiece / 2];
};

// 8 features as they lie in memory.
template <typename T>
struct Piece {
  uint4 raw[kPiece * sizeof(T) / 16];
};

// The 8 features from feature `first` of a row of `count` on, which lie at
// `from`; zeros beyond the row. kWide: the row begins at a multiple of 16 bytes
// and `count` is one of 8; then a piece beyond the row repeats its first one,
// which spares a choice: it meets zeros of the query, or sums that nobody
// stores. is_inside: the piece is known to lie within the row.
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

// Two numbers as a sum of kCount words of bf16.
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

// The query heads of a block, in the order of the lanes that use them.
template <typename T, int kChunks>
struct Query {
  Words parts[kParts<T>][2 * kChunks][kWarp];
};

// All threads of the block call it; a barrier must follow. Zeros beyond
// `num_heads` and the features.
template <typename T, int kChunks>
__device__ void LoadQuery(const T* q_HC, int num_heads, int features,
                          Query<T, kChunks>* query) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kChunks * kWarp;
       i += static_cast<int>(blockDim.x)) {
    const int head = i % kWarp / 4;
    const int first = i / kWarp * (kFeatureChunk / 2) + i % 4 * kPiece;
    Words parts[kParts<T>];
    SplitPiece(LoadPiece<T, false>(q_HC + head * features + first, first,
                                   head < num_heads ? features : 0, false),
               parts);
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      query->parts[part][i / kWarp][i % kWarp] = parts[part];
    }
  }
}

// Where one key/value head's rows are, as one lane reads them.
template <typename T>
struct LaneRows {
  const T* data;        // The lane's first feature in slot 0.
  unsigned slot_bytes;  // From a slot to the next.
  int features;         // In a row.

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

// Whether a lane reads all of a step's keys, or values, before it multiplies
// any. What would not fit into registers so comes piece by piece.
template <typename T, int kChunks, bool kWide>
inline constexpr bool kAtOnce = kChunks * sizeof(T) <= 8 && kWide;

// `slots`, here and below: of token i in lanes i and i + 16.
template <typename T, int kChunks, bool kWide>
struct Keys {
  const T* rows[2];
  int features;
  Piece<T> pieces[2 * kChunks][2];

  static __device__ int FirstFeature() { return Lane() % 4 * kPiece; }
  __device__ void LoadPieces(int j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = j * (kFeatureChunk / 2);
      pieces[j][i] =
          LoadPiece<T, kWide>(rows[i] + first, first + FirstFeature(), features,
                              j / 2 + 1 < kChunks);
    }
  }
  __device__ void Load(const LaneRows<T>& lane_rows, unsigned slots) {
    features = lane_rows.features;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = lane_rows.Of(__shfl_sync(kAllLanes, slots, Lane() / 4 + 8 * i));
    }
    if constexpr (kAtOnce<T, kChunks, kWide>) {
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) LoadPieces(j);
    }
  }

  // scores: those of two heads for token g, then for token g + 8.
  __device__ void Score(const Query<T, kChunks>& query, float (&scores)[4]) {
    float other[4] = {};
#pragma unroll
    for (float& score : scores) score = 0;
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) {
      if constexpr (!kAtOnce<T, kChunks, kWide>) LoadPieces(j);
      Words parts[2][kParts<T>];
      SplitPiece(pieces[j][0], parts[0]);
      SplitPiece(pieces[j][1], parts[1]);
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        const Words q = query.parts[part][j][Lane()];
#pragma unroll
        for (int i = 0; i < kParts<T> - part; ++i) {
          const Words& low = parts[0][i];
          const Words& high = parts[1][i];
          MultiplyAdd({low.at[0], high.at[0], low.at[1], high.at[1]},
                      {q.at[0], q.at[1]}, scores);
          MultiplyAdd({low.at[2], high.at[2], low.at[3], high.at[3]},
                      {q.at[2], q.at[3]}, other);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] += other[i];
  }
};

// Weights of the step's tokens, as the right operand of their product with the
// values.
template <typename T>
struct Weights {
  unsigned parts[kWeightParts<T>][2];

  // weights: as scores.
  __device__ void Set(const float (&weights)[4]) {
    unsigned words[2][kWeightParts<T>];
    SplitPair(weights[0], weights[1], words[0]);
    SplitPair(weights[2], weights[3], words[1]);
#pragma unroll
    for (int part = 0; part < kWeightParts<T>; ++part) {
      parts[part][0] = Transpose8x8(words[0][part]);
      parts[part][1] = Transpose8x8(words[1][part]);
    }
  }
};

template <typename T, int kChunks, bool kWide>
struct Values {
  const T* rows[4];
  int features;
  Piece<T> pieces[kChunks][4];

  static __device__ int FirstFeature() { return Lane() / 4 * kPiece; }
  __device__ void LoadPieces(int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = j * kFeatureChunk;
      pieces[j][i] = LoadPiece<T, kWide>(
          rows[i] + first, first + FirstFeature(), features, j + 1 < kChunks);
    }
  }
  __device__ void Load(const LaneRows<T>& lane_rows, unsigned slots) {
    features = lane_rows.features;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = lane_rows.Of(
          __shfl_sync(kAllLanes, slots, Lane() % 4 * 2 + i % 2 + i / 2 * 8));
    }
    if constexpr (kAtOnce<T, kChunks, kWide>) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) LoadPieces(j);
    }
  }

  // sums[j][m][2 i] and the next are those of feature 64 j + 8 g + 2 m + i for
  // heads 2 t and 2 t + 1.
  __device__ void AddTo(const Weights<T>& weights,
                        float (&sums)[kChunks][kPiece / 2][4]) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if constexpr (!kAtOnce<T, kChunks, kWide>) LoadPieces(j);
      Words tokens[4][kParts<T>];
#pragma unroll
      for (int i = 0; i < 4; ++i) SplitPiece(pieces[j][i], tokens[i]);
#pragma unroll
      for (int m = 0; m < kPiece / 2; ++m) {
#pragma unroll
        for (int part = 0; part < kParts<T>; ++part) {
          // Tokens side by side in a word, where memory has features.
          const auto pair = [&](int token, unsigned halves) {
            return __byte_perm(tokens[token][part].at[m],
                               tokens[token + 1][part].at[m], halves);
          };
          constexpr unsigned kLower = 0x5410;
          constexpr unsigned kUpper = 0x7632;
          const unsigned rows_of_features[4] = {
              pair(0, kLower), pair(0, kUpper), pair(2, kLower),
              pair(2, kUpper)};
#pragma unroll
          for (int i = 0; i < kWeightParts<T> - part; ++i) {
            MultiplyAdd(rows_of_features, weights.parts[i], sums[j][m]);
          }
        }
      }
    }
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_STEP_CUH_
