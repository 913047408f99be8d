#include "kernels/cuda/delta/delta_chunk.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

struct StatesMemory {
  KeyRows q;
  KeyRows k;
  ValueRows dout;
  ValueRows dr;  // dR, and before that the gradient of U.
  Scores w;
  Scores inverse;
  Scores rest;
  State dstop;
  Gates gates;
};

// Starts the copies of a chunk's operands, and fills its gates.
__device__ void LoadOperands(const GradientBlock& b,
                             const DeltaChunkRange& chunk, StatesMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const int64_t at = chunk.begin * b.columns.stride;
  const int64_t scores = ScoresAt(b.scores, b.place.head, chunk.begin);
  CopyRows(b.columns.k + at, b.columns.stride, size, &m->k);
  CopyRows(Bf16Of(b.scores.w_HTC) + scores, kRows, size, &m->w);
  CopyRows(Bf16Of(b.gradient.dout_THV) + chunk.begin * b.row_stride + b.column,
           b.row_stride, size, &m->dout);
  CopyRows(Bf16Of(b.scores.inverse_HTC) + scores, kRows, size, &m->inverse);
  CopyRows(Bf16Of(b.scores.rest_HTC) + scores, kRows, size, &m->rest);
  CopyRows(b.columns.q + at, b.columns.stride, size, &m->q);
  EndCopyGroup();
  if (WarpIndex() == 0) m->gates.Fill(b.rows, chunk, b.place.head);
}

// Fills and writes dR, the gradient of diag(beta) (V - ...), and writes dv.
__device__ void PassResidual(const GradientBlock& b,
                             const DeltaChunkRange& chunk, StatesMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const int64_t at = chunk.begin * b.row_stride + b.column;
  ValuesOfState::Sums du = {};
  ValuesOfState::Multiply(m->k, m->dstop.Transposed(), &du);
  ScaleRows<ValuesOfState>(m->gates.to_end, &du);
  ValuesOfScoresT::Multiply(m->w.Transposed(), m->dout.Transposed(), &du);
  ValuesOfState::ForPairs(du, [&](int row, int v, float low, float high) {
    m->dr.Set(row, v, low, high);
  });
  __syncthreads();
  ValuesOfScoresT::Sums dr = {};
  ValuesOfScoresT::Multiply(m->inverse.Transposed(), m->dr.Transposed(), &dr);
  ValuesOfScoresT::Multiply(m->rest.Transposed(), m->dr.Transposed(), &dr);
  __syncthreads();
  ValuesOfScoresT::ForPairs(dr, [&](int row, int v, float low, float high) {
    m->dr.Set(row, v, low, high);
    const float beta = m->gates.beta[row];
    if (row < size) {
      StorePair(beta * low, beta * high,
                b.gradient.dv_THV + at + row * b.row_stride + v);
    }
  });
  __syncthreads();
  WriteRows(&m->dr, b.row_stride, size, Bf16Of(b.gradient.dr_THV) + at);
}

// Multiplies the rows of dout and dR by their factors in the gradient of the
// start state. A thread has the chunks that WriteRows gave it.
__device__ void ScaleRowsForState(StatesMemory* m) {
  const auto scale = [&](ValueRows* rows, auto factor_of) {
    ForChunks(rows, [&](int row, int, Pack<Bf16, kChunk>* at) {
      const float factor = factor_of(row);
      Pack<Bf16, kChunk> pack = *at;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) pack.Set(e, factor * pack[e]);
      *at = pack;
    });
  };
  scale(&m->dout, [&](int row) { return m->gates.from_start[row]; });
  scale(&m->dr, [&](int row) {
    return -m->gates.from_start[row] * m->gates.beta[row];
  });
}

// Chunks are in reverse order.
__global__ void __launch_bounds__(kThreads, 2)
    DeltaStatesBackwardKernel(DeltaRuleRows rows, DeltaTrees trees,
                              DeltaScores scores,
                              DeltaChunksGradient gradient) {
  auto* m = static_cast<StatesMemory*>(DynamicShared());
  const GradientBlock b(rows, scores, gradient);
  const auto values = static_cast<int>(rows.value_features);
  // The gradient of the state after a chunk. It stays in registers if the chunk
  // before is in the same node, whose states have one place.
  StateOfRows::Sums state;
  bool is_held = false;
  for (int64_t n = trees.tree_chunks[b.place.index + 1];
       n-- > trees.tree_chunks[b.place.index];) {
    const DeltaChunkRange chunk = trees.chunks[n];
    __syncthreads();
    LoadOperands(b, chunk, m);
    if (chunk.stop < 0) {
      state = {};
    } else if (!is_held) {
      LoadState(StateOf(gradient.dstates_SHKV, chunk.stop, rows, b.place),
                values, &state);
    }
    StateOfRows::ForPairs(state, [&](int k, int v, float low, float high) {
      m->dstop.Set(k, v, low, high);
    });
    WaitForCopies<0>();
    __syncthreads();
    if (chunk.stop >= 0) {
      WriteRows(&m->dstop, values, kKeys,
                StateOf(Bf16Of(gradient.dstops_SHKV),
                        gradient.kept_chunks[n].stop, rows, b.place));
    }
    PassResidual(b, chunk, m);
    is_held = chunk.start >= 0 && chunk.start == chunk.stop;
    if (chunk.start < 0) continue;
    ScaleRowsForState(m);
    ScaleState(m->gates.whole(), &state);
    __syncthreads();
    StateOfRows::Multiply(m->q.Transposed(), m->dout.Transposed(), &state);
    StateOfRows::Multiply(m->k.Transposed(), m->dr.Transposed(), &state);
    if (is_held) continue;
    float* dstart = StateOf(gradient.dstates_SHKV, chunk.start, rows, b.place);
    StateOfRows::ForPairs(state, [&](int k, int v, float low, float high) {
      float* to = dstart + k * values + v;
      const auto before = LoadPack<2>(to);
      StorePair(before[0] + low, before[1] + high, to);
    });
  }
}

}  // namespace
}  // namespace delta

cudaError_t RunDeltaStatesBackward(const DeltaRuleRows& rows,
                                   const DeltaTrees& trees,
                                   const DeltaScores& scores,
                                   const DeltaChunksGradient& gradient,
                                   cudaStream_t stream) {
  return delta::LaunchBlocks<delta::StatesMemory>(
      delta::DeltaStatesBackwardKernel, trees.num_trees,
      rows.value_features / delta::kSlice, stream, rows, trees, scores,
      gradient);
}

}  // namespace weft::kernels::cuda
