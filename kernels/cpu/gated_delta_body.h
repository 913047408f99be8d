// Implements delta_chunk and delta_step of kernels.h. Compiled only in
// table_*.cc. Legend: that of gated_delta.h.
#ifndef WEFT_KERNELS_CPU_GATED_DELTA_BODY_H_
#define WEFT_KERNELS_CPU_GATED_DELTA_BODY_H_

#include "kernels/cpu/delta_solve_body.h"
#include "kernels/cpu/gated_delta.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Parts of the workspace, which both passes fill from a chunk's rows.
struct ChunkSpace {
  explicit ChunkSpace(const DeltaChunkRows& rows, float* workspace)
      : scores(workspace),
        decay(scores + 2 * kDeltaChunkRows * kScoreStride),
        a(decay + kDeltaChunkRows * kScoreStride),
        qk(a + kDeltaChunkRows * kScoreStride),
        rest(qk + 2 * rows.num_rows * rows.key_features) {}

  float* scores;  // [2C, C]: W, and then the decays times k k^T.
  float* decay;   // [C, C].
  float* a;       // [C, C].
  float* qk;      // [2C, K]: q, and then k, without gaps.
  float* rest;
  Decays decays;
};

// Fills the parts. `panels` has room for a matrix [K, C] in panels.
void FillChunkSpace(const DeltaChunkRows& rows, float* panels, ChunkSpace* s) {
  const int64_t size = rows.num_rows, keys = rows.key_features;
  float* k = s->qk + size * keys;
  CopyRowsTo(rows.q, rows.row_stride, size, keys, s->qk, keys);
  CopyRowsTo(rows.k, rows.row_stride, size, keys, k, keys);
  FillDecays(rows, &s->decays);
  Multiply({s->qk, keys}, {k, 1, keys}, {2 * size, keys, size}, panels, false,
           s->scores, kScoreStride);
  for (int64_t t = 0; t < size; ++t) {
    float* decay = s->decay + t * kScoreStride;
    float* w = s->scores + t * kScoreStride;
    float* kk = s->scores + (size + t) * kScoreStride;
    float* a = s->a + t * kScoreStride;
    FillDecayRow(s->decays, t, decay);
    const float beta = rows.beta[t * rows.gate_stride];
    for (int64_t i = 0; i <= t; i += kWidth) {
      const Vec e = Load(decay + i);
      Store(w + i, Load(w + i) * e);
      Store(kk + i, Load(kk + i) * e);
      Store(a + i, beta * Load(kk + i));
    }
    for (int64_t i = t + 1; i < kScoreStride; ++i) w[i] = kk[i] = a[i] = 0;
    a[t] = 0;
  }
}

// Fills u [C, V], and `read` [2C, V] with the products of q and k with the
// start state, if there is one.
void SolveChunk(const DeltaChunkRows& rows, const ChunkSpace& s, float* panels,
                float* read, float* u) {
  const int64_t size = rows.num_rows, values = rows.value_features;
  if (rows.start_KV) {
    Multiply({s.qk, rows.key_features}, {rows.start_KV, values},
             {2 * size, rows.key_features, values}, panels, false, read,
             values);
  }
  for (int64_t t = 0; t < size; ++t) {
    const float beta = rows.beta[t * rows.gate_stride];
    ScaleRow(rows.v + t * rows.row_stride, beta, values, false, u + t * values);
    if (rows.start_KV) {
      ScaleRow(read + (size + t) * values, -beta * s.decays.from_start[t],
               values, true, u + t * values);
    }
  }
  SolveForward(s.a, size, values, u);
}

void RunDeltaChunk(const DeltaChunk& chunk) {
  const DeltaChunkRows& rows = chunk.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  ChunkSpace s(rows, chunk.workspace);
  float* read = s.rest;
  float* u = read + 2 * size * values;
  float* panels = u + size * values;
  FillChunkSpace(rows, panels, &s);
  SolveChunk(rows, s, panels, read, u);

  if (rows.start_KV) {
    for (int64_t t = 0; t < size; ++t) {
      ScaleRow(read + t * values, s.decays.from_start[t], values, false,
               read + t * values);
    }
  }
  Multiply({s.scores, kScoreStride}, {u, values}, {size, size, values}, panels,
           rows.start_KV != nullptr, read, values);
  CopyRowsTo(read, values, size, values, chunk.out, chunk.out_stride);
  if (chunk.u) CopyRowsTo(u, values, size, values, chunk.u, chunk.u_stride);
  if (chunk.stop_KV == nullptr) return;
  float* k = s.qk + size * keys;
  for (int64_t t = 0; t < size; ++t) {
    ScaleRow(k + t * keys, s.decays.to_end[t], keys, false, k + t * keys);
  }
  if (rows.start_KV) {
    ScaleRow(rows.start_KV, s.decays.whole, keys * values, false,
             chunk.stop_KV);
  }
  Multiply({k, 1, keys}, {u, values}, {keys, size, values}, panels,
           rows.start_KV != nullptr, chunk.stop_KV, values);
}

// Computes kVectors vectors of columns of a step, from `column` on.
template <int64_t kVectors>
WEFT_INLINE void StepColumns(const DeltaStep& step, int64_t column) {
  Vec u[kVectors] = {};
  float* state = step.state_KV + column;
  for (int64_t k = 0; k < step.key_features; ++k) {
    const Vec key = Fill(step.k[k]);
    const float* row = state + k * step.value_features;
    WEFT_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      u[v] = MultiplyAdd(key, Load(row + v * kWidth), u[v]);
    }
  }
  Vec out[kVectors] = {};
  WEFT_UNROLL
  for (int64_t v = 0; v < kVectors; ++v) {
    u[v] = step.beta * (Load(step.v + column + v * kWidth) - step.decay * u[v]);
  }
  const Vec decay = Fill(step.decay);
  for (int64_t k = 0; k < step.key_features; ++k) {
    const Vec key = Fill(step.k[k]), query = Fill(step.q[k]);
    float* row = state + k * step.value_features;
    WEFT_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      const Vec s = MultiplyAdd(key, u[v], decay * Load(row + v * kWidth));
      Store(row + v * kWidth, s);
      out[v] = MultiplyAdd(query, s, out[v]);
    }
  }
  WEFT_UNROLL
  for (int64_t v = 0; v < kVectors; ++v) {
    Store(step.out + column + v * kWidth, out[v]);
  }
}

// Computes one column of a step, where less than a vector is left.
WEFT_INLINE void StepColumn(const DeltaStep& step, int64_t column) {
  float u = 0, out = 0;
  float* state = step.state_KV + column;
  for (int64_t k = 0; k < step.key_features; ++k) {
    u += step.k[k] * state[k * step.value_features];
  }
  u = step.beta * (step.v[column] - step.decay * u);
  for (int64_t k = 0; k < step.key_features; ++k) {
    float& s = state[k * step.value_features];
    s = step.decay * s + step.k[k] * u;
    out += step.q[k] * s;
  }
  step.out[column] = out;
}

void RunDeltaStep(const DeltaStep& step) {
  constexpr int64_t kVectors = 8;
  int64_t v = 0;
  for (; v + kVectors * kWidth <= step.value_features; v += kVectors * kWidth) {
    StepColumns<kVectors>(step, v);
  }
  for (; v + kWidth <= step.value_features; v += kWidth) {
    StepColumns<1>(step, v);
  }
  for (; v < step.value_features; ++v) StepColumn(step, v);
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_GATED_DELTA_BODY_H_
