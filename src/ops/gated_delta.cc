#include "src/ops/gated_delta.h"

#include <ATen/ATen.h>

#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/delta_chunks.h"
#include "src/ops/delta_plan.h"
#include "src/ops/delta_rows.h"
#include "src/ops/host_copy.h"

namespace weft::ops {
namespace {

int64_t ConvFeatures(const DeltaParameters& p) {
  return 2 * p.num_key_heads * p.key_features +
         p.num_value_heads * p.value_features;
}

int64_t NumEarlier(const DeltaParameters& p) { return p.conv_WR1.size(1) - 1; }

void CheckHeads(const DeltaParameters& p) {
  TORCH_CHECK(p.num_key_heads > 0 && p.num_value_heads > 0 &&
                  p.num_value_heads % p.num_key_heads == 0,
              "gated delta rule wants value heads that are a multiple of the "
              "key heads, got ",
              p.num_value_heads, " and ", p.num_key_heads);
  const int64_t features = ConvFeatures(p);
  TORCH_CHECK(p.conv_WR1.dim() == 2 && p.conv_WR1.size(0) == features &&
                  p.conv_WR1.size(1) >= 2 &&
                  p.conv_WR1.size(1) <= kMaxDeltaTaps,
              "the convolution's weight is ", p.conv_WR1.sizes(), ", wanted [",
              features, ", 2 to ", kMaxDeltaTaps, "]");
  TORCH_CHECK(p.a_log_H.numel() == p.num_value_heads &&
                  p.dt_bias_H.numel() == p.num_value_heads,
              "a_log and dt_bias have ", p.a_log_H.numel(), " and ",
              p.dt_bias_H.numel(), " numbers, wanted ", p.num_value_heads);
}

void CheckMatrix(const char* name, const at::Tensor& x,
                 const at::Tensor& like_TW, int64_t features) {
  CheckArgument(name, x, like_TW, like_TW.scalar_type(),
                {like_TW.size(0), features}, Layout::kAny);
  TORCH_CHECK(features <= 1 || x.stride(1) == 1, name,
              " wants unit stride in its features, got strides ", x.strides());
}

void CheckInputs(const DeltaInputs& inputs, const DeltaParameters& p) {
  CheckHeads(p);
  CheckMatrix("qkv", inputs.qkv_TW, inputs.qkv_TW, ConvFeatures(p));
  CheckMatrix("beta", inputs.beta_TH, inputs.qkv_TW, p.num_value_heads);
  CheckMatrix("alpha", inputs.alpha_TH, inputs.qkv_TW, p.num_value_heads);
}

void CheckStates(const DeltaStates& states, const DeltaInputs& inputs,
                 const DeltaParameters& p, int64_t num_sequences) {
  const at::Tensor& x = inputs.qkv_TW;
  const int64_t slots = states.conv_NRW.size(0);
  CheckArgument("conv rows of states", states.conv_NRW, x, x.scalar_type(),
                {slots, NumEarlier(p), ConvFeatures(p)});
  CheckArgument("states", states.state_NHKV, x, ComputeType(x),
                {slots, p.num_value_heads, p.key_features, p.value_features});
  CheckArgument("slots of states", states.slots_Q, x, at::kLong,
                {num_sequences});
}

void CheckNodes(const DeltaTrees& trees, int64_t num_rows) {
  const std::vector<AttentionNode>& nodes = trees.nodes();
  TORCH_CHECK(!nodes.empty() && nodes.back().end == num_rows,
              "nodes of the gated delta rule end at row ",
              nodes.empty() ? 0 : nodes.back().end, ", there are ", num_rows);
}

at::Tensor NewOutput(const DeltaInputs& inputs, const DeltaParameters& p) {
  return at::empty({inputs.qkv_TW.size(0), p.num_value_heads, p.value_features},
                   inputs.qkv_TW.options());
}

at::Tensor NewStates(const at::Tensor& mixed_TW, const DeltaParameters& p,
                     int64_t num_states) {
  return at::empty(
      {num_states, p.num_value_heads, p.key_features, p.value_features},
      mixed_TW.options().dtype(ComputeType(mixed_TW)));
}

// Replaces the last rows before the convolution of sequences that continue.
void StoreConvRows(const at::Tensor& qkv_TW, const at::Tensor& history_QRW,
                   const DeltaPlan& plan, const DeltaStates& states) {
  const int64_t num_rows = qkv_TW.size(0);
  const at::Tensor last = ToDevice(plan.last_QR, qkv_TW.device());
  const at::Tensor new_rows =
      qkv_TW.index_select(0, last.clamp_max(num_rows - 1));
  const at::Tensor old_rows =
      history_QRW.flatten(0, 1).index_select(0, (last - num_rows).clamp_min(0));
  const at::Tensor rows =
      at::where(last.lt(num_rows).unsqueeze(1), new_rows, old_rows);
  states.conv_NRW.index_copy_(0, states.slots_Q, rows.view_as(history_QRW));
}

}  // namespace

at::Tensor GatedDelta(const DeltaInputs& inputs, const DeltaParameters& p,
                      const DeltaTrees& trees, DeltaTape* tape) {
  CheckInputs(inputs, p);
  CheckNodes(trees, inputs.qkv_TW.size(0));
  const DeltaPlan& plan = trees.Plan(
      tape ? DeltaStateUse::kKeep : DeltaStateUse::kReplace, NumEarlier(p));
  DeltaTape own;
  DeltaTape& kept = tape ? *tape : own;
  kept.rows = MixDeltaRows(inputs, p, plan, /*history_QRW=*/{});
  const at::Tensor& mixed_TW = kept.rows.mixed_TW;
  kept.states_SHKV = NewStates(mixed_TW, p, plan.num_states);
  const at::Tensor out_THV = NewOutput(inputs, p);
  if (tape) kept.u_THV = at::empty(out_THV.sizes(), mixed_TW.options());
  RunDeltaChunks(kept.rows, p, plan, kept.states_SHKV, kept.u_THV, out_THV);
  return out_THV;
}

void GatedDeltaBackward(const at::Tensor& dout_THV, const DeltaInputs& inputs,
                        const DeltaParameters& p, const DeltaTrees& trees,
                        DeltaTape& tape, const DeltaInputs& into) {
  CheckInputs(into, p);
  CheckArgument("dout", dout_THV, inputs.qkv_TW, inputs.qkv_TW.scalar_type(),
                {inputs.qkv_TW.size(0), p.num_value_heads, p.value_features},
                Layout::kAny);
  if (!tape.u_THV.defined()) {
    static_cast<void>(GatedDelta(inputs, p, trees, &tape));
  }
  const DeltaPlan& kept = trees.Plan(DeltaStateUse::kKeep, NumEarlier(p));
  const DeltaPlan& plan = trees.Plan(DeltaStateUse::kReplace, NumEarlier(p));
  const DeltaRows gradient =
      RunDeltaChunksBackward(dout_THV, tape, p, kept, plan);
  tape = {};
  // A forward pass that was computed again has uploaded this plan.
  MixDeltaRowsBackward(gradient, inputs, p, kept, into);
}

at::Tensor GatedDeltaPrefill(const DeltaInputs& inputs,
                             const DeltaParameters& p,
                             const DeltaTrees& sequences,
                             const DeltaStates& states) {
  CheckInputs(inputs, p);
  CheckNodes(sequences, inputs.qkv_TW.size(0));
  CheckStates(states, inputs, p, std::ssize(sequences.nodes()));
  const DeltaPlan& plan =
      sequences.Plan(DeltaStateUse::kContinue, NumEarlier(p));
  TORCH_CHECK(plan.slots_Q.is_same(states.slots_Q),
              "sequences of the gated delta rule have slots of other states");
  const at::Tensor history_QRW =
      states.conv_NRW.index_select(0, states.slots_Q);
  const DeltaRows rows = MixDeltaRows(inputs, p, plan, history_QRW);
  const at::Tensor out_THV = NewOutput(inputs, p);
  RunDeltaChunks(rows, p, plan, states.state_NHKV, /*u_THV=*/{}, out_THV);
  StoreConvRows(inputs.qkv_TW, history_QRW, plan, states);
  return out_THV;
}

at::Tensor GatedDeltaStep(const DeltaInputs& inputs, const DeltaParameters& p,
                          const DeltaStates& states) {
  CheckInputs(inputs, p);
  CheckStates(states, inputs, p, inputs.qkv_TW.size(0));
  const DeltaRows rows = MixDeltaStepRows(inputs, p, states);
  const at::Tensor out_THV = NewOutput(inputs, p);
  RunDeltaStep(rows, p, states, out_THV);
  return out_THV;
}

}  // namespace weft::ops
