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

kernel::DType DeltaTypeOf(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? kernel::DType::kBf16
                                               : kernel::DType::kF32;
}

// The kernels' arguments for the rows before the rule, and the tensors to which
// they point. The caller may free these once the launch is queued.
struct MixArguments {
  MixArguments(const DeltaInputs& inputs, const DeltaParameters& p,
               const DeltaPlan* plan, const at::Tensor& history_QRW);

  at::Tensor weight_RW, bias_W, history, earlier_TR;
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
  if (plan) earlier_TR = ToDevice(plan->earlier_TR, x_TW.device());
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
          .earlier_TR = plan ? earlier_TR.const_data_ptr<int64_t>() : nullptr,
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

// The rows that read each row, for kernel::DeltaLaterRows.
struct LaterRows {
  LaterRows(const DeltaPlan& plan, int64_t num_rows, int64_t num_earlier)
      : offsets(num_rows + 1, 0) {
    for (const int64_t row : plan.earlier_TR) {
      if (row >= 0) ++offsets[row + 1];
    }
    for (int64_t t = 0; t < num_rows; ++t) offsets[t + 1] += offsets[t];
    later.resize(offsets.back());
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    for (int64_t i = 0; i < num_rows * num_earlier; ++i) {
      const int64_t row = plan.earlier_TR[i];
      if (row < 0) continue;
      later[next[row]++] =
          i / num_earlier * (num_earlier + 1) + i % num_earlier;
    }
  }

  std::vector<int64_t> offsets;
  std::vector<int64_t> later;
};

kernel::DeltaRuleRows RuleRows(const DeltaRows& rows,
                               const DeltaParameters& p) {
  return {.mixed_TW = rows.mixed_TW.const_data_ptr<float>(),
          .beta_TH = rows.beta_TH.const_data_ptr<float>(),
          .g_TH = rows.g_TH.const_data_ptr<float>(),
          .num_key_heads = p.num_key_heads,
          .num_value_heads = p.num_value_heads,
          .key_features = p.key_features,
          .value_features = p.value_features};
}

// The chunks of a plan on the device.
struct DeviceTrees {
  DeviceTrees(const DeltaPlan& plan, at::Device device)
      : chunks(ToDevice(Numbers(plan), device)),
        tree_chunks(ToDevice(plan.tree_chunks, device)),
        trees{.chunks = reinterpret_cast<const kernel::DeltaChunkRange*>(
                  chunks.const_data_ptr<int64_t>()),
              .tree_chunks = tree_chunks.const_data_ptr<int64_t>(),
              .num_trees = static_cast<int64_t>(plan.tree_chunks.size()) - 1} {
    if (!plan.slots_Q.defined()) return;
    const at::Tensor states_M2 = chunks.view({-1, 4}).narrow(1, 2, 2);
    states_M2.copy_(plan.slots_Q.index_select(0, states_M2.reshape({-1}))
                        .view_as(states_M2));
  }

  static std::vector<int64_t> Numbers(const DeltaPlan& plan) {
    static_assert(sizeof(kernel::DeltaChunkRange) == 4 * sizeof(int64_t));
    std::vector<int64_t> numbers;
    for (const DeltaChunk& chunk : plan.chunks) {
      numbers.insert(numbers.end(),
                     {chunk.begin, chunk.end, chunk.start, chunk.stop});
    }
    return numbers;
  }

  at::Tensor chunks;
  at::Tensor tree_chunks;
  kernel::DeltaTrees trees;
};

// Returns the most bytes of shared memory of a block on the current device.
int64_t MaxSharedBytes() {
  int device = 0, bytes = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

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
  DeltaRows rows{at::empty(inputs.qkv_TW.sizes(), options),
                 at::empty(inputs.beta_TH.sizes(), options),
                 at::empty(inputs.alpha_TH.sizes(), options)};
  C10_CUDA_CHECK(kernel::MixDeltaRows(
      arguments.rows, rows.mixed_TW.mutable_data_ptr<float>(),
      rows.beta_TH.mutable_data_ptr<float>(),
      rows.g_TH.mutable_data_ptr<float>(), CurrentStream()));
  return rows;
}

void MixDeltaRowsBackward(const at::Tensor& d_TW, const DeltaInputs& inputs,
                          const DeltaParameters& p, const DeltaPlan& plan,
                          const at::Tensor& into_TW) {
  const MixArguments arguments(inputs, p, &plan, /*history_QRW=*/{});
  const LaterRows later(plan, d_TW.size(0), arguments.rows.num_taps - 1);
  const at::Tensor offsets = ToDevice(later.offsets, d_TW.device());
  const at::Tensor entries = ToDevice(later.later, d_TW.device());
  float* d = d_TW.mutable_data_ptr<float>();
  C10_CUDA_CHECK(
      kernel::MixDeltaRowsBackward(arguments.rows, d, CurrentStream()));
  C10_CUDA_CHECK(kernel::DeltaConvBackward(
      arguments.rows,
      {.offsets = offsets.const_data_ptr<int64_t>(),
       .later = entries.const_data_ptr<int64_t>()},
      d, into_TW.mutable_data_ptr(), into_TW.stride(0), CurrentStream()));
}

bool TakesDeltaChunks(const at::Tensor& x_THV, const DeltaParameters& p) {
  return HasCudaKernel(x_THV) && x_THV.scalar_type() == at::kBFloat16 &&
         kernel::TakesDeltaChunks(p.key_features, p.value_features) &&
         MaxSharedBytes() >= kernel::DeltaChunksSharedBytes();
}

void RunDeltaChunks(const DeltaRows& rows, const DeltaParameters& p,
                    const DeltaPlan& plan, const at::Tensor& states_SHKV,
                    const at::Tensor& u_THV, const at::Tensor& out_THV) {
  const DeviceTrees trees(plan, out_THV.device());
  C10_CUDA_CHECK(kernel::RunDeltaChunks(
      RuleRows(rows, p), trees.trees, states_SHKV.mutable_data_ptr<float>(),
      u_THV.defined() ? u_THV.mutable_data_ptr<float>() : nullptr,
      out_THV.mutable_data_ptr(), CurrentStream()));
}

void RunDeltaChunksBackward(const at::Tensor& dout_THV, const DeltaTape& tape,
                            const DeltaParameters& p, const DeltaPlan& kept,
                            const DeltaPlan& plan,
                            const at::Tensor& dstates_SHKV, DeltaRows& d) {
  const int64_t num_rows = dout_THV.size(0), keys = p.key_features;
  const int64_t slices = p.value_features / 64;
  const at::Tensor dout = dout_THV.contiguous();
  const DeviceTrees trees(plan, dout.device());
  std::vector<int64_t> kept_starts;
  for (const DeltaChunk& chunk : kept.chunks) {
    kept_starts.push_back(chunk.start);
  }
  const at::Tensor starts = ToDevice(kept_starts, dout.device());
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, tape.rows.mixed_TW.options());
  };
  const at::Tensor dq = empty({slices, num_rows, p.num_value_heads, keys});
  const at::Tensor dk = at::empty_like(dq), dv = empty(dout.sizes());
  const at::Tensor dbeta = empty({slices, num_rows, p.num_value_heads});
  const at::Tensor dg = at::empty_like(dbeta);
  C10_CUDA_CHECK(kernel::RunDeltaChunksBackward(
      RuleRows(tape.rows, p), trees.trees,
      {.states_SHKV = tape.states_SHKV.const_data_ptr<float>(),
       .u_THV = tape.u_THV.const_data_ptr<float>(),
       .dout_THV = dout.const_data_ptr(),
       .starts = starts.const_data_ptr<int64_t>(),
       .dstates_SHKV = dstates_SHKV.mutable_data_ptr<float>(),
       .dq = dq.mutable_data_ptr<float>(),
       .dk = dk.mutable_data_ptr<float>(),
       .dbeta = dbeta.mutable_data_ptr<float>(),
       .dg = dg.mutable_data_ptr<float>(),
       .dv_THV = dv.mutable_data_ptr<float>(),
       .num_rows = num_rows},
      CurrentStream()));
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
      states.slots_Q.const_data_ptr<int64_t>(),
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
