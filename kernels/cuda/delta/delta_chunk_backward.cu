#include "kernels/cuda/delta/delta_chunk.cuh"
#include "kernels/cuda/launch.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

// As on the CPU (kernels/cpu/gated_delta_backward_body.h), terms of the
// gradients of beta and G are dot products of rows of q and k with rows of dR
// S0^T, dO S0^T and U dS1^T, where dR is the gradient of diag(beta) (V - ...).
struct BackwardMemory {
  KeyRows q;
  KeyRows k;
  ValueRows dout;
  ValueRows u;
  ValueRows dr;
  Scores w;  // W, and then the gradient of q k^T.
  Scores p;  // The gradient of k k^T, below the diagonal.
  State start;
  State dstop;
  // The decayed k k^T, and then its products with the gradient of A.
  float kk[kRows][kRows + 1];
  float dw_w[kRows][kRows + 1];  // Products of W with its gradient.
  float x[kRows][kStride];       // dR.
  // Partial sums of the rows of three dot products.
  float parts[3][kRows][KeysOfState::kWarpsAcross];
  float dbeta[kRows];
  float dsum[kRows];  // The gradient of G.
  Gates gates;
};

// Everything of a block that does not change from chunk to chunk.
struct Block {
  __device__ Block(const DeltaRuleRows& of_rows,
                   const DeltaChunksGradient& of_gradient)
      : rows(of_rows),
        gradient(of_gradient),
        place(of_rows),
        columns(of_rows, place),
        row_stride(
            static_cast<int>(rows.num_value_heads * rows.value_features)),
        column(place.head * rows.value_features + place.slice * kSlice) {}

  // The place of a row's element in dbeta and dg.
  __device__ int64_t Gate(int64_t row) const {
    return (place.slice * gradient.num_rows + row) * rows.num_value_heads +
           place.head;
  }

  DeltaRuleRows rows;
  DeltaChunksGradient gradient;
  Place place;
  Columns columns;
  int row_stride;
  int64_t column;
};

// Fills the operands. Returns the thread's part of the sum of S0 dS1.
__device__ float LoadOperands(const Block& b, const DeltaChunkRange& chunk,
                              const float* start, const float* dstop,
                              BackwardMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const auto values = static_cast<int>(b.rows.value_features);
  if (WarpIndex() == 0) m->gates.Fill(b.rows, chunk, b.place.head);
  const int64_t at = chunk.begin * b.columns.stride;
  CopyRows(b.columns.q + at, b.columns.stride, size, &m->q);
  CopyRows(b.columns.k + at, b.columns.stride, size, &m->k);
  const int64_t value = chunk.begin * b.row_stride + b.column;
  CopyRows(static_cast<const Bf16*>(b.gradient.dout_THV) + value, b.row_stride,
           size, &m->dout);
  CopyRows(b.gradient.u_THV + value, b.row_stride, size, &m->u);
  CopyRows(start, values, start ? kKeys : 0, &m->start);
  CopyRows(dstop, values, dstop ? kKeys : 0, &m->dstop);
  float sum = 0;
  if (start == nullptr || dstop == nullptr) return sum;
  ForElements<kKeys, kSlice>([&](int k, int v) {
    const auto a = LoadPack<2>(start + k * values + v);
    const auto d = LoadPack<2>(dstop + k * values + v);
    sum += a[0] * d[0] + a[1] * d[1];
  });
  return sum;
}

// Fills dR, also in bf16. Writes dv, and the part of dbeta from V.
__device__ void PassResidual(const Block& b, const DeltaChunkRange& chunk,
                             BackwardMemory* m) {
  ValuesOfState::Sums sums = {};
  ValuesOfState::Multiply(m->k, m->dstop.Transposed(), &sums);
  ScaleRows<ValuesOfState>(m->gates.to_end, &sums);
  ValuesOfScoresT::Multiply(m->w.Transposed(), m->dout.Transposed(), &sums);
  ValuesOfState::ForPairs(sums, [&](int row, int v, float low, float high) {
    m->x[row][v] = low;
    m->x[row][v + 1] = high;
  });
  __syncthreads();
  Solve<true>(m->kk, m->gates, m->x);
  __syncthreads();
  // Four lanes share a row.
  const int row = static_cast<int>(threadIdx.x) / 4;
  const int64_t t = chunk.begin + row;
  float dot = 0;
  for (int v = static_cast<int>(threadIdx.x) % 4 * 2; v < kSlice; v += 8) {
    const float low = m->x[row][v], high = m->x[row][v + 1];
    m->dr.Set(row, v, low, high);
    if (t >= chunk.end) continue;
    const auto value = LoadPack<2>(b.columns.v + t * b.columns.stride + v);
    dot += low * value[0] + high * value[1];
    const float beta = m->gates.beta[row];
    StorePair(beta * low, beta * high,
              b.gradient.dv_THV + t * b.row_stride + b.column + v);
  }
  dot += __shfl_xor_sync(kAllLanes, dot, 1);
  dot += __shfl_xor_sync(kAllLanes, dot, 2);
  if (threadIdx.x % 4 == 0) m->dbeta[row] = dot;
}

// Turns dA and dW into the gradients of k k^T and q k^T.
__device__ void PassScores(BackwardMemory* m) {
  ScoresOfValues::Sums da = {}, dw = {};
  ScoresOfValues::Multiply(m->dr, m->u, &da);  // -dA.
  ScoresOfValues::Multiply(m->dout, m->u, &dw);
  ScoresOfValues::ForPairs(da, [&](int row, int column, float a, float b) {
    const float minus_beta = -m->gates.beta[row];
    const auto pass = [&](int i, float x) {
      m->kk[row][i] *= -x;
      return i < row ? minus_beta * m->gates.Decay(row, i) * x : 0.0F;
    };
    m->p.Set(row, column, pass(column, a), pass(column + 1, b));
  });
  ScoresOfValues::ForPairs(dw, [&](int row, int column, float a, float b) {
    const Pack<Bf16, 2> w = *m->w.At(row, column);
    m->dw_w[row][column] = w[0] * a;
    m->dw_w[row][column + 1] = w[1] * b;
    m->w.Set(row, column, a * m->gates.Decay(row, column),
             b * m->gates.Decay(row, column + 1));
  });
}

// Sums the products of A and W with their gradients over rows and columns.
// Every e^(G_t - G_i) gives its product to G_t, and the negative of it to G_i.
__device__ void SumScores(BackwardMemory* m) {
  const auto t = static_cast<int>(threadIdx.x);
  if (t >= kRows) return;
  float of_row = 0, of_column = 0, of_beta = 0;
  for (int i = 0; i < kRows; ++i) {
    of_beta += m->kk[t][i];
    of_row += m->dw_w[t][i];
    of_column += m->dw_w[i][t] + m->gates.beta[i] * m->kk[i][t];
  }
  m->dbeta[t] += of_beta;
  m->dsum[t] = of_row + m->gates.beta[t] * of_beta - of_column;
}

// Writes the dot products of the rows of `sums` with rows of q or k to `parts`.
__device__ void DotRows(const KeysOfState::Sums& sums, KeyRows* with,
                        float (*parts)[KeysOfState::kWarpsAcross]) {
  float dots[KeysOfState::kRowFragments][2] = {};
#pragma unroll
  for (int i = 0; i < KeysOfState::kRowFragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          KeysOfState::FirstRow() + i * kFragment + half * 8 + Lane() / 4;
#pragma unroll
      for (int j = 0; j < KeysOfState::kColumnFragments; ++j) {
        const Pack<Bf16, 2> x = *with->At(
            row, KeysOfState::FirstColumn() + j * kChunk + Lane() % 4 * 2);
        dots[i][half] +=
            x[0] * sums.of[i][j][2 * half] + x[1] * sums.of[i][j][2 * half + 1];
      }
      float& dot = dots[i][half];
      dot += __shfl_xor_sync(kAllLanes, dot, 1);
      dot += __shfl_xor_sync(kAllLanes, dot, 2);
      if (Lane() % 4 == 0) {
        parts[row][WarpIndex() % KeysOfState::kWarpsAcross] = dot;
      }
    }
  }
}

// Writes the sums of a chunk's rows to [V / 64, T, H, K].
__device__ void WriteKeys(const Block& b, const DeltaChunkRange& chunk,
                          const KeysOfState::Sums& sums, float* to) {
  KeysOfState::ForPairs(sums, [&](int row, int i, float low, float high) {
    if (chunk.begin + row >= chunk.end) return;
    StorePair(low, high, to + b.Gate(chunk.begin + row) * kKeys + i);
  });
}

// Writes the gradients of q and k.
__device__ void PassKeys(const Block& b, const DeltaChunkRange& chunk,
                         BackwardMemory* m) {
  KeysOfState::Sums sums = {};
  KeysOfState::Multiply(m->dout, m->start, &sums);
  DotRows(sums, &m->q, m->parts[0]);
  ScaleRows<KeysOfState>(m->gates.from_start, &sums);
  KeysOfScores::Multiply(m->w, m->k.Transposed(), &sums);
  WriteKeys(b, chunk, sums, b.gradient.dq);

  KeysOfState::Sums stop = {};
  sums = {};
  KeysOfState::Multiply(m->dr, m->start, &sums);
  DotRows(sums, &m->k, m->parts[1]);
  KeysOfState::Multiply(m->u, m->dstop, &stop);
  DotRows(stop, &m->k, m->parts[2]);
  ChangePairs<KeysOfState>(&sums, [&](int row, int, float* low, float* high) {
    const float factor = -m->gates.beta[row] * m->gates.from_start[row];
    *low *= factor;
    *high *= factor;
  });
  ScaleRows<KeysOfState>(m->gates.to_end, &stop);
#pragma unroll
  for (int i = 0; i < KeysOfState::kRowFragments; ++i) {
#pragma unroll
    for (int j = 0; j < KeysOfState::kColumnFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.of[i][j][e] += stop.of[i][j][e];
    }
  }
  KeysOfScores::Multiply(m->p, m->k.Transposed(), &sums);
  KeysOfScoresT::Multiply(m->p.Transposed(), m->k.Transposed(), &sums);
  KeysOfScoresT::Multiply(m->w.Transposed(), m->q.Transposed(), &sums);
  WriteKeys(b, chunk, sums, b.gradient.dk);
}

// Writes the gradients of the gates. `states` is the sum of S0 dS1.
__device__ void PassGates(const Block& b, const DeltaChunkRange& chunk,
                          float states, BackwardMemory* m) {
  const auto t = static_cast<int>(threadIdx.x);
  const auto dot = [&](int n, int row) {
    float sum = 0;
    for (int i = 0; i < KeysOfState::kWarpsAcross; ++i) {
      sum += m->parts[n][row][i];
    }
    return sum;
  };
  if (t < kRows) {
    const float decay = m->gates.from_start[t];
    const float read = decay * dot(1, t);
    m->dbeta[t] -= read;
    m->dsum[t] += decay * dot(0, t) - m->gates.beta[t] * read -
                  m->gates.to_end[t] * dot(2, t);
    if (chunk.begin + t < chunk.end) {
      b.gradient.dbeta[b.Gate(chunk.begin + t)] = m->dbeta[t];
    }
  }
  __syncthreads();
  if (t != 0) return;
  // The gradient of the last G is that of all g.
  float dg = m->gates.whole() * states;
  for (int i = 0; i < kRows; ++i) dg += m->gates.to_end[i] * dot(2, i);
  for (int i = kRows - 1; i >= 0; --i) {
    dg += m->dsum[i];
    if (chunk.begin + i < chunk.end) {
      b.gradient.dg[b.Gate(chunk.begin + i)] = dg;
    }
  }
}

// Adds the gradient of the state before the chunk, given that of the state
// after it, or replaces it if both are at one place. Overwrites dout and dr.
__device__ void PassState(const Block& b, const DeltaChunkRange& chunk,
                          const float* dstop, float* dstart,
                          BackwardMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const auto values = static_cast<int>(b.rows.value_features);
  const Bf16* dout = static_cast<const Bf16*>(b.gradient.dout_THV) +
                     chunk.begin * b.row_stride + b.column;
  __syncthreads();
  ForElements<kRows, kSlice>([&](int row, int v) {
    const float decay = m->gates.from_start[row];
    const float factor = -decay * m->gates.beta[row];
    Pack<Bf16, 2> pair = {};
    if (row < size) pair = LoadPack<2>(dout + row * b.row_stride + v);
    m->dout.Set(row, v, decay * pair[0], decay * pair[1]);
    m->dr.Set(row, v, factor * m->x[row][v], factor * m->x[row][v + 1]);
  });
  __syncthreads();
  StateOfRows::Sums sums = {};
  if (dstop) LoadState(dstop, values, m->gates.whole(), &sums);
  StateOfRows::Multiply(m->q.Transposed(), m->dout.Transposed(), &sums);
  StateOfRows::Multiply(m->k.Transposed(), m->dr.Transposed(), &sums);
  StateOfRows::ForPairs(sums, [&](int k, int v, float low, float high) {
    float* to = dstart + k * values + v;
    Pack<float, 2> before = {};
    if (dstart != dstop) before = LoadPack<2>(to);
    StorePair(before[0] + low, before[1] + high, to);
  });
}

__global__ void __launch_bounds__(kThreads)
    DeltaChunkBackwardKernel(DeltaRuleRows rows, DeltaTrees trees,
                             DeltaChunksGradient gradient) {
  auto* m = static_cast<BackwardMemory*>(DynamicShared());
  const Block b(rows, gradient);
  for (int64_t n = trees.tree_chunks[b.place.tree + 1];
       n-- > trees.tree_chunks[b.place.tree];) {
    const DeltaChunkRange chunk = trees.chunks[n];
    const float* dstop =
        StateOf(gradient.dstates_SHKV, chunk.stop, rows, b.place);
    __syncthreads();
    const float states = BlockReduce(
        LoadOperands(
            b, chunk,
            StateOf(gradient.states_SHKV, gradient.starts[n], rows, b.place),
            dstop, m),
        Add());
    FillScores(m->q, m->k, m->gates, &m->w, m->kk);
    __syncthreads();
    PassResidual(b, chunk, m);
    __syncthreads();
    PassScores(m);
    __syncthreads();
    SumScores(m);
    PassKeys(b, chunk, m);
    __syncthreads();
    PassGates(b, chunk, states, m);
    if (chunk.start < 0) continue;
    PassState(b, chunk, dstop,
              StateOf(gradient.dstates_SHKV, chunk.start, rows, b.place), m);
  }
}

}  // namespace
}  // namespace delta

int64_t DeltaChunksSharedBytes() { return sizeof(delta::BackwardMemory); }

cudaError_t RunDeltaChunksBackward(const DeltaRuleRows& rows,
                                   const DeltaTrees& trees,
                                   const DeltaChunksGradient& gradient,
                                   cudaStream_t stream) {
  if (!TakesDeltaChunks(rows.key_features, rows.value_features)) {
    return cudaErrorInvalidValue;
  }
  if (trees.num_trees == 0) return cudaSuccess;
  return LaunchShaped(delta::DeltaChunkBackwardKernel,
                      {.grid_x = trees.num_trees * rows.num_value_heads,
                       .grid_y = rows.value_features / delta::kSlice,
                       .threads = delta::kThreads,
                       .shared_bytes = sizeof(delta::BackwardMemory)},
                      stream, rows, trees, gradient);
}

}  // namespace weft::kernels::cuda
