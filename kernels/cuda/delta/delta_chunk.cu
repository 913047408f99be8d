#include "kernels/cuda/delta/delta_chunk.cuh"
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

// Fills x with diag(beta) (V - diag(e^G) K S0), and solves it.
__device__ void SolveChunk(const Columns& columns, const DeltaChunkRange& chunk,
                           ForwardMemory* m) {
  ValuesOfState::Sums sums = {};
  ValuesOfState::Multiply(m->k, m->state.Transposed(), &sums);
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
  __syncthreads();
  Solve<false>(m->kk, m->gates, m->x);
  __syncthreads();
}

// Writes the state after the chunk. `start` is null for zeros.
__device__ void AdvanceState(const float* start, int values, ForwardMemory* m,
                             float* stop) {
  __syncthreads();
  ForElements<kRows, kSlice>([&](int row, int column) {
    const float factor = m->gates.to_end[row];
    m->u.Set(row, column, factor * m->x[row][column],
             factor * m->x[row][column + 1]);
  });
  StateOfRows::Sums state = {};
  if (start) LoadState(start, values, m->gates.whole(), &state);
  __syncthreads();
  StateOfRows::Multiply(m->k.Transposed(), m->u.Transposed(), &state);
  StateOfRows::ForPairs(state, [&](int k, int v, float low, float high) {
    StorePair(low, high, stop + k * values + v);
  });
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
  const auto values = static_cast<int>(rows.value_features);
  const int row_stride = static_cast<int>(rows.num_value_heads) * values;
  const int64_t column = place.head * values + place.slice * kSlice;
  for (int64_t n = trees.tree_chunks[place.tree];
       n < trees.tree_chunks[place.tree + 1]; ++n) {
    const DeltaChunkRange chunk = trees.chunks[n];
    const auto size = static_cast<int>(chunk.end - chunk.begin);
    __syncthreads();
    if (WarpIndex() == 0) m->gates.Fill(rows, chunk, place.head);
    const int64_t at = chunk.begin * columns.stride;
    const int64_t value = chunk.begin * row_stride + column;
    float* u = to.u_THV ? to.u_THV + value : nullptr;
    Bf16* out_rows = to.out_THV + value;
    CopyRows(columns.q + at, columns.stride, size, &m->q);
    CopyRows(columns.k + at, columns.stride, size, &m->k);
    const float* start = StateOf(to.states_SHKV, chunk.start, rows, place);
    CopyRows(start, values, start ? kKeys : 0, &m->state);
    __syncthreads();
    FillScores(m->q, m->k, m->gates, &m->w, m->kk);
    SolveChunk(columns, chunk, m);
    ForElements<kRows, kSlice>([&](int row, int v) {
      m->u.Set(row, v, m->x[row][v], m->x[row][v + 1]);
      if (u == nullptr || row >= size) return;
      StorePair(m->x[row][v], m->x[row][v + 1], u + row * row_stride + v);
    });
    __syncthreads();
    ValuesOfState::Sums out = {};
    ValuesOfState::Multiply(m->q, m->state.Transposed(), &out);
    ScaleRows<ValuesOfState>(m->gates.from_start, &out);
    ValuesOfScores::Multiply(m->w, m->u.Transposed(), &out);
    ValuesOfScores::ForPairs(out, [&](int row, int v, float a, float b) {
      if (row >= size) return;
      StorePair(a, b, out_rows + row * row_stride + v);
    });
    if (chunk.stop < 0) continue;
    AdvanceState(start, values, m,
                 StateOf(to.states_SHKV, chunk.stop, rows, place));
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
