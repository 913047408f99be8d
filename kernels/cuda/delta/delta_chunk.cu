#include "kernels/cuda/delta/delta_chunk.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

struct ForwardMemory {
  KeyRows q;
  KeyRows k;
  State state;  // Before the chunk.
  Scores w;
  Scores inverse;
  Scores rest;
  ValueRows u;  // U, and before that V and diag(beta) (V - ...).
  ValueRows u_to_end;
  Gates gates;
};

// Starts the copies of a chunk's operands, and fills its gates.
__device__ void LoadOperands(const Block& b, const DeltaChunkRange& chunk,
                             ForwardMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const int64_t at = chunk.begin * b.columns.stride;
  const int64_t scores = ScoresAt(b.scores, b.place.head, chunk.begin);
  CopyRows(b.columns.k + at, b.columns.stride, size, &m->k);
  CopyRows(b.columns.v + at, b.columns.stride, size, &m->u);
  CopyRows(b.columns.q + at, b.columns.stride, size, &m->q);
  CopyRows(Bf16Of(b.scores.inverse_HTC) + scores, kRows, size, &m->inverse);
  CopyRows(Bf16Of(b.scores.rest_HTC) + scores, kRows, size, &m->rest);
  CopyRows(Bf16Of(b.scores.w_HTC) + scores, kRows, size, &m->w);
  EndCopyGroup();
  if (WarpIndex() == 0) m->gates.Fill(b.rows, chunk, b.place.head);
}

// Fills U, given V.
__device__ void SolveChunk(ForwardMemory* m) {
  ValuesOfState::Sums sums = {};
  ValuesOfState::Multiply(m->k, m->state.Transposed(), &sums);
  ValuesOfState::ForPairs(sums, [&](int row, int v, float low, float high) {
    const Pack<Bf16, 2> value = *m->u.At(row, v);
    const float beta = m->gates.beta[row], decay = m->gates.from_start[row];
    m->u.Set(row, v, beta * (value[0] - decay * low),
             beta * (value[1] - decay * high));
  });
  __syncthreads();
  ValuesOfScores::Sums u = {};
  ValuesOfScores::Multiply(m->inverse, m->u.Transposed(), &u);
  ValuesOfScores::Multiply(m->rest, m->u.Transposed(), &u);
  __syncthreads();
  ValuesOfScores::ForPairs(u, [&](int row, int v, float low, float high) {
    const float factor = m->gates.to_end[row];
    m->u.Set(row, v, low, high);
    m->u_to_end.Set(row, v, factor * low, factor * high);
  });
}

// Writes the outputs of a chunk, and U if it is wanted.
__device__ void WriteOutputs(const Block& b, const DeltaChunkRange& chunk,
                             const DeltaChunksOutput& outputs,
                             ForwardMemory* m) {
  const auto size = static_cast<int>(chunk.end - chunk.begin);
  const int64_t at = chunk.begin * b.row_stride + b.column;
  if (outputs.u_THV) {
    WriteRows(&m->u, b.row_stride, size, Bf16Of(outputs.u_THV) + at);
  }
  ValuesOfState::Sums out = {};
  ValuesOfState::Multiply(m->q, m->state.Transposed(), &out);
  ScaleRows<ValuesOfState>(m->gates.from_start, &out);
  ValuesOfScores::Multiply(m->w, m->u.Transposed(), &out);
  Bf16* to = Bf16Of(outputs.out_THV) + at;
  ValuesOfScores::ForPairs(out, [&](int row, int v, float low, float high) {
    if (row < size) StorePair(low, high, to + row * b.row_stride + v);
  });
}

__global__ void __launch_bounds__(kThreads, 2)
    DeltaChunkKernel(DeltaRuleRows rows, DeltaTrees trees, DeltaScores scores,
                     DeltaChunksOutput to) {
  auto* m = static_cast<ForwardMemory*>(DynamicShared());
  const Block b(rows, scores);
  const auto values = static_cast<int>(rows.value_features);
  // The state with the index `held` stays in registers, because the next chunk
  // mostly starts with it.
  StateOfRows::Sums state;
  int64_t held = -1;
  const int64_t end = trees.tree_chunks[b.place.index + 1];
  for (int64_t n = trees.tree_chunks[b.place.index]; n < end; ++n) {
    const DeltaChunkRange chunk = trees.chunks[n];
    __syncthreads();
    LoadOperands(b, chunk, m);
    if (chunk.start < 0) {
      state = {};
    } else if (chunk.start != held) {
      LoadState(StateOf(to.states_SHKV, chunk.start, rows, b.place), values,
                &state);
    }
    StateOfRows::ForPairs(state, [&](int k, int v, float low, float high) {
      m->state.Set(k, v, low, high);
    });
    WaitForCopies<0>();
    __syncthreads();
    SolveChunk(m);
    __syncthreads();
    WriteOutputs(b, chunk, to, m);
    held = chunk.stop;
    if (held < 0) continue;
    ScaleState(m->gates.whole(), &state);
    StateOfRows::Multiply(m->k.Transposed(), m->u_to_end.Transposed(), &state);
    // The next chunk writes the state if it replaces it.
    if (n + 1 < end && trees.chunks[n + 1].start == held &&
        trees.chunks[n + 1].stop == held) {
      continue;
    }
    float* stop = StateOf(to.states_SHKV, held, rows, b.place);
    StateOfRows::ForPairs(state, [&](int k, int v, float low, float high) {
      StorePair(low, high, stop + k * values + v);
    });
  }
}

}  // namespace
}  // namespace delta

cudaError_t RunDeltaChunks(const DeltaRuleRows& rows, const DeltaTrees& trees,
                           const DeltaScores& scores,
                           const DeltaChunksOutput& to, cudaStream_t stream) {
  return delta::LaunchBlocks<delta::ForwardMemory>(
      delta::DeltaChunkKernel, trees.num_trees,
      rows.value_features / delta::kSlice, stream, rows, trees, scores, to);
}

}  // namespace weft::kernels::cuda
