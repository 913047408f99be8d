// What the forward and the backward pass of the gated delta rule in chunks
// share. A block computes kSlice value features of one head of one tree, chunk
// after chunk. All columns of a state are independent of each other, and the
// gradients of keys and gates are sums over them.
//
// Legend: that of gated_delta.h. Rows beyond a chunk's end have q, k, v and
// beta 0 and g 0, so they change nothing.
#ifndef WEFT_KERNELS_CUDA_DELTA_CHUNK_CUH_
#define WEFT_KERNELS_CUDA_DELTA_CHUNK_CUH_

#include "kernels/cuda/gated_delta.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tile.cuh"

namespace weft::kernels::cuda::delta {

inline constexpr int kThreads = 256;
inline constexpr int kRows = 64;    // C.
inline constexpr int kKeys = 128;   // K.
inline constexpr int kSlice = 64;   // Value features of a block.
inline constexpr int kStride = 72;  // Of rows of a matrix that is solved: four
                                    // rows are in different banks.

// A bf16 matrix in shared memory, as an operand whose outer index is its row,
// or, transposed, its column.
template <int kR, int kC>
struct SharedMatrix : OperandTile<kR, kC, false, kThreads> {
  using Base = OperandTile<kR, kC, false, kThreads>;
  using ByColumns = OperandTile<kC, kR, true, kThreads>;

  // Both types place an element at the same address.
  __device__ const ByColumns& Transposed() const {
    static_assert(sizeof(ByColumns) == sizeof(Base));
    return *reinterpret_cast<const ByColumns*>(this);
  }
  __device__ Pack<Bf16, 2>* At(int row, int column) {
    auto* chunk = &this->chunks[Base::Place(row, column / kChunk)];
    return reinterpret_cast<Pack<Bf16, 2>*>(reinterpret_cast<Bf16*>(chunk) +
                                            column % kChunk);
  }
  // Sets the elements (row, column) and (row, column + 1); `column` is even.
  __device__ void Set(int row, int column, float low, float high) {
    Pack<Bf16, 2> pair;
    pair.Set(0, low);
    pair.Set(1, high);
    *At(row, column) = pair;
  }
};

using KeyRows = SharedMatrix<kRows, kKeys>;
using ValueRows = SharedMatrix<kRows, kSlice>;
using Scores = SharedMatrix<kRows, kRows>;
using State = SharedMatrix<kKeys, kSlice>;

// Products by their output, depth and operands: whether the depth is the row
// index of the left and of the right matrix.
template <int kR, int kC, int kDepth, bool kLeft, bool kRight>
struct Product : Tile<kR, kC, kDepth, 1, kLeft, kRight> {
  using Base = Tile<kR, kC, kDepth, 1, kLeft, kRight>;

  // Adds the product of two matrices to the sums. The loop is not unrolled,
  // because the addresses of all steps would take too many registers.
  static __device__ void Multiply(const typename Base::Left& left,
                                  const typename Base::Right& right,
                                  typename Base::Sums* sums) {
#pragma unroll 1
    for (int d = 0; d < kDepth; d += kFragment) {
      Base::MultiplyFragments(left, right, d, sums);
    }
  }
};
using ScoresOfKeys = Product<kRows, kRows, kKeys, false, false>;
using ScoresOfValues = Product<kRows, kRows, kSlice, false, false>;
using ValuesOfState = Product<kRows, kSlice, kKeys, false, true>;
using ValuesOfScores = Product<kRows, kSlice, kRows, false, true>;
using ValuesOfScoresT = Product<kRows, kSlice, kRows, true, true>;
using KeysOfState = Product<kRows, kKeys, kSlice, false, false>;
using KeysOfScores = Product<kRows, kKeys, kRows, false, true>;
using KeysOfScoresT = Product<kRows, kKeys, kRows, true, true>;
using StateOfRows = Product<kKeys, kSlice, kRows, true, true>;

// Replaces pairs of sums: calls run(row, column, low, high) with pointers.
template <typename Tile>
__device__ void ChangePairs(typename Tile::Sums* sums, auto run) {
#pragma unroll
  for (int i = 0; i < Tile::kRowFragments; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kColumnFragments; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&own)[4] = sums->of[i][j];
        run(Tile::FirstRow() + i * kFragment + half * 8 + Lane() / 4,
            Tile::FirstColumn() + j * kChunk + Lane() % 4 * 2, &own[2 * half],
            &own[2 * half + 1]);
      }
    }
  }
}

template <typename Tile>
__device__ void ScaleRows(const float* factors, typename Tile::Sums* sums) {
  ChangePairs<Tile>(sums, [&](int row, int, float* low, float* high) {
    *low *= factors[row];
    *high *= factors[row];
  });
}

// The gates of a chunk's rows. G, the running sum of g, may be large while the
// difference of two G is small, so it is the sum of two floats.
struct Gates {
  float beta[kRows];
  float high[kRows];
  float low[kRows];
  float from_start[kRows];  // e^G.
  float to_end[kRows];      // e^(G_C - G).

  // Returns e^(G_t - G_i) for i <= t, and 0 for other i.
  __device__ float Decay(int t, int i) const {
    return i <= t ? expf((high[t] - high[i]) + (low[t] - low[i])) : 0.0F;
  }
  __device__ float whole() const { return from_start[kRows - 1]; }

  // Warp 0 calls it.
  __device__ void Fill(const DeltaRuleRows& rows, const DeltaChunkRange& chunk,
                       int64_t head) {
    const int64_t size = chunk.end - chunk.begin;
    double own[2];
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * Lane() + j;
      const int64_t at = (chunk.begin + t) * rows.num_value_heads + head;
      beta[t] = t < size ? rows.beta_TH[at] : 0.0F;
      own[j] = t < size ? rows.g_TH[at] : 0.0F;
    }
    own[1] += own[0];
    double sum = own[1];
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const double other = __shfl_up_sync(kAllLanes, sum, offset);
      if (Lane() >= offset) sum += other;
    }
    const double before = sum - own[1];
    const double last = __shfl_sync(kAllLanes, sum, kWarp - 1);
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * Lane() + j;
      const double g = before + own[j];
      high[t] = static_cast<float>(g);
      low[t] = static_cast<float>(g - high[t]);
      from_start[t] = expf(high[t]);
      to_end[t] = expf(static_cast<float>(last - g));
    }
  }
};

// The block's head and slice of value features.
struct Place {
  int64_t tree;
  int64_t head;
  int64_t slice;

  __device__ explicit Place(const DeltaRuleRows& rows)
      : tree(blockIdx.x / rows.num_value_heads),
        head(blockIdx.x % rows.num_value_heads),
        slice(blockIdx.y) {}
};

// Pointers to the columns of a head, at row 0.
struct Columns {
  const float* q;
  const float* k;
  const float* v;
  int stride;

  __device__ Columns(const DeltaRuleRows& rows, const Place& place) {
    const int64_t keys = rows.num_key_heads * kKeys;
    const int64_t group = rows.num_value_heads / rows.num_key_heads;
    stride =
        static_cast<int>(2 * keys + rows.num_value_heads * rows.value_features);
    q = rows.mixed_TW + place.head / group * kKeys;
    k = q + keys;
    v = rows.mixed_TW + 2 * keys + place.head * rows.value_features +
        place.slice * kSlice;
  }
};

// Calls run(row, column) for all elements with an even column of a matrix with
// kC columns and kR rows. All threads call it; warps get whole rows.
template <int kR, int kC>
__device__ void ForElements(auto run) {
  constexpr int kPairs = kC / 2;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kR * kPairs; i += kThreads) {
    run(i / kPairs, i % kPairs * 2);
  }
}

// Copies rows of f32 or bf16 to a matrix. Rows from `size` on become 0.
template <int kR, int kC, typename T>
__device__ void CopyRows(const T* from, int stride, int size,
                         SharedMatrix<kR, kC>* to) {
  ForElements<kR, kC>([&](int row, int column) {
    Pack<T, 2> pair = {};
    if (row < size) pair = LoadPack<2>(from + row * stride + column);
    to->Set(row, column, pair[0], pair[1]);
  });
}

// Writes W = decay q k^T to `w`, and decay k k^T below the diagonal, and 0
// elsewhere, to `kk`.
__device__ inline void FillScores(const KeyRows& q, const KeyRows& k,
                                  const Gates& gates, Scores* w,
                                  float (*kk)[kRows + 1]) {
  ScoresOfKeys::Sums sums = {};
  ScoresOfKeys::Multiply(q, k, &sums);
  ScoresOfKeys::ForPairs(sums, [&](int row, int column, float a, float b) {
    w->Set(row, column, a * gates.Decay(row, column),
           b * gates.Decay(row, column + 1));
  });
  sums = {};
  ScoresOfKeys::Multiply(k, k, &sums);
  ScoresOfKeys::ForPairs(sums, [&](int row, int column, float a, float b) {
    kk[row][column] = column < row ? a * gates.Decay(row, column) : 0.0F;
    kk[row][column + 1] =
        column + 1 < row ? b * gates.Decay(row, column + 1) : 0.0F;
  });
}

// Replaces x by (I + diag(beta) kk)^-1 x, or by the product with the transposed
// inverse. Four lanes share a column.
template <bool kTransposed>
__device__ void Solve(const float (*kk)[kRows + 1], const Gates& gates,
                      float (*x)[kStride]) {
  const int column = static_cast<int>(threadIdx.x) / 4;
  const int part = static_cast<int>(threadIdx.x) % 4;
  for (int n = 1; n < kRows; ++n) {
    const int t = kTransposed ? kRows - 1 - n : n;
    float sum = 0;
#pragma unroll 2
    for (int j = part; j < n; j += 4) {
      const int i = kTransposed ? kRows - 1 - j : j;
      sum += kTransposed ? gates.beta[i] * kk[i][t] * x[i][column]
                         : gates.beta[t] * kk[t][i] * x[i][column];
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (part == 0) x[t][column] -= sum;
    __syncwarp();
  }
}

// Returns the block's slice of a state [K, V] of its head, or null for -1.
template <typename T>
__device__ T* StateOf(T* states_SHKV, int64_t index, const DeltaRuleRows& rows,
                      const Place& place) {
  if (index < 0) return nullptr;
  return states_SHKV +
         (index * rows.num_value_heads + place.head) * kKeys *
             rows.value_features +
         place.slice * kSlice;
}

template <typename T>
__device__ void StorePair(float low, float high, T* to) {
  Pack<T, 2> pair;
  pair.Set(0, low);
  pair.Set(1, high);
  StorePack(pair, to);
}

// Fills the sums with `factor` times the state at `from`.
__device__ inline void LoadState(const float* from, int stride, float factor,
                                 StateOfRows::Sums* sums) {
  ChangePairs<StateOfRows>(sums, [&](int k, int v, float* low, float* high) {
    const auto pair = LoadPack<2>(from + k * stride + v);
    *low = factor * pair[0];
    *high = factor * pair[1];
  });
}

}  // namespace weft::kernels::cuda::delta

#endif  // WEFT_KERNELS_CUDA_DELTA_CHUNK_CUH_
