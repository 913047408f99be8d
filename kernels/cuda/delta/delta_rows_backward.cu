#include "kernels/cuda/delta/delta_chunk.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

// As on the CPU (kernels/cpu/gated_delta_backward_body.h), terms of the
// gradients of beta and G are dot products of rows of q and k with rows of dR
// S0^T, dO S0^T and U dS1^T.
struct RowsMemory {
  KeyRows q;
  KeyRows k;
  ValueRows dout;
  ValueRows u;
  ValueRows dr;
  Scores w;     // W, and then the gradient of q k^T.
  Scores p;     // The gradient of k k^T, below the diagonal.
  State state;  // The gradient of the end state, and then the start state.
  // Partial sums, of several warps, of the rows of three dot products.
  float parts[3][kRows][KeysOfState::kWarpsAcross];
  // Those of the products of A with its gradient.
  float a_parts[kRows][ScoresOfKeys::kWarpsAcross];
  // Those of the exponents' gradients, by rows and by columns.
  float row_parts[kRows][ScoresOfKeys::kWarpsAcross];
  float column_parts[kRows][ScoresOfKeys::kWarpsDown];
  float dr_v[kRows];  // The dot products of the rows of dR and V.
  Gates gates;
};

static_assert(sizeof(RowsMemory) + kMaxWarps * sizeof(float) <=
              kBlockSharedBytes);

// Starts the copies of a chunk's operands, and fills its gates.
__device__ void LoadOperands(const GradientBlock& b,
                             const DeltaChunkRange& chunk, RowsMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const int64_t at = chunk.begin * b.columns.stride;
  const int64_t value = chunk.begin * b.row_stride + b.column;
  CopyRows(b.columns.k + at, b.columns.stride, size, &m->k);
  CopyRows(b.columns.q + at, b.columns.stride, size, &m->q);
  CopyRows(Bf16Of(b.gradient.u_THV) + value, b.row_stride, size, &m->u);
  CopyRows(Bf16Of(b.gradient.dr_THV) + value, b.row_stride, size, &m->dr);
  CopyRows(Bf16Of(b.gradient.dout_THV) + value, b.row_stride, size, &m->dout);
  CopyRows(
      Bf16Of(b.scores.w_HTC) + ScoresAt(b.scores, b.place.head, chunk.begin),
      kRows, size, &m->w);
  const Bf16* dstop =
      StateOf(Bf16Of(b.gradient.dstops_SHKV), chunk.stop, b.rows, b.place);
  // Without an end state reads nothing.
  CopyRows(dstop ? dstop : b.columns.k, b.rows.value_features,
           dstop ? kKeys : 0, &m->state);
  EndCopyGroup();
  if (WarpIndex() == 0) m->gates.Fill(b.rows, chunk, b.place.head);
}

// Returns the sum of a value over the four lanes of a row of a tile.
__device__ float SumLanesOfRow(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Calls row_sum(row, warp, sum) with the sums, over the warp's columns, of
// of(row, column, low, high) for all rows. `warp` is the warp's number across.
template <typename Tile>
__device__ void SumRows(const typename Tile::Sums& sums, auto of,
                        auto row_sum) {
#pragma unroll
  for (int i = 0; i < Tile::kRowFragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Tile::FirstRow() + i * kFragment + half * 8 + Lane() / 4;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < Tile::kColumnFragments; ++j) {
        sum += of(row, Tile::FirstColumn() + j * kChunk + Lane() % 4 * 2,
                  sums.of[i][j][2 * half], sums.of[i][j][2 * half + 1]);
      }
      sum = SumLanesOfRow(sum);
      if (Lane() % 4 == 0) {
        row_sum(row, WarpIndex() % Tile::kWarpsAcross, sum);
      }
    }
  }
}

// Writes the dot products of the rows of dR and V. Four lanes share a row.
__device__ void DotValues(const GradientBlock& b, const DeltaChunkRange& chunk,
                          RowsMemory* m) {
  const int row = static_cast<int>(threadIdx.x) / 4;
  const int64_t t = chunk.begin + row;
  float dot = 0;
  for (int part = static_cast<int>(threadIdx.x) % 4; part < kSlice / kChunk;
       part += 4) {
    if (t >= chunk.end) continue;
    const auto v =
        LoadPack<kChunk>(b.columns.v + t * b.columns.stride + part * kChunk);
    const auto& dr = *ChunkAt(&m->dr, row, part);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) dot += dr[e] * v[e];
  }
  dot = SumLanesOfRow(dot);
  if (threadIdx.x % 4 == 0) m->dr_v[row] = dot;
}

// Writes the sums over the warp's rows of all its columns.
__device__ void SumColumns(const ScoresOfKeys::Sums& sums, RowsMemory* m) {
#pragma unroll
  for (int j = 0; j < ScoresOfKeys::kColumnFragments; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < ScoresOfKeys::kRowFragments; ++i) {
        sum += sums.of[i][j][e] + sums.of[i][j][2 + e];
      }
      for (int offset = 4; offset < kWarp; offset *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, offset);
      }
      const int column =
          ScoresOfKeys::FirstColumn() + j * kChunk + Lane() % 4 * 2 + e;
      if (Lane() < 4) {
        m->column_parts[column][WarpIndex() / ScoresOfKeys::kWarpsAcross] = sum;
      }
    }
  }
}

// Turns dA and dW into the gradients of k k^T and q k^T. Every e^(G_t - G_i)
// gives its product with its gradient to G_t, and the negative of it to G_i.
// Writes the sums of these products over rows and columns.
__device__ void PassScores(RowsMemory* m) {
  ScoresOfKeys::Sums kk = {};
  ScoresOfKeys::Multiply(m->k, m->k, &kk);
  ScoresOfValues::Sums da = {}, dw = {};
  ScoresOfValues::Multiply(m->dr, m->u, &da);  // -dA.
  ScoresOfValues::Multiply(m->dout, m->u, &dw);
  // Replaces kk by the products with dA, da by the gradient of kk, and dw by
  // the exponents' gradients.
#pragma unroll
  for (int i = 0; i < ScoresOfKeys::kRowFragments; ++i) {
#pragma unroll
    for (int j = 0; j < ScoresOfKeys::kColumnFragments; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t =
            ScoresOfKeys::FirstRow() + i * kFragment + half * 8 + Lane() / 4;
        const int column =
            ScoresOfKeys::FirstColumn() + j * kChunk + Lane() % 4 * 2;
        const float beta = m->gates.beta[t];
        const Pack<Bf16, 2> w = *m->w.At(t, column);
        float dqk[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = kk.of[i][j][2 * half + e];
          float& a = da.of[i][j][2 * half + e];
          float& d = dw.of[i][j][2 * half + e];
          const float decay = m->gates.Decay(t, column + e);
          const float below = column + e < t ? decay : 0.0F;
          x *= -below * a;
          a *= -beta * below;
          dqk[e] = d * decay;
          d = d * w[e] + beta * x;
        }
        m->w.Set(t, column, dqk[0], dqk[1]);
      }
    }
  }
  const auto pair = [](int, int, float low, float high) { return low + high; };
  SumRows<ScoresOfKeys>(kk, pair, [&](int row, int warp, float sum) {
    m->a_parts[row][warp] = sum;
  });
  SumRows<ScoresOfKeys>(dw, pair, [&](int row, int warp, float sum) {
    m->row_parts[row][warp] = sum;
  });
  SumColumns(dw, m);
  ScoresOfKeys::ForPairs(da, [&](int row, int column, float low, float high) {
    m->p.Set(row, column, low, high);
  });
}

// Writes the dot products of the rows of `sums` with rows of q or k to `parts`.
__device__ void DotRows(const KeysOfState::Sums& sums, KeyRows* with,
                        float (*parts)[KeysOfState::kWarpsAcross]) {
  SumRows<KeysOfState>(
      sums,
      [&](int row, int column, float low, float high) {
        const Pack<Bf16, 2> x = *with->At(row, column);
        return x[0] * low + x[1] * high;
      },
      [&](int row, int warp, float sum) { parts[row][warp] = sum; });
}

// Writes the sums of a chunk's rows to [V / 64, T, H, K].
__device__ void WriteKeys(const GradientBlock& b, const DeltaChunkRange& chunk,
                          const KeysOfState::Sums& sums, float* to) {
  KeysOfState::ForPairs(sums, [&](int row, int i, float low, float high) {
    if (chunk.begin + row >= chunk.end) return;
    StorePair(low, high, to + b.Gate(chunk.begin + row) * kKeys + i);
  });
}

// Replaces the gradient of the end state by the start state. Null: zeros.
// Returns the thread's part of the sum of their products.
__device__ float ReplaceState(const float* start, int64_t stride,
                              State* state) {
  float sum = 0;
  ForChunks(state, [&](int k, int chunk, Pack<Bf16, kChunk>* at) {
    Pack<float, kChunk> x = {};
    if (start) x = LoadPack<kChunk>(start + k * stride + chunk * kChunk);
    Pack<Bf16, kChunk> pack;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      pack.Set(e, x[e]);
      sum += x[e] * (*at)[e];
    }
    *at = pack;
  });
  return sum;
}

// Writes the gradients of q and k. `start` is the state before the chunk.
// Returns the thread's part of the sum of its products with the gradient of the
// state after the chunk.
__device__ float PassKeys(const GradientBlock& b, const DeltaChunkRange& chunk,
                          const float* start, RowsMemory* m) {
  KeysOfState::Sums dk = {};
  KeysOfState::Multiply(m->u, m->state, &dk);
  DotRows(dk, &m->k, m->parts[2]);
  ScaleRows<KeysOfState>(m->gates.to_end, &dk);
  KeysOfScores::Multiply(m->p, m->k.Transposed(), &dk);
  KeysOfScoresT::Multiply(m->p.Transposed(), m->k.Transposed(), &dk);
  KeysOfScoresT::Multiply(m->w.Transposed(), m->q.Transposed(), &dk);
  __syncthreads();
  const float states = ReplaceState(start, b.rows.value_features, &m->state);
  __syncthreads();
  KeysOfState::Sums read = {};
  KeysOfState::Multiply(m->dr, m->state, &read);
  DotRows(read, &m->k, m->parts[1]);
#pragma unroll
  for (int i = 0; i < KeysOfState::kRowFragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          KeysOfState::FirstRow() + i * kFragment + half * 8 + Lane() / 4;
      const float factor = m->gates.beta[row] * m->gates.from_start[row];
#pragma unroll
      for (int j = 0; j < KeysOfState::kColumnFragments; ++j) {
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          dk.of[i][j][e] -= factor * read.of[i][j][e];
        }
      }
    }
  }
  WriteKeys(b, chunk, dk, b.gradient.dk);

  KeysOfState::Sums dq = {};
  KeysOfState::Multiply(m->dout, m->state, &dq);
  DotRows(dq, &m->q, m->parts[0]);
  ScaleRows<KeysOfState>(m->gates.from_start, &dq);
  KeysOfScores::Multiply(m->w, m->k.Transposed(), &dq);
  WriteKeys(b, chunk, dq, b.gradient.dq);
  return states;
}

template <int kCount>
__device__ float SumParts(const float (&parts)[kCount]) {
  float sum = 0;
  for (const float part : parts) sum += part;
  return sum;
}

// Writes the gradients of the gates. `states` is the sum of S0 dS1. Warp 0
// calls it. A lane has two rows, and the first lane the last ones, because the
// gradient of g is a sum over later rows.
__device__ void PassGates(const GradientBlock& b, const DeltaChunkRange& chunk,
                          float states, const RowsMemory& m) {
  const int first = kRows - 2 - 2 * Lane();
  float dsum[2], to_end = 0;  // The gradients of G.
  for (int j = 0; j < 2; ++j) {
    const int t = first + j;
    const float beta = m.gates.beta[t], decay = m.gates.from_start[t];
    const float read = decay * SumParts(m.parts[1][t]);
    const float end = m.gates.to_end[t] * SumParts(m.parts[2][t]);
    dsum[j] = SumParts(m.row_parts[t]) - SumParts(m.column_parts[t]) +
              decay * SumParts(m.parts[0][t]) - beta * read - end;
    to_end += end;
    if (chunk.begin + t >= chunk.end) continue;
    b.gradient.dbeta[b.Gate(chunk.begin + t)] =
        m.dr_v[t] + SumParts(m.a_parts[t]) - read;
  }
  // The gradient of the last G is that of all g.
  const float last = m.gates.whole() * states + WarpReduce(to_end, Add());
  const float after = PrefixSum(dsum[0] + dsum[1]);
  for (int j = 0; j < 2; ++j) {
    const int64_t t = chunk.begin + first + j;
    if (t < chunk.end) {
      b.gradient.dg[b.Gate(t)] = last + after - (j > 0 ? dsum[0] : 0.0F);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    DeltaRowsBackwardKernel(DeltaRuleRows rows, DeltaScores scores,
                            DeltaChunksGradient gradient) {
  auto* m = static_cast<RowsMemory*>(DynamicShared());
  const GradientBlock b(rows, scores, gradient);
  const DeltaChunkRange chunk = gradient.kept_chunks[b.place.index];
  LoadOperands(b, chunk, m);
  WaitForCopies<0>();
  __syncthreads();
  DotValues(b, chunk, m);
  PassScores(m);
  __syncthreads();
  const float states = BlockReduce(
      PassKeys(b, chunk,
               StateOf(gradient.states_SHKV, chunk.start, rows, b.place), m),
      Add());
  if (WarpIndex() == 0) PassGates(b, chunk, states, *m);
}

}  // namespace
}  // namespace delta

cudaError_t RunDeltaRowsBackward(const DeltaRuleRows& rows,
                                 const DeltaTrees& trees,
                                 const DeltaScores& scores,
                                 const DeltaChunksGradient& gradient,
                                 cudaStream_t stream) {
  return delta::LaunchBlocks<delta::RowsMemory>(
      delta::DeltaRowsBackwardKernel, trees.num_chunks,
      rows.value_features / delta::kSlice, stream, rows, scores, gradient);
}

}  // namespace weft::kernels::cuda
