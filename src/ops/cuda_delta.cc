#include "src/ops/cuda_delta.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>

#include <cmath>
#include <vector>

#include "kernels/cuda/delta/gated_delta.h"
#include "src/ops/host_copy.h"

namespace weft::ops::cuda {
namespace {

namespace kernel = kernels::cuda;

static_assert(kMaxDeltaTaps == kernel::kMaxDeltaMixTaps);

kernel::DType DeltaTypeOf(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? kernel::DType::kBf16
                                               : kernel::DType::kF32;
}

// The kernels' arguments for the rows before the rule, and the tensors to which
// they point. The caller may free these once the launch is queued.
struct MixArguments {
  MixArguments(const DeltaInputs& inputs, const DeltaParameters& p,
               const DeltaPlan* plan, const at::Tensor& history_QRW);

  at::Tensor weight_RW, bias_W, history;
  kernel::DeltaMixRows rows;
};

MixArguments::MixArguments(const DeltaInputs& inputs, const DeltaParameters& p,
                           const DeltaPlan* plan, const at::Tensor& history_QRW)
    : weight_RW(p.conv_WR1.t().contiguous()) {
  const at::Tensor& x_TW = inputs.qkv_TW;
  if (p.conv_bias_W.defined()) {
    bias_W = p.conv_bias_W.to(weight_RW.scalar_type()).contiguous();
  }
  if (history_QRW.defined()) history = history_QRW.contiguous();
  const int64_t* earlier = nullptr;
  if (plan) {
    at::Tensor& earlier_TR = plan->on_device.earlier_TR;
    if (!earlier_TR.defined()) {
      earlier_TR = ToDevice(plan->earlier_TR, x_TW.device());
    }
    earlier = earlier_TR.const_data_ptr<int64_t>();
  }
  rows = {.dtype = DeltaTypeOf(x_TW),
          .weight_dtype = DeltaTypeOf(weight_RW),
          .num_rows = x_TW.size(0),
          .num_features = x_TW.size(1),
          .num_taps = weight_RW.size(0),
          .num_key_heads = p.num_key_heads,
          .key_features = p.key_features,
          .num_value_heads = p.num_value_heads,
          .l2_eps = static_cast<float>(p.l2_eps),
          .query_scale = 1 / std::sqrt(static_cast<float>(p.key_features)),
          .x_TW = x_TW.const_data_ptr(),
          .x_stride = x_TW.stride(0),
          .earlier_TR = earlier,
          .history_W = history.defined() ? history.const_data_ptr() : nullptr,
          .weight_RW = weight_RW.const_data_ptr(),
          .bias_W = bias_W.defined() ? bias_W.const_data_ptr() : nullptr,
          .beta_TH = inputs.beta_TH.const_data_ptr(),
          .beta_stride = inputs.beta_TH.stride(0),
          .alpha_TH = inputs.alpha_TH.const_data_ptr(),
          .alpha_stride = inputs.alpha_TH.stride(0),
          .a_log_H = p.a_log_H.const_data_ptr<float>(),
          .dt_bias_H = p.dt_bias_H.const_data_ptr<float>()};
}

// Makes the rows that read each row.
void MakeLaterRows(const DeltaPlan& plan, int64_t num_rows, int64_t num_earlier,
                   at::Device device) {
  if (plan.on_device.offsets.defined()) return;
  std::vector<int64_t> offsets(num_rows + 1, 0);
  for (const int64_t row : plan.earlier_TR) {
    if (row >= 0) ++offsets[row + 1];
  }
  for (int64_t t = 0; t < num_rows; ++t) offsets[t + 1] += offsets[t];
  std::vector<int32_t> later(2 * offsets.back());
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  for (int64_t i = 0; i < num_rows * num_earlier; ++i) {
    const int64_t row = plan.earlier_TR[i];
    if (row < 0) continue;
    const int64_t at = 2 * next[row]++;
    later[at] = static_cast<int32_t>(i / num_earlier);
    later[at + 1] = static_cast<int32_t>(i % num_earlier);
  }
  plan.on_device.later_N2 = ToDevice(later, device);
  plan.on_device.offsets = ToDevice(offsets, device);
}

kernel::DeltaLaterRows LaterRows(const DeltaPlan& plan) {
  static_assert(sizeof(kernel::DeltaLaterRow) == 2 * sizeof(int32_t));
  return {.offsets = plan.on_device.offsets.const_data_ptr<int64_t>(),
          .later = reinterpret_cast<const kernel::DeltaLaterRow*>(
              plan.on_device.later_N2.const_data_ptr<int32_t>())};
}

kernel::DeltaRuleRows RuleRows(const DeltaRows& rows,
                               const DeltaParameters& p) {
  return {.mixed_TW = rows.mixed_TW.const_data_ptr(),
          .beta_TH = rows.beta_TH.const_data_ptr<float>(),
          .g_TH = rows.g_TH.const_data_ptr<float>(),
          .num_key_heads = p.num_key_heads,
          .num_value_heads = p.num_value_heads,
          .key_features = p.key_features,
          .value_features = p.value_features};
}

// Returns the chunks of a plan on the device.
kernel::DeltaTrees TreesOf(const DeltaPlan& plan, at::Device device) {
  DeltaDevicePlan& own = plan.on_device;
  if (!own.chunks_M4.defined()) {
    static_assert(sizeof(kernel::DeltaChunkRange) == 4 * sizeof(int64_t));
    std::vector<int64_t> numbers;
    for (const DeltaChunk& chunk : plan.chunks) {
      numbers.insert(numbers.end(),
                     {chunk.begin, chunk.end, chunk.start, chunk.stop});
    }
    const at::Tensor chunks_M4 = ToDevice(numbers, device).view({-1, 4});
    if (plan.slots_Q.defined()) {
      const at::Tensor states_M2 = chunks_M4.narrow(1, 2, 2);
      states_M2.copy_(plan.slots_Q.index_select(0, states_M2.reshape({-1}))
                          .view_as(states_M2));
    }
    own.tree_chunks = ToDevice(plan.tree_chunks, device);
    own.chunks_M4 = chunks_M4;
  }
  return {.chunks = reinterpret_cast<const kernel::DeltaChunkRange*>(
              own.chunks_M4.const_data_ptr<int64_t>()),
          .tree_chunks = own.tree_chunks.const_data_ptr<int64_t>(),
          .num_trees = std::ssize(plan.tree_chunks) - 1,
          .num_chunks = std::ssize(plan.chunks)};
}

// The scores of all chunks.
struct Scores {
  Scores(const DeltaRows& rows, const DeltaParameters& p,
         const kernel::DeltaTrees& trees)
      : all_3HTC(at::empty(
            {3, p.num_value_heads, rows.mixed_TW.size(0), kDeltaChunkRows},
            rows.mixed_TW.options())),
        scores{.w_HTC = all_3HTC[0].mutable_data_ptr(),
               .inverse_HTC = all_3HTC[1].mutable_data_ptr(),
               .rest_HTC = all_3HTC[2].mutable_data_ptr(),
               .num_rows = rows.mixed_TW.size(0)} {
    C10_CUDA_CHECK(kernel::ScoreDeltaChunks(RuleRows(rows, p), trees, scores,
                                            CurrentStream()));
  }

  at::Tensor all_3HTC;
  kernel::DeltaScores scores;
};

kernel::DeltaHeads NormHeads(const at::Tensor& x_THV) {
  return {.data = x_THV.mutable_data_ptr(),
          .row_stride = x_THV.stride(0),
          .head_stride = x_THV.stride(1)};
}

kernel::GatedNormHeads NormArguments(const at::Tensor& x_THV,
                                     const at::Tensor& z_THV,
                                     const at::Tensor& weight, double eps) {
  return {.dtype = DeltaTypeOf(x_THV),
          .weight_dtype = DeltaTypeOf(weight),
          .num_rows = x_THV.size(0),
          .num_heads = x_THV.size(1),
          .features = x_THV.size(2),
          .eps = static_cast<float>(eps),
          .x = NormHeads(x_THV),
          .z = NormHeads(z_THV),
          .weight_V = weight.const_data_ptr()};
}

}  // namespace

DeltaRows MixDeltaRows(const DeltaInputs& inputs, const DeltaParameters& p,
                       const DeltaPlan* plan, const at::Tensor& history_QRW) {
  const MixArguments arguments(inputs, p, plan, history_QRW);
  const auto options = inputs.qkv_TW.options().dtype(at::kFloat);
  DeltaRows rows{at::empty(inputs.qkv_TW.sizes(), inputs.qkv_TW.options()),
                 at::empty(inputs.beta_TH.sizes(), options),
                 at::empty(inputs.alpha_TH.sizes(), options)};
  C10_CUDA_CHECK(kernel::MixDeltaRows(
      arguments.rows, rows.mixed_TW.mutable_data_ptr(),
      rows.beta_TH.mutable_data_ptr<float>(),
      rows.g_TH.mutable_data_ptr<float>(), CurrentStream()));
  return rows;
}

void MixDeltaRowsBackward(const at::Tensor& d_TW, const DeltaInputs& inputs,
                          const DeltaParameters& p, const DeltaPlan& plan,
                          const at::Tensor& into_TW) {
  const MixArguments arguments(inputs, p, &plan, /*history_QRW=*/{});
  MakeLaterRows(plan, d_TW.size(0), arguments.rows.num_taps - 1, d_TW.device());
  float* d = d_TW.mutable_data_ptr<float>();
  C10_CUDA_CHECK(
      kernel::MixDeltaRowsBackward(arguments.rows, d, CurrentStream()));
  C10_CUDA_CHECK(kernel::DeltaConvBackward(arguments.rows, LaterRows(plan), d,
                                           into_TW.mutable_data_ptr(),
                                           into_TW.stride(0), CurrentStream()));
}

bool TakesDeltaChunks(const at::Tensor& x_THV, const DeltaParameters& p) {
  return HasCudaKernel(x_THV) && x_THV.scalar_type() == at::kBFloat16 &&
         kernel::TakesDeltaChunks(p.key_features, p.value_features);
}

void RunDeltaChunks(const DeltaRows& rows, const DeltaParameters& p,
                    const DeltaPlan& plan, const at::Tensor& states_SHKV,
                    const at::Tensor& u_THV, const at::Tensor& out_THV) {
  const kernel::DeltaTrees trees = TreesOf(plan, out_THV.device());
  const Scores scores(rows, p, trees);
  C10_CUDA_CHECK(kernel::RunDeltaChunks(
      RuleRows(rows, p), trees, scores.scores,
      {.states_SHKV = states_SHKV.mutable_data_ptr<float>(),
       .u_THV = u_THV.defined() ? u_THV.mutable_data_ptr() : nullptr,
       .out_THV = out_THV.mutable_data_ptr()},
      CurrentStream()));
}

void RunDeltaChunksBackward(const at::Tensor& dout_THV, const DeltaTape& tape,
                            const DeltaParameters& p, const DeltaPlan& kept,
                            const DeltaPlan& plan,
                            const at::Tensor& dstates_SHKV, DeltaRows& d) {
  const int64_t num_rows = dout_THV.size(0), keys = p.key_features;
  const int64_t slices = p.value_features / 64;
  const at::Tensor dout = dout_THV.contiguous();
  const kernel::DeltaTrees trees = TreesOf(plan, dout.device());
  const Scores scores(tape.rows, p, trees);
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, dstates_SHKV.options());
  };
  const at::Tensor dq = empty({slices, num_rows, p.num_value_heads, keys});
  const at::Tensor dk = at::empty_like(dq), dv = empty(dout.sizes());
  const at::Tensor dbeta = empty({slices, num_rows, p.num_value_heads});
  const at::Tensor dg = at::empty_like(dbeta), dr = at::empty_like(dout);
  const at::Tensor dstops = at::empty(tape.states_SHKV.sizes(), dout.options());
  const kernel::DeltaChunksGradient gradient{
      .kept_chunks = TreesOf(kept, dout.device()).chunks,
      .states_SHKV = tape.states_SHKV.const_data_ptr<float>(),
      .u_THV = tape.u_THV.const_data_ptr(),
      .dout_THV = dout.const_data_ptr(),
      .dstates_SHKV = dstates_SHKV.mutable_data_ptr<float>(),
      .dstops_SHKV = dstops.mutable_data_ptr(),
      .dr_THV = dr.mutable_data_ptr(),
      .dq = dq.mutable_data_ptr<float>(),
      .dk = dk.mutable_data_ptr<float>(),
      .dbeta = dbeta.mutable_data_ptr<float>(),
      .dg = dg.mutable_data_ptr<float>(),
      .dv_THV = dv.mutable_data_ptr<float>()};
  const kernel::DeltaRuleRows rows = RuleRows(tape.rows, p);
  C10_CUDA_CHECK(kernel::RunDeltaStatesBackward(rows, trees, scores.scores,
                                                gradient, CurrentStream()));
  C10_CUDA_CHECK(kernel::RunDeltaRowsBackward(rows, trees, scores.scores,
                                              gradient, CurrentStream()));
  const int64_t all_keys = p.num_key_heads * keys;
  // Adds up the slices, and the value heads that share a key head.
  const auto sum = [&](const at::Tensor& d_STHK) {
    return d_STHK.view({slices, num_rows, p.num_key_heads, -1, keys})
        .sum(at::IntArrayRef({0, 3}))
        .view({num_rows, all_keys});
  };
  d.mixed_TW.narrow(1, 0, all_keys).copy_(sum(dq));
  d.mixed_TW.narrow(1, all_keys, all_keys).copy_(sum(dk));
  d.mixed_TW.slice(1, 2 * all_keys).copy_(dv.view({num_rows, -1}));
  d.beta_TH.copy_(dbeta.sum(0));
  d.g_TH.copy_(dg.sum(0));
}

bool TakesDeltaStep(const at::Tensor& x_THV, const DeltaParameters& p) {
  return HasCudaKernel(x_THV) && p.key_features <= kernel::kMaxDeltaStepKeys;
}

void RunDeltaStep(const DeltaRows& rows, const DeltaParameters& p,
                  const DeltaStates& states, const at::Tensor& out_THV) {
  C10_CUDA_CHECK(kernel::DeltaStep(
      RuleRows(rows, p), out_THV.size(0),
      states.slots_Q.const_data_ptr<int64_t>(), states.padding_slot,
      states.state_NHKV.mutable_data_ptr<float>(), DeltaTypeOf(out_THV),
      out_THV.mutable_data_ptr(), CurrentStream()));
}

void GatedRmsNorm(const at::Tensor& x_THV, const at::Tensor& z_THV,
                  const at::Tensor& weight_V, double eps,
                  const at::Tensor& y_THV) {
  const at::Tensor weight = weight_V.contiguous();
  C10_CUDA_CHECK(kernel::GatedNorm(NormArguments(x_THV, z_THV, weight, eps),
                                   NormHeads(y_THV), CurrentStream()));
}

void GatedRmsNormBackward(const at::Tensor& dy_THV, const at::Tensor& x_THV,
                          const at::Tensor& z_THV, const at::Tensor& weight_V,
                          double eps, const at::Tensor& dx_THV,
                          const at::Tensor& dz_THV) {
  const at::Tensor weight = weight_V.contiguous();
  C10_CUDA_CHECK(kernel::GatedNormBackward(
      NormArguments(x_THV, z_THV, weight, eps), NormHeads(dy_THV),
      NormHeads(dx_THV), NormHeads(dz_THV), CurrentStream()));
}

}  // namespace weft::ops::cuda
