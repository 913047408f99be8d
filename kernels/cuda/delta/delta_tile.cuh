// Matrices of a chunk of the gated delta rule in shared memory, and their
// products on tensor cores. Legend: that of gated_delta.h.
#ifndef WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_
#define WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_

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

template <typename T>
__device__ void StorePair(float low, float high, T* to) {
  Pack<T, 2> pair;
  pair.Set(0, low);
  pair.Set(1, high);
  StorePack(pair, to);
}

}  // namespace weft::kernels::cuda::delta

#endif  // WEFT_KERNELS_CUDA_DELTA_DELTA_TILE_CUH_
