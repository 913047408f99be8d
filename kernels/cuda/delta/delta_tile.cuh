// Matrices of a chunk of the gated delta rule in shared memory, and their
// products on tensor cores. Legend: that of gated_delta.h.
#ifndef WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_
#define WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_

#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tile.cuh"

namespace weft::kernels::cuda::delta {

inline constexpr int kThreads = 256;
inline constexpr int kRows = 64;   // C.
inline constexpr int kKeys = 128;  // K.
inline constexpr int kSlice = 64;  // Value features of a block.
// The least shared memory that a block can have on devices whose tensor cores
// multiply bf16: that of the compute capabilities 8.6, 8.9 and 12.0.
inline constexpr size_t kBlockSharedBytes = 99 * 1024;

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

// Returns the place of the elements [chunk * 8, chunk * 8 + 8) of a row.
template <int kR, int kC>
__device__ Pack<Bf16, kChunk>* ChunkAt(SharedMatrix<kR, kC>* matrix, int row,
                                       int chunk) {
  return reinterpret_cast<Pack<Bf16, kChunk>*>(
      &matrix->chunks[matrix->Place(row, chunk)]);
}

// Calls run(row, chunk, at) for all chunks of a matrix, where `at` is their
// place. All threads call it.
template <int kR, int kC>
__device__ void ForChunks(SharedMatrix<kR, kC>* matrix, auto run) {
  constexpr int kRowChunks = kC / kChunk;
  static_assert(kR * kRowChunks % kThreads == 0);
#pragma unroll
  for (int j = 0; j < kR * kRowChunks / kThreads; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    run(row, chunk, ChunkAt(matrix, row, chunk));
  }
}

// Starts to copy rows of bf16. Rows from `size` on become 0.
template <int kR, int kC>
__device__ void CopyRows(const Bf16* from, int64_t stride, int size,
                         SharedMatrix<kR, kC>* to) {
  to->Copy({from, stride, size, kC}, /*is_aligned=*/true);
}

// Writes rows of a matrix to memory, up to row `size`.
template <int kR, int kC>
__device__ void WriteRows(SharedMatrix<kR, kC>* from, int64_t stride, int size,
                          Bf16* to) {
  ForChunks(from, [&](int row, int chunk, const Pack<Bf16, kChunk>* at) {
    if (row < size) StorePack(*at, to + row * stride + chunk * kChunk);
  });
}

template <typename T>
__device__ void StorePair(float low, float high, T* to) {
  Pack<T, 2> pair;
  pair.Set(0, low);
  pair.Set(1, high);
  StorePack(pair, to);
}

}  // namespace weft::kernels::cuda::delta

#endif  // WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_
