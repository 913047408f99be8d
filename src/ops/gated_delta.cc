#include "src/ops/gated_delta.h"

#include <ATen/ATen.h>

#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/delta_chunks.h"
#include "src/ops/delta_plan.h"
#include "src/ops/delta_rows.h"

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

void CheckNodes(const std::vector<AttentionNode>& nodes, int64_t num_rows) {
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
      mixed_TW.options());
}

// Replaces the last rows before the convolution. Row R of sequence i's history
// is its first new row.
void StoreConvRows(const DeltaInputs& inputs,
                   const std::vector<AttentionNode>& sequences,
                   const at::Tensor& history_QRW, const DeltaStates& states) {
  const int64_t num_earlier = history_QRW.size(1);
  std::vector<at::Tensor> last;
  last.reserve(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const at::Tensor rows = inputs.qkv_TW.narrow(
        0, sequences[i].begin, sequences[i].end - sequences[i].begin);
    last.push_back(at::cat({history_QRW[static_cast<int64_t>(i)], rows})
                       .slice(0, -num_earlier));
  }
  states.conv_NRW.index_copy_(0, states.slots_Q, at::stack(last));
}

}  // namespace

at::Tensor GatedDelta(const DeltaInputs& inputs, const DeltaParameters& p,
                      const std::vector<AttentionNode>& nodes,
                      DeltaTape* tape) {
  CheckInputs(inputs, p);
  CheckNodes(nodes, inputs.qkv_TW.size(0));
  const DeltaPlan plan =
      PlanDelta(nodes, NumEarlier(p),
                tape ? DeltaStateUse::kKeep : DeltaStateUse::kReplace);
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
                        const DeltaParameters& p,
                        const std::vector<AttentionNode>& nodes,
                        DeltaTape& tape, const DeltaInputs& into) {
  CheckInputs(into, p);
  CheckArgument("dout", dout_THV, inputs.qkv_TW, inputs.qkv_TW.scalar_type(),
                {inputs.qkv_TW.size(0), p.num_value_heads, p.value_features},
                Layout::kAny);
  if (!tape.u_THV.defined()) {
    static_cast<void>(GatedDelta(inputs, p, nodes, &tape));
  }
  const DeltaPlan kept = PlanDelta(nodes, NumEarlier(p), DeltaStateUse::kKeep);
  const DeltaPlan plan =
      PlanDelta(nodes, NumEarlier(p), DeltaStateUse::kReplace);
  const DeltaRows gradient =
      RunDeltaChunksBackward(dout_THV, tape, p, kept, plan);
  tape = {};
  MixDeltaRowsBackward(gradient, inputs, p, plan, into);
}

at::Tensor GatedDeltaPrefill(const DeltaInputs& inputs,
                             const DeltaParameters& p,
                             const std::vector<AttentionNode>& sequences,
                             const DeltaStates& states) {
  CheckInputs(inputs, p);
  CheckNodes(sequences, inputs.qkv_TW.size(0));
  CheckStates(states, inputs, p, static_cast<int64_t>(sequences.size()));
  const DeltaPlan plan =
      PlanDelta(sequences, NumEarlier(p), DeltaStateUse::kContinue);
  const at::Tensor history_QRW =
      states.conv_NRW.index_select(0, states.slots_Q);
  const DeltaRows rows = MixDeltaRows(inputs, p, plan, history_QRW);
  const at::Tensor state_QHKV =
      states.state_NHKV.index_select(0, states.slots_Q);
  const at::Tensor out_THV = NewOutput(inputs, p);
  RunDeltaChunks(rows, p, plan, state_QHKV, /*u_THV=*/{}, out_THV);
  states.state_NHKV.index_copy_(0, states.slots_Q, state_QHKV);
  StoreConvRows(inputs, sequences, history_QRW, states);
  return out_THV;
}

at::Tensor GatedDeltaStep(const DeltaInputs& inputs, const DeltaParameters& p,
                          const DeltaStates& states) {
  CheckInputs(inputs, p);
  CheckStates(states, inputs, p, inputs.qkv_TW.size(0));
  const at::Tensor history_QRW =
      states.conv_NRW.index_select(0, states.slots_Q);
  const DeltaRows rows = MixDeltaStepRows(inputs, p, history_QRW);
  const at::Tensor out_THV = NewOutput(inputs, p);
  RunDeltaStep(rows, p, states, out_THV);
  states.conv_NRW.index_copy_(
      0, states.slots_Q,
      at::cat({history_QRW.slice(1, 1), inputs.qkv_TW.unsqueeze(1)}, 1));
  return out_THV;
}

}  // namespace weft::ops
