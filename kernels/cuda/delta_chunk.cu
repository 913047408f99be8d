#include "kernels/cuda/delta_chunk.cuh"
#include "kernels/cuda/launch.cuh"

namespace weft::kernels::cuda {
namespace delta {
namespace {

struct ForwardMemory {
  KeyRows q;
  KeyRows k;
  State state;  // Before the chunk.
  Scores w;
  ValueRows u;
  float kk[kRows][kRows + 1];
  float x[kRows][kStride];  // U, and before that diag(beta) (V - ...).
  Gates gates;
};

// Fills x with diag(beta) (V - diag(e^G) K S0), and solves it. Returns diag(e^G)
// Q S0.
__device__ ValuesOfState::Sums SolveChunk(const Columns& columns,
                                          const DeltaChunkRange& chunk,
                                          ForwardMemory* m) {
  ValuesOfState::Sums sums = {};
  ValuesOfState::MultiplyTiles(m->k, m->state.Transposed(), &sums);
  ValuesOfState::ForPairs(sums, [&](int row, int column, float a, float b) {
    Pack<float, 2> v = {};
    if (row < chunk.end - chunk.begin) {
      v = LoadPack<2>(columns.v + (chunk.begin + row) * columns.stride +
                      column);
    }
    const float beta = m->gates.beta[row], decay = m->gates.from_start[row];
    m->x[row][column] = beta * (v[0] - decay * a);
    m->x[row][column + 1] = beta * (v[1] - decay * b);
  });
  sums = {};
  ValuesOfState::MultiplyTiles(m->q, m->state.Transposed(), &sums);
  ScaleRows<ValuesOfState>(m->gates.from_start, &sums);
  __syncthreads();
  Solve<false>(m->kk, m->gates, m->x);
  __syncthreads();
  return sums;
}

// Computes the state after the chunk from that before it, in `state`.
__device__ void AdvanceState(ForwardMemory* m, StateOfRows::Sums* state) {
  __syncthreads();
  ForElements<kRows, kSlice>([&](int row, int column) {
    const float factor = m->gates.to_end[row];
    m->u.Set(row, column, factor * m->x[row][column],
             factor * m->x[row][column + 1]);
  });
  __syncthreads();
  const float whole = m->gates.whole();
  ChangePairs<StateOfRows>(state, [&](int, int, float* low, float* high) {
    *low *= whole;
    *high *= whole;
  });
  StateOfRows::MultiplyTiles(m->k.Transposed(), m->u.Transposed(), state);
}

struct Output {
  float* states_SHKV;
  float* u_THV;
  Bf16* out_THV;
};

__global__ void __launch_bounds__(kThreads, 2)
    DeltaChunkKernel(DeltaRuleRows rows, DeltaTrees trees, Output to) {
  auto* m = static_cast<ForwardMemory*>(DynamicShared());
  const Place place(rows);
  const Columns columns(rows, place);
  const int64_t values = rows.value_features;
  const int64_t row_stride = rows.num_value_heads * values;
  const int64_t column = place.head * values + place.slice * kSlice;
  StateOfRows::Sums state = {};
  int64_t held = -1;  // The index of `state`.
  for (int64_t n = trees.tree_chunks[place.tree];
       n < trees.tree_chunks[place.tree + 1]; ++n) {
    const DeltaChunkRange chunk = trees.chunks[n];
    const int64_t size = chunk.end - chunk.begin;
    __syncthreads();
    if (WarpIndex() == 0) m->gates.Fill(rows, chunk, place.head);
    const int64_t at = chunk.begin * columns.stride;
    CopyRows(columns.q + at, columns.stride, size, &m->q);
    CopyRows(columns.k + at, columns.stride, size, &m->k);
    if (chunk.start < 0 || chunk.start != held) {
      LoadState(chunk.start < 0
                    ? nullptr
                    : StateOf(to.states_SHKV, chunk.start, rows, place),
                values, &state);
    }
    StateOfRows::ForPairs(state, [&](int k, int v, float a, float b) {
      m->state.Set(k, v, a, b);
    });
    __syncthreads();
    FillScores(m->q, m->k, m->gates, &m->w, m->kk);
    ValuesOfState::Sums out = SolveChunk(columns, chunk, m);
    ForElements<kRows, kSlice>([&](int row, int v) {
      m->u.Set(row, v, m->x[row][v], m->x[row][v + 1]);
      if (to.u_THV == nullptr || row >= size) return;
      StorePair(m->x[row][v], m->x[row][v + 1],
                to.u_THV + (chunk.begin + row) * row_stride + column + v);
    });
    __syncthreads();
    ValuesOfScores::MultiplyTiles(m->w, m->u.Transposed(), &out);
    ValuesOfScores::ForPairs(out, [&](int row, int v, float a, float b) {
      if (row >= size) return;
      StorePair(a, b,
                to.out_THV + (chunk.begin + row) * row_stride + column + v);
    });
    held = -1;
    if (chunk.stop < 0) continue;
    AdvanceState(m, &state);
    held = chunk.stop;
    float* stop = StateOf(to.states_SHKV, chunk.stop, rows, place);
    StateOfRows::ForPairs(state, [&](int k, int v, float a, float b) {
      StorePair(a, b, stop + k * values + v);
    });
  }
}

}  // namespace
}  // namespace delta

cudaError_t RunDeltaChunks(const DeltaRuleRows& rows, const DeltaTrees& trees,
                           float* states_SHKV, float* u_THV, void* out_THV,
                           cudaStream_t stream) {
  if (!TakesDeltaChunks(rows.key_features, rows.value_features)) {
    return cudaErrorInvalidValue;
  }
  if (trees.num_trees == 0) return cudaSuccess;
  return LaunchShaped(
      delta::DeltaChunkKernel,
      {.grid_x = trees.num_trees * rows.num_value_heads,
       .grid_y = rows.value_features / delta::kSlice,
       .threads = delta::kThreads,
       .shared_bytes = sizeof(delta::ForwardMemory)},
      stream, rows, trees,
      delta::Output{states_SHKV, u_THV, static_cast<__nv_bfloat16*>(out_THV)});
}

}  // namespace weft::kernels::cuda
