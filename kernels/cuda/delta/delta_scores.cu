#include "kernels/cuda/delta/delta_chunk.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

// The side of the blocks of I + A that one thread for each column inverts.
constexpr int kSide = 16;
constexpr int kSides = kRows / kSide;

struct ScoresMemory {
  union {
    struct {
      KeyRows q;
      KeyRows k;
    };
    Scores w;  // W, once q and k were read.
  };
  float a[kRows][kRows + 1];
  float inverse[kRows][kRows + 1];
  Gates gates;
};

// Inverts the blocks on the diagonal of I + A. Each thread computes a column.
__device__ void InvertDiagonal(ScoresMemory* m) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= kRows) return;
  const int first = thread / kSide * kSide, column = thread % kSide;
  float x[kSide];
#pragma unroll
  for (int t = 0; t < kSide; ++t) {
    x[t] = t == column ? 1.0F : 0.0F;
#pragma unroll
    for (int i = 0; i < t; ++i) x[t] -= m->a[first + t][first + i] * x[i];
    m->inverse[first + t][thread] = x[t];
  }
}

// Computes the blocks below the diagonal, one diagonal after another. With X =
// (I + A)^-1: X_ij = -X_ii (sum over j <= k < i of A_ik X_kj). Each thread
// computes an element of each block.
__device__ void InvertBelow(ScoresMemory* m) {
  const int row = static_cast<int>(threadIdx.x) / kSide;
  const int column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll 1
  for (int below = 1; below < kSides; ++below) {
    float sums[kSides] = {};
    for (int j = 0; j + below < kSides; ++j) {
      const int t = (j + below) * kSide + row, c = j * kSide + column;
      float sum = 0;
#pragma unroll 8
      for (int i = j * kSide; i < (j + below) * kSide; ++i) {
        sum += m->a[t][i] * m->inverse[i][c];
      }
      m->inverse[t][c] = sum;
    }
    __syncthreads();
    for (int j = 0; j + below < kSides; ++j) {
      const int first = (j + below) * kSide, c = j * kSide + column;
      float sum = 0;
#pragma unroll 8
      for (int i = 0; i < kSide; ++i) {
        sum -= m->inverse[first + row][first + i] * m->inverse[first + i][c];
      }
      sums[j] = sum;
    }
    __syncthreads();
    for (int j = 0; j + below < kSides; ++j) {
      m->inverse[(j + below) * kSide + row][j * kSide + column] = sums[j];
    }
    __syncthreads();
  }
}

// Fills W and A, and the inverse with zeros.
__device__ void FillScores(ScoresMemory* m) {
  ScoresOfKeys::Sums qk = {}, kk = {};
  ScoresOfKeys::Multiply(m->q, m->k, &qk);
  ScoresOfKeys::Multiply(m->k, m->k, &kk);
  __syncthreads();
  ScoresOfKeys::ForPairs(qk, [&](int t, int i, float low, float high) {
    m->w.Set(t, i, low * m->gates.Decay(t, i), high * m->gates.Decay(t, i + 1));
  });
  ScoresOfKeys::ForPairs(kk, [&](int t, int i, float low, float high) {
    const auto set = [&](int column, float x) {
      m->a[t][column] =
          column < t ? m->gates.beta[t] * m->gates.Decay(t, column) * x : 0.0F;
      m->inverse[t][column] = 0;
    };
    set(i, low);
    set(i + 1, high);
  });
}

__global__ void __launch_bounds__(kThreads, 3)
    DeltaScoresKernel(DeltaRuleRows rows, const DeltaChunkRange* chunks,
                      DeltaScores to) {
  auto* m = static_cast<ScoresMemory*>(DynamicShared());
  const Place place(rows);
  const Columns columns(rows, place);
  const DeltaChunkRange chunk = chunks[place.index];
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  CopyRows(columns.q + chunk.begin * columns.stride, columns.stride, size,
           &m->q);
  CopyRows(columns.k + chunk.begin * columns.stride, columns.stride, size,
           &m->k);
  EndCopyGroup();
  if (WarpIndex() == 0) m->gates.Fill(rows, chunk, place.head);
  WaitForCopies<0>();
  __syncthreads();
  FillScores(m);
  __syncthreads();
  InvertDiagonal(m);
  __syncthreads();
  InvertBelow(m);
  const int64_t at = ScoresAt(to, place.head, chunk.begin);
  WriteRows(&m->w, kRows, size, Bf16Of(to.w_HTC) + at);
  ForChunks(&m->w, [&](int t, int part, const auto*) {
    if (t >= size) return;
    Pack<Bf16, kChunk> rounded, rest;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const float x = m->inverse[t][part * kChunk + e];
      rounded.Set(e, x);
      rest.Set(e, x - rounded[e]);
    }
    const int64_t own = at + t * kRows + part * kChunk;
    StorePack(rounded, Bf16Of(to.inverse_HTC) + own);
    StorePack(rest, Bf16Of(to.rest_HTC) + own);
  });
}

}  // namespace
}  // namespace delta

cudaError_t ScoreDeltaChunks(const DeltaRuleRows& rows, const DeltaTrees& trees,
                             const DeltaScores& to, cudaStream_t stream) {
  return delta::LaunchBlocks<delta::ScoresMemory>(
      delta::DeltaScoresKernel, trees.num_chunks, /*slices=*/1, stream, rows,
      trees.chunks, to);
}

}  // namespace weft::kernels::cuda
