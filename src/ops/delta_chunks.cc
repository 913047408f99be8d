#include "src/ops/delta_chunks.h"

#include <ATen/ATen.h>

#include <cmath>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_delta.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

// The rows of a chunk, for all heads, and what both passes compute from them.
struct ChunkParts {
  at::Tensor q_HCK, k_HCK, v_HCV;
  at::Tensor beta_HC1;
  at::Tensor from_start_HC1;  // e^G.
  at::Tensor to_end_HC1;      // e^(G_C - G).
  at::Tensor decay_HCC;       // e^(G_t - G_i), and 0 for i > t.
  at::Tensor kk_HCC;          // decay * k k^T.
  at::Tensor a_HCC;
  at::Tensor w_HCC;
};

// Returns heads [H, C, F] of `features` columns of the rows, from `column` on.
// Repeats each head `repeats` times.
at::Tensor HeadsOf(const at::Tensor& rows_CW, int64_t column, int64_t num_heads,
                   int64_t features, int64_t repeats) {
  return rows_CW.narrow(1, column, num_heads * features)
      .reshape({rows_CW.size(0), num_heads, features})
      .transpose(0, 1)
      .repeat_interleave(repeats, 0);
}

ChunkParts PartsOf(const DeltaRows& rows, const DeltaParameters& p,
                   const DeltaChunk& chunk) {
  const int64_t size = chunk.end - chunk.begin;
  const at::Tensor mixed =
      rows.mixed_TW.narrow(0, chunk.begin, size).to(rows.g_TH.scalar_type());
  const int64_t keys = p.num_key_heads * p.key_features;
  const int64_t repeats = p.num_value_heads / p.num_key_heads;
  ChunkParts c;
  c.q_HCK = HeadsOf(mixed, 0, p.num_key_heads, p.key_features, repeats);
  c.k_HCK = HeadsOf(mixed, keys, p.num_key_heads, p.key_features, repeats);
  c.v_HCV = HeadsOf(mixed, 2 * keys, p.num_value_heads, p.value_features, 1);
  c.beta_HC1 = rows.beta_TH.narrow(0, chunk.begin, size).t().unsqueeze(2);
  // The sum may be large while the difference of two sums is small.
  const at::Tensor sum_HC1 = rows.g_TH.narrow(0, chunk.begin, size)
                                 .cumsum(0, at::kDouble)
                                 .t()
                                 .unsqueeze(2);
  const auto exponential = [&](const at::Tensor& x) {
    return x.to(rows.g_TH.scalar_type()).exp();
  };
  c.from_start_HC1 = exponential(sum_HC1);
  c.to_end_HC1 = exponential(sum_HC1.narrow(1, size - 1, 1) - sum_HC1);
  c.decay_HCC = exponential((sum_HC1 - sum_HC1.transpose(1, 2)).tril()).tril();
  c.kk_HCC = c.decay_HCC * at::matmul(c.k_HCK, c.k_HCK.transpose(1, 2));
  c.a_HCC = (c.beta_HC1 * c.kk_HCC).tril(-1);
  c.w_HCC = c.decay_HCC * at::matmul(c.q_HCK, c.k_HCK.transpose(1, 2));
  return c;
}

// Returns the slot [1] of a state of a plan with slots.
at::Tensor SlotOf(const DeltaPlan& plan, int64_t index) {
  return plan.slots_Q.narrow(0, index, 1);
}

at::Tensor StateAt(const at::Tensor& states_SHKV, int64_t index,
                   const ChunkParts& c) {
  if (index >= 0) return states_SHKV.select(0, index);
  return at::zeros({c.k_HCK.size(0), c.k_HCK.size(2), c.v_HCV.size(2)},
                   c.k_HCK.options());
}

// Returns (I + a)^-1 b, or (I + a)^-T b.
at::Tensor SolveUnit(const at::Tensor& a_HCC, const at::Tensor& b_HCV,
                     bool transposed) {
  return at::linalg_solve_triangular(transposed ? a_HCC.transpose(1, 2) : a_HCC,
                                     b_HCV, /*upper=*/transposed,
                                     /*left=*/true, /*unitriangular=*/true);
}

// Adds up the heads that share a key head, and writes them to columns of rows.
void WriteKeyHeads(const at::Tensor& d_HCK, int64_t num_key_heads,
                   const at::Tensor& out_CF) {
  const int64_t size = d_HCK.size(1), features = d_HCK.size(2);
  const at::Tensor d_JCK =
      d_HCK.view({num_key_heads, -1, size, features}).sum(1);
  out_CF.copy_(d_JCK.transpose(0, 1).reshape({size, -1}));
}

// The gradients of a chunk, for all heads.
struct ChunkGradient {
  at::Tensor q_HCK, k_HCK, v_HCV, beta_HC, g_HC, start_HKV;
};

// Let dR be the gradient of diag(beta) (V - ...) in the equation of U.
// Derivation: tests/ops/gated_delta_test.cc compares it with autograd.
ChunkGradient ChunkBackward(const ChunkParts& c, const at::Tensor& start_HKV,
                            const at::Tensor& u_HCV, const at::Tensor& do_HCV,
                            const at::Tensor& dstop_HKV) {
  const at::Tensor start_HVK = start_HKV.transpose(1, 2);
  const at::Tensor k_to_end = c.to_end_HC1 * c.k_HCK;
  const at::Tensor from_stop = at::matmul(k_to_end, dstop_HKV);
  const at::Tensor du = at::matmul(c.w_HCC.transpose(1, 2), do_HCV) + from_stop;
  const at::Tensor dr = SolveUnit(c.a_HCC, du, /*transposed=*/true);
  const at::Tensor da = at::matmul(dr, u_HCV.transpose(1, 2)).neg_().tril(-1);
  const at::Tensor dw = at::matmul(do_HCV, u_HCV.transpose(1, 2)).tril();
  const at::Tensor ks = c.from_start_HC1 * at::matmul(c.k_HCK, start_HKV);
  const at::Tensor beta_dr = c.beta_HC1 * dr;
  const at::Tensor read = c.from_start_HC1 * beta_dr;
  const at::Tensor o_read = c.from_start_HC1 * do_HCV;
  const at::Tensor last = c.from_start_HC1.narrow(1, c.k_HCK.size(1) - 1, 1);
  ChunkGradient d;
  d.v_HCV = beta_dr;
  d.beta_HC = (dr * (c.v_HCV - ks)).sum(2) + (da * c.kk_HCC).sum(2);
  d.start_HKV = at::matmul(c.q_HCK.transpose(1, 2), o_read) -
                at::matmul(c.k_HCK.transpose(1, 2), read) + last * dstop_HKV;
  const at::Tensor dkk = c.beta_HC1 * c.decay_HCC * da;
  const at::Tensor dqk = c.decay_HCC * dw;
  d.k_HCK = at::matmul(dkk + dkk.transpose(1, 2), c.k_HCK) +
            at::matmul(dqk.transpose(1, 2), c.q_HCK) +
            c.to_end_HC1 * at::matmul(u_HCV, dstop_HKV.transpose(1, 2)) -
            at::matmul(read, start_HVK);
  d.q_HCK = at::matmul(dqk, c.k_HCK) + at::matmul(o_read, start_HVK);

  // The gradient of G: each e^(G_t - G_i) gives its product with its own
  // gradient to G_t, and the negative of it to G_i.
  const at::Tensor at_HCC = da * c.a_HCC + dw * c.w_HCC;
  const at::Tensor to_end = (from_stop * u_HCV).sum(2);
  at::Tensor dsum_HC = at_HCC.sum(2) - at_HCC.sum(1) - (ks * beta_dr).sum(2) +
                       (at::matmul(c.q_HCK, start_HKV) * o_read).sum(2) -
                       to_end;
  dsum_HC.select(1, -1).add_(
      to_end.sum(1) + last.view(-1) * (start_HKV * dstop_HKV).sum({1, 2}));
  d.g_HC = dsum_HC.flip(1).cumsum(1).flip(1);
  return d;
}

// The gradients of all rows, by columns of q, k and v.
void WriteGradient(const ChunkGradient& d, const DeltaParameters& p,
                   const DeltaChunk& chunk, DeltaRows& into) {
  const int64_t size = chunk.end - chunk.begin;
  const int64_t keys = p.num_key_heads * p.key_features;
  const at::Tensor mixed = into.mixed_TW.narrow(0, chunk.begin, size);
  WriteKeyHeads(d.q_HCK, p.num_key_heads, mixed.narrow(1, 0, keys));
  WriteKeyHeads(d.k_HCK, p.num_key_heads, mixed.narrow(1, keys, keys));
  const int64_t values = p.num_value_heads * p.value_features;
  mixed.narrow(1, 2 * keys, values)
      .copy_(d.v_HCV.transpose(0, 1).reshape({size, values}));
  into.beta_TH.narrow(0, chunk.begin, size).copy_(d.beta_HC.t());
  into.g_TH.narrow(0, chunk.begin, size).copy_(d.g_HC.t());
}

void ChunksByAten(const DeltaRows& rows, const DeltaParameters& p,
                  const DeltaPlan& plan, const at::Tensor& states_SHKV,
                  const at::Tensor& u_THV, const at::Tensor& out_THV) {
  for (const DeltaChunk& chunk : plan.chunks) {
    const int64_t size = chunk.end - chunk.begin;
    const ChunkParts c = PartsOf(rows, p, chunk);
    const bool has_slots = plan.slots_Q.defined();
    const at::Tensor start_HKV =
        has_slots
            ? states_SHKV.index_select(0, SlotOf(plan, chunk.start)).squeeze(0)
            : StateAt(states_SHKV, chunk.start, c);
    const at::Tensor residual =
        c.v_HCV - c.from_start_HC1 * at::matmul(c.k_HCK, start_HKV);
    const at::Tensor u_HCV =
        SolveUnit(c.a_HCC, c.beta_HC1 * residual, /*transposed=*/false);
    const at::Tensor out_HCV =
        c.from_start_HC1 * at::matmul(c.q_HCK, start_HKV) +
        at::matmul(c.w_HCC, u_HCV);
    out_THV.narrow(0, chunk.begin, size).copy_(out_HCV.transpose(0, 1));
    if (u_THV.defined()) {
      u_THV.narrow(0, chunk.begin, size).copy_(u_HCV.transpose(0, 1));
    }
    if (chunk.stop < 0) continue;
    const at::Tensor k_to_end = c.to_end_HC1 * c.k_HCK;
    const at::Tensor stop_HKV =
        c.from_start_HC1.narrow(1, size - 1, 1) * start_HKV +
        at::matmul(k_to_end.transpose(1, 2), u_HCV);
    if (has_slots) {
      states_SHKV.index_copy_(0, SlotOf(plan, chunk.stop),
                              stop_HKV.unsqueeze(0));
    } else {
      states_SHKV.select(0, chunk.stop).copy_(stop_HKV);
    }
  }
}

void BackwardByAten(const at::Tensor& dout_THV, const DeltaTape& tape,
                    const DeltaParameters& p, const DeltaPlan& kept,
                    const DeltaPlan& plan, const at::Tensor& dstates_SHKV,
                    DeltaRows& d) {
  for (size_t m = plan.chunks.size(); m-- > 0;) {
    const DeltaChunk& chunk = plan.chunks[m];
    const int64_t size = chunk.end - chunk.begin;
    const ChunkParts c = PartsOf(tape.rows, p, chunk);
    const at::Tensor start = StateAt(tape.states_SHKV, kept.chunks[m].start, c);
    const auto heads = [&](const at::Tensor& x_THV) {
      return x_THV.narrow(0, chunk.begin, size)
          .transpose(0, 1)
          .to(start.scalar_type());
    };
    const ChunkGradient own =
        ChunkBackward(c, start, heads(tape.u_THV), heads(dout_THV),
                      StateAt(dstates_SHKV, chunk.stop, c));
    WriteGradient(own, p, chunk, d);
    if (chunk.start < 0) continue;
    const at::Tensor dstart = dstates_SHKV.select(0, chunk.start);
    if (chunk.start == chunk.stop) {
      dstart.copy_(own.start_HKV);
    } else {
      dstart.add_(own.start_HKV);
    }
  }
}

// The columns of a value head's q, k and v, and its number of features.
class CpuHeads {
 public:
  CpuHeads(const DeltaRows& rows, const DeltaParameters& p)
      : rows_(rows),
        keys_(p.key_features),
        values_(p.value_features),
        group_(p.num_value_heads / p.num_key_heads),
        k_(p.num_key_heads * keys_),
        heads_(p.num_value_heads) {}

  int64_t q_column(int64_t h) const { return h / group_ * keys_; }
  int64_t k_column(int64_t h) const { return k_ + q_column(h); }
  int64_t v_column(int64_t h) const { return 2 * k_ + h * values_; }
  // The first of the value heads that share a key head.
  bool IsFirst(int64_t h) const { return h % group_ == 0; }
  int64_t group() const { return group_; }

  // Returns a head's rows of a chunk. `start` is the state before them.
  kernels::cpu::DeltaChunkRows Rows(const DeltaChunk& chunk, int64_t h,
                                    const float* start) const {
    const int64_t width = rows_.mixed_TW.size(1);
    const float* row =
        rows_.mixed_TW.const_data_ptr<float>() + chunk.begin * width;
    const int64_t gate = chunk.begin * heads_ + h;
    return {.q = row + q_column(h),
            .k = row + k_column(h),
            .v = row + v_column(h),
            .row_stride = width,
            .beta = rows_.beta_TH.const_data_ptr<float>() + gate,
            .g = rows_.g_TH.const_data_ptr<float>() + gate,
            .gate_stride = heads_,
            .num_rows = chunk.end - chunk.begin,
            .key_features = keys_,
            .value_features = values_,
            .start_KV = start};
  }

  // Returns a head's state in [S, H, K, V], or null for index -1.
  float* State(float* states, int64_t index, int64_t h) const {
    return index < 0 ? nullptr
                     : states + (index * heads_ + h) * keys_ * values_;
  }

  at::Tensor Workspace() const {
    return at::empty({kernels::cpu::DeltaWorkspaceFloats(keys_, values_)},
                     at::kFloat);
  }

 private:
  const DeltaRows& rows_;
  int64_t keys_, values_, group_, k_, heads_;
};

// Calls run(head, tree, workspace) for all heads [0, num_heads) and all trees
// of the plan. A thread gets heads of all trees, because trees differ in size.
template <typename Run>
void ForHeadsAndTrees(int64_t num_heads, const DeltaPlan& plan,
                      const CpuHeads& heads, const Run& run) {
  const auto trees = static_cast<int64_t>(plan.tree_chunks.size()) - 1;
  ParallelFor(num_heads * trees, 1, [&](int64_t begin, int64_t end) {
    const at::Tensor workspace = heads.Workspace();
    for (int64_t i = begin; i < end; ++i) {
      run(i / trees, i % trees, workspace.mutable_data_ptr<float>());
    }
  });
}

void ChunksOnCpu(const DeltaRows& rows, const DeltaParameters& p,
                 const DeltaPlan& plan, const at::Tensor& states_SHKV,
                 const at::Tensor& u_THV, const at::Tensor& out_THV) {
  const CpuHeads heads(rows, p);
  const int64_t stride = p.num_value_heads * p.value_features;
  float* states = states_SHKV.mutable_data_ptr<float>();
  const int64_t* slots =
      plan.slots_Q.defined() ? plan.slots_Q.const_data_ptr<int64_t>() : nullptr;
  const auto state = [&](int64_t index, int64_t h) {
    return heads.State(states, slots ? slots[index] : index, h);
  };
  float* out = out_THV.mutable_data_ptr<float>();
  float* u = u_THV.defined() ? u_THV.mutable_data_ptr<float>() : nullptr;
  ForHeadsAndTrees(p.num_value_heads, plan, heads,
                   [&](int64_t h, int64_t tree, float* workspace) {
                     for (int64_t m = plan.tree_chunks[tree];
                          m < plan.tree_chunks[tree + 1]; ++m) {
                       const DeltaChunk& chunk = plan.chunks[m];
                       const int64_t at =
                           chunk.begin * stride + h * p.value_features;
                       kernels::cpu::Kernels().delta_chunk(
                           {.rows = heads.Rows(chunk, h, state(chunk.start, h)),
                            .out = out + at,
                            .out_stride = stride,
                            .u = u ? u + at : nullptr,
                            .u_stride = stride,
                            .stop_KV = state(chunk.stop, h),
                            .workspace = workspace});
                     }
                   });
}

void BackwardOnCpu(const at::Tensor& dout_THV, const DeltaTape& tape,
                   const DeltaParameters& p, const DeltaPlan& kept,
                   const DeltaPlan& plan, const at::Tensor& dstates_SHKV,
                   DeltaRows& d) {
  const CpuHeads heads(tape.rows, p);
  const int64_t width = d.mixed_TW.size(1);
  const int64_t stride = p.num_value_heads * p.value_features;
  float* states = tape.states_SHKV.mutable_data_ptr<float>();
  float* dstates = dstates_SHKV.mutable_data_ptr<float>();
  const auto run = [&](int64_t m, int64_t h, float* workspace) {
    const DeltaChunk& chunk = plan.chunks[m];
    float* row = d.mixed_TW.mutable_data_ptr<float>() + chunk.begin * width;
    const int64_t gate = chunk.begin * p.num_value_heads + h;
    const int64_t at = h * p.value_features;
    kernels::cpu::Kernels().delta_chunk_backward(
        {.rows =
             heads.Rows(chunk, h, heads.State(states, kept.chunks[m].start, h)),
         .u = tape.u_THV.const_data_ptr<float>() + chunk.begin * stride + at,
         .u_stride = stride,
         .dout = dout_THV.const_data_ptr<float>() +
                 chunk.begin * dout_THV.stride(0) + at,
         .dout_stride = dout_THV.stride(0),
         .dstop_KV = heads.State(dstates, chunk.stop, h),
         .dstart_KV = heads.State(dstates, chunk.start, h),
         .dq = row + heads.q_column(h),
         .dk = row + heads.k_column(h),
         .dv = row + heads.v_column(h),
         .adds_keys = !heads.IsFirst(h),
         .dbeta = d.beta_TH.mutable_data_ptr<float>() + gate,
         .dg = d.g_TH.mutable_data_ptr<float>() + gate,
         .workspace = workspace});
  };
  ForHeadsAndTrees(p.num_key_heads, plan, heads,
                   [&](int64_t key_head, int64_t tree, float* workspace) {
                     const int64_t first = key_head * heads.group();
                     for (int64_t h = first; h < first + heads.group(); ++h) {
                       for (int64_t m = plan.tree_chunks[tree + 1];
                            m-- > plan.tree_chunks[tree];) {
                         run(m, h, workspace);
                       }
                     }
                   });
}

void StepByAten(const DeltaRows& rows, const DeltaParameters& p,
                const DeltaStates& states, const at::Tensor& out_QHV) {
  const int64_t keys = p.num_key_heads * p.key_features;
  const int64_t repeats = p.num_value_heads / p.num_key_heads;
  const auto heads = [&](int64_t column, int64_t num_heads, int64_t features) {
    return rows.mixed_TW.narrow(1, column, num_heads * features)
        .to(rows.g_TH.scalar_type())
        .unflatten(1, {num_heads, features});
  };
  const at::Tensor q_QHK1 = heads(0, p.num_key_heads, p.key_features)
                                .repeat_interleave(repeats, 1)
                                .unsqueeze(3);
  const at::Tensor k_QHK1 = heads(keys, p.num_key_heads, p.key_features)
                                .repeat_interleave(repeats, 1)
                                .unsqueeze(3);
  const at::Tensor v_QHV = heads(2 * keys, p.num_value_heads, p.value_features);
  at::Tensor state_QHKV = states.state_NHKV.index_select(0, states.slots_Q);
  state_QHKV.mul_(rows.g_TH.exp().unsqueeze(2).unsqueeze(3));
  const at::Tensor u_QHV =
      rows.beta_TH.unsqueeze(2) * (v_QHV - (state_QHKV * k_QHK1).sum(2));
  state_QHKV.add_(k_QHK1 * u_QHV.unsqueeze(2));
  out_QHV.copy_((state_QHKV * q_QHK1).sum(2));
  states.state_NHKV.index_copy_(0, states.slots_Q, state_QHKV);
}

void StepOnCpu(const DeltaRows& rows, const DeltaParameters& p,
               const DeltaStates& states, const at::Tensor& out_QHV) {
  const CpuHeads heads(rows, p);
  const int64_t num_heads = p.num_value_heads;
  const auto* slots = states.slots_Q.const_data_ptr<int64_t>();
  float* state = states.state_NHKV.mutable_data_ptr<float>();
  float* out = out_QHV.mutable_data_ptr<float>();
  ParallelFor(out_QHV.size(0) * num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / num_heads, h = i % num_heads;
      const kernels::cpu::DeltaChunkRows row =
          heads.Rows({.begin = t, .end = t + 1}, h, /*start=*/nullptr);
      kernels::cpu::Kernels().delta_step(
          {.q = row.q,
           .k = row.k,
           .v = row.v,
           .beta = *row.beta,
           .decay = std::exp(*row.g),
           .key_features = p.key_features,
           .value_features = p.value_features,
           .state_KV = heads.State(state, slots[t], h),
           .out = out + i * p.value_features});
    }
  });
}

}  // namespace

void RunDeltaChunks(const DeltaRows& rows, const DeltaParameters& p,
                    const DeltaPlan& plan, const at::Tensor& states_SHKV,
                    const at::Tensor& u_THV, const at::Tensor& out_THV) {
  if constexpr (kHasCudaKernels) {
    if (cuda::TakesDeltaChunks(out_THV, p)) {
      return cuda::RunDeltaChunks(rows, p, plan, states_SHKV, u_THV, out_THV);
    }
  }
  const auto run = HasCpuKernel(out_THV) ? ChunksOnCpu : ChunksByAten;
  run(rows, p, plan, states_SHKV, u_THV, out_THV);
}

DeltaRows RunDeltaChunksBackward(const at::Tensor& dout_THV,
                                 const DeltaTape& tape,
                                 const DeltaParameters& p,
                                 const DeltaPlan& kept, const DeltaPlan& plan) {
  const DeltaRows& rows = tape.rows;
  const at::TensorOptions options = rows.g_TH.options();
  DeltaRows d{at::empty(rows.mixed_TW.sizes(), options),
              at::empty_like(rows.beta_TH), at::empty_like(rows.g_TH)};
  const at::Tensor dstates_SHKV = at::zeros(
      {plan.num_states, p.num_value_heads, p.key_features, p.value_features},
      options);
  if constexpr (kHasCudaKernels) {
    if (cuda::TakesDeltaChunks(dout_THV, p)) {
      cuda::RunDeltaChunksBackward(dout_THV, tape, p, kept, plan, dstates_SHKV,
                                   d);
      return d;
    }
  }
  if (HasCpuKernel(dout_THV)) {
    BackwardOnCpu(dout_THV.contiguous(), tape, p, kept, plan, dstates_SHKV, d);
  } else {
    BackwardByAten(dout_THV, tape, p, kept, plan, dstates_SHKV, d);
  }
  return d;
}

void RunDeltaStep(const DeltaRows& rows, const DeltaParameters& p,
                  const DeltaStates& states, const at::Tensor& out_THV) {
  if constexpr (kHasCudaKernels) {
    if (cuda::TakesDeltaStep(out_THV, p)) {
      return cuda::RunDeltaStep(rows, p, states, out_THV);
    }
  }
  const auto run = HasCpuKernel(out_THV) ? StepOnCpu : StepByAten;
  run(rows, p, states, out_THV);
}

}  // namespace weft::ops
