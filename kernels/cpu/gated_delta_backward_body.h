// Implements delta_chunk_backward of kernels.h. Compiled only in table_*.cc.
// Legend: that of gated_delta.h.
//
// Let dR = (I + A)^-T dU be the gradient of diag(beta) (V - diag(e^G) K S0).
// Terms of the gradients of beta and G with K S0, Q S0 or K dS1 are dot
// products of rows of q and k with rows of dR S0^T, dO S0^T and U dS1^T, which
// the gradients of q and k need anyway.
#ifndef WEFT_KERNELS_CPU_GATED_DELTA_BACKWARD_BODY_H_
#define WEFT_KERNELS_CPU_GATED_DELTA_BACKWARD_BODY_H_

#include "kernels/cpu/delta_solve_body.h"
#include "kernels/cpu/gated_delta.h"
#include "kernels/cpu/gated_delta_body.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

struct BackwardSpace {
  BackwardSpace(const DeltaChunkRows& rows, float* workspace)
      : chunk(rows, workspace),
        dscores(workspace + 4 * kDeltaChunkRows * kScoreStride),
        qk(dscores + 2 * kDeltaChunkRows * kScoreStride),
        dqk(qk + 2 * rows.num_rows * rows.key_features),
        do_dr(dqk + 2 * rows.num_rows * rows.key_features),
        u(do_dr + 2 * rows.num_rows * rows.value_features),
        u_ds(u + rows.num_rows * rows.value_features),
        panels(u_ds + rows.num_rows * rows.key_features) {
    chunk.qk = qk;
  }

  ChunkSpace chunk;
  float* dscores;  // [2C, C]: the gradients of W and, negated, of A.
  float* qk;       // [2C, K]: q and k.
  float* dqk;      // [2C, K]: their gradients.
  float* do_dr;    // [2C, V]: dO and dR.
  float* u;        // [C, V].
  float* u_ds;     // [C, K]: the product of U and dS1^T.
  float* panels;
  float dsum[kDeltaChunkRows] = {};  // The gradient of G.
  float dbeta[kDeltaChunkRows] = {};
};

// Fills dR. Leaves the rows of k multiplied by e^(G_C - G) in dqk.
void FillResidualGradient(const DeltaChunkBackward& b, BackwardSpace* s) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  CopyRowsTo(b.dout, b.dout_stride, size, values, s->do_dr, values);
  CopyRowsTo(b.u, b.u_stride, size, values, s->u, values);
  float* dr = s->do_dr + size * values;
  Multiply({s->chunk.scores, 1, kScoreStride}, {s->do_dr, values},
           {size, size, values}, s->panels, false, dr, values);
  if (b.dstop_KV) {
    const float* k = s->qk + size * keys;
    for (int64_t t = 0; t < size; ++t) {
      ScaleRow(k + t * keys, s->chunk.decays.to_end[t], keys, false,
               s->dqk + t * keys);
    }
    Multiply({s->dqk, keys}, {b.dstop_KV, values}, {size, keys, values},
             s->panels, true, dr, values);
  }
  SolveBackward(s->chunk.a, size, values, dr);
}

// Turns the gradients of W and A into those of q k^T and k k^T. The latter gets
// its transpose added, so that it is symmetric. Adds the terms of G and beta.
void PassDecays(const DeltaChunkRows& rows, BackwardSpace* s) {
  const int64_t size = rows.num_rows;
  for (int64_t t = 0; t < size; ++t) {
    const float* decay = s->chunk.decay + t * kScoreStride;
    const float* w = s->chunk.scores + t * kScoreStride;
    const float* kk = s->chunk.scores + (size + t) * kScoreStride;
    const float beta = rows.beta[t * rows.gate_stride];
    float* dw = s->dscores + t * kScoreStride;
    float* da = s->dscores + (size + t) * kScoreStride;
    for (int64_t i = t; i < kScoreStride; ++i) {
      da[i] = 0;
      if (i > t) dw[i] = 0;
    }
    Vec of_row = {}, of_beta = {};
    for (int64_t i = 0; i <= t; i += kWidth) {
      const Vec dw_w = Load(dw + i) * Load(w + i);
      const Vec da_kk = Load(da + i) * Load(kk + i);
      const Vec product = dw_w - beta * da_kk;
      const Vec e = Load(decay + i);
      of_row += product;
      of_beta += da_kk;
      Store(s->dsum + i, Load(s->dsum + i) - product);
      Store(dw + i, Load(dw + i) * e);
      Store(da + i, Load(da + i) * (-beta * e));
    }
    s->dsum[t] += Sum(of_row);
    s->dbeta[t] -= Sum(of_beta);
    for (int64_t i = 0; i < t; ++i) {
      s->dscores[(size + i) * kScoreStride + t] = da[i];
    }
  }
}

// Fills dqk with the gradients that come through the start state.
void PassStart(const DeltaChunkBackward& b, BackwardSpace* s) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  Multiply({s->do_dr, values}, {rows.start_KV, 1, values},
           {2 * size, values, keys}, s->panels, false, s->dqk, keys);
  for (int64_t t = 0; t < size; ++t) {
    float* dq = s->dqk + t * keys;
    float* dk = s->dqk + (size + t) * keys;
    const float decay = s->chunk.decays.from_start[t];
    const float beta = rows.beta[t * rows.gate_stride];
    const float read = decay * Dot(dk, s->qk + (size + t) * keys, keys);
    s->dbeta[t] -= read;
    s->dsum[t] += decay * Dot(dq, s->qk + t * keys, keys) - beta * read;
    ScaleRow(dq, decay, keys, false, dq);
    ScaleRow(dk, -beta * decay, keys, false, dk);
  }
}

// Adds the gradients of k that come through the end state.
void PassStop(const DeltaChunkBackward& b, BackwardSpace* s) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  Multiply({s->u, values}, {b.dstop_KV, 1, values}, {size, values, keys},
           s->panels, false, s->u_ds, keys);
  float sum = 0;
  for (int64_t t = 0; t < size; ++t) {
    const float to_end = s->chunk.decays.to_end[t];
    const float own =
        to_end * Dot(s->u_ds + t * keys, s->qk + (size + t) * keys, keys);
    s->dsum[t] -= own;
    sum += own;
    ScaleRow(s->u_ds + t * keys, to_end, keys, true,
             s->dqk + (size + t) * keys);
  }
  if (rows.start_KV) {
    sum +=
        s->chunk.decays.whole * Dot(rows.start_KV, b.dstop_KV, keys * values);
  }
  s->dsum[size - 1] += sum;
}

// Writes the gradients of the rows.
void WriteRowGradients(const DeltaChunkBackward& b, BackwardSpace* s) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  float dg = 0;
  for (int64_t t = size - 1; t >= 0; --t) {
    const float* dr = s->do_dr + (size + t) * values;
    const int64_t at = t * rows.row_stride;
    ScaleRow(s->dqk + t * keys, 1, keys, b.adds_keys, b.dq + at);
    ScaleRow(s->dqk + (size + t) * keys, 1, keys, b.adds_keys, b.dk + at);
    ScaleRow(dr, rows.beta[t * rows.gate_stride], values, false, b.dv + at);
    dg += s->dsum[t];
    b.dg[t * rows.gate_stride] = dg;
    b.dbeta[t * rows.gate_stride] = s->dbeta[t] + Dot(dr, rows.v + at, values);
  }
}

// Adds the gradient of the start state. Overwrites q, k.
void AddStartGradient(const DeltaChunkBackward& b, BackwardSpace* s) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  if (b.dstop_KV) {
    ScaleRow(b.dstop_KV, s->chunk.decays.whole, keys * values,
             b.dstop_KV != b.dstart_KV, b.dstart_KV);
  }
  for (int64_t t = 0; t < size; ++t) {
    const float decay = s->chunk.decays.from_start[t];
    float* q = s->qk + t * keys;
    float* k = s->qk + (size + t) * keys;
    ScaleRow(q, decay, keys, false, q);
    ScaleRow(k, -decay * rows.beta[t * rows.gate_stride], keys, false, k);
  }
  // One product over the 2C rows of q and dO, and of k and dR.
  Multiply({s->qk, 1, keys}, {s->do_dr, values}, {keys, 2 * size, values},
           s->panels, true, b.dstart_KV, values);
}

void RunDeltaChunkBackward(const DeltaChunkBackward& b) {
  const DeltaChunkRows& rows = b.rows;
  const int64_t size = rows.num_rows, keys = rows.key_features;
  const int64_t values = rows.value_features;
  BackwardSpace s(rows, b.workspace);
  FillChunkSpace(rows, s.panels, &s.chunk);
  FillResidualGradient(b, &s);
  Multiply({s.do_dr, values}, {s.u, 1, values}, {2 * size, values, size},
           s.panels, false, s.dscores, kScoreStride);
  if (rows.start_KV) {
    PassStart(b, &s);
  } else {
    for (int64_t i = 0; i < 2 * size * keys; ++i) s.dqk[i] = 0;
  }
  PassDecays(rows, &s);
  const float* k = s.qk + size * keys;
  float* dk = s.dqk + size * keys;
  const float* dw = s.dscores;
  // One product [2C, C] [C, K] for q and k, and one for k.
  Multiply({dw, kScoreStride}, {k, keys}, {2 * size, size, keys}, s.panels,
           true, s.dqk, keys);
  Multiply({dw, 1, kScoreStride}, {s.qk, keys}, {size, size, keys}, s.panels,
           true, dk, keys);
  if (b.dstop_KV) PassStop(b, &s);
  WriteRowGradients(b, &s);
  if (b.dstart_KV) AddStartGradient(b, &s);
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_GATED_DELTA_BACKWARD_BODY_H_
