#include "src/ops/cuda_dispatch.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "kernels/cpu/int8_rows.h"
#include "kernels/cuda/adamw.h"
#include "kernels/cuda/dtype.h"
#include "kernels/cuda/expert_rows.h"
#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/head_gradient.h"
#include "kernels/cuda/int8_weight.h"
#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/paged_attention.h"
#include "kernels/cuda/rms_norm.h"
#include "kernels/cuda/rotary.h"
#include "kernels/cuda/vocab_rows.h"
#include "src/ops/activation.h"
#include "src/ops/rotary.h"

namespace weft::ops::cuda {
namespace {

namespace k = kernels::cuda;

// The kernels' arguments for PrepareHeads and its backward pass. `rows` and
// `norms` have pointers to `positions`, `q_C` and `k_C`, which may be copies.
// `slots` is empty if head_slots.slots_T is undefined.
struct HeadArguments {
  HeadArguments(const Heads& heads, const at::Tensor& positions_T,
                const RotaryTable& table, const HeadNorms& head_norms,
                const KvSlots& head_slots);

  at::Tensor positions, q_C, k_C;
  k::RotaryRows rows;
  k::HeadNorms norms;
  k::KvSlots slots;
};

void CheckSameType(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "a kernel's tensors are of ",
              a.scalar_type(), " and ", b.scalar_type());
}

void CheckSlots(const Heads& heads, const KvSlots& slots) {
  CheckSameType(heads.k_TKC, heads.v_TKC);
  CheckSameType(heads.k_TKC, slots.k_pages_PSKC);
  CheckSameType(heads.k_TKC, slots.v_pages_PSKC);
  TORCH_CHECK(slots.slots_T.is_contiguous() &&
                  slots.slots_T.numel() == heads.k_TKC.size(0) &&
                  heads.v_TKC.sizes() == heads.k_TKC.sizes() &&
                  heads.v_TKC.stride(2) == 1 &&
                  slots.k_pages_PSKC.is_contiguous() &&
                  slots.v_pages_PSKC.is_contiguous(),
              "pages want a slot for each token, and contiguous pages");
  TORCH_CHECK(slots.k_pages_PSKC.dim() == 4 &&
                  slots.k_pages_PSKC.size(2) == heads.k_TKC.size(1) &&
                  slots.k_pages_PSKC.size(3) == heads.k_TKC.size(2) &&
                  slots.v_pages_PSKC.sizes() == slots.k_pages_PSKC.sizes(),
              "pages are of heads ", heads.k_TKC.sizes(), ", got ",
              slots.k_pages_PSKC.sizes(), " and ", slots.v_pages_PSKC.sizes());
}

k::DType DTypeOf(const at::Tensor& tensor) {
  TORCH_CHECK(HasCudaKernel(tensor), "the CUDA kernels take f32 and bf16, got ",
              tensor.scalar_type(), " on ", tensor.device());
  return tensor.scalar_type() == at::kBFloat16 ? k::DType::kBf16
                                               : k::DType::kF32;
}

k::GateActivation ActivationOf(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return k::GateActivation::kSilu;
    case Activation::kGeluTanh:
      return k::GateActivation::kGeluTanh;
    default:
      return k::GateActivation::kClampedSilu;
  }
}

k::HeadRows RowsOfHeads(const at::Tensor& x_TMC) {
  return {.data = x_TMC.mutable_data_ptr(),
          .num_heads = x_TMC.size(1),
          .token_stride = x_TMC.stride(0),
          .head_stride = x_TMC.stride(1)};
}

HeadArguments::HeadArguments(const Heads& heads, const at::Tensor& positions_T,
                             const RotaryTable& table,
                             const HeadNorms& head_norms,
                             const KvSlots& head_slots)
    : positions(positions_T.contiguous()) {
  CheckSameType(heads.q_TQC, heads.k_TKC);
  rows = {.dtype = DTypeOf(heads.q_TQC),
          .num_tokens = heads.q_TQC.size(0),
          .half_features = heads.q_TQC.size(2) / 2,
          .q = RowsOfHeads(heads.q_TQC),
          .k = RowsOfHeads(heads.k_TKC),
          .positions_T = positions.const_data_ptr<int32_t>(),
          .cos_PC = table.cos_PC.const_data_ptr<float>(),
          .sin_PC = table.sin_PC.const_data_ptr<float>()};
  if (head_slots.slots_T.defined()) {
    CheckSlots(heads, head_slots);
    slots = {.v = RowsOfHeads(heads.v_TKC),
             .slots_T = head_slots.slots_T.const_data_ptr<int64_t>(),
             .k_pages = head_slots.k_pages_PSKC.mutable_data_ptr(),
             .v_pages = head_slots.v_pages_PSKC.mutable_data_ptr()};
  }
  if (!head_norms.q_C.defined()) return;
  CheckSameType(head_norms.q_C, head_norms.k_C);
  q_C = head_norms.q_C.contiguous();
  k_C = head_norms.k_C.contiguous();
  norms = {.dtype = DTypeOf(q_C),
           .eps = static_cast<float>(head_norms.eps),
           .q_C = q_C.const_data_ptr(),
           .k_C = k_C.const_data_ptr()};
}

// Returns the kernel's arguments. `weight` is contiguous. The caller may free
// it once the launch is queued, because the allocator reuses memory in the
// order of the stream.
k::RmsNormRows NormRows(const at::Tensor& x_TD, const at::Tensor& weight,
                        double eps) {
  return {.dtype = DTypeOf(x_TD),
          .weight_dtype = DTypeOf(weight),
          .num_rows = x_TD.size(0),
          .features = x_TD.size(1),
          .eps = static_cast<float>(eps),
          .x_TD = x_TD.const_data_ptr(),
          .x_stride = x_TD.stride(0),
          .weight_D = weight.const_data_ptr()};
}

void CheckSameHeads(const at::Tensor& a, const at::Tensor& b) {
  CheckSameType(a, b);
  TORCH_CHECK(a.sizes() == b.sizes() && a.stride(2) == 1,
              "heads want unit stride and the sizes of the others, got ",
              a.sizes(), " and ", b.sizes());
}

k::VocabRows RowsOfVocab(const at::Tensor& logits_RV,
                         const VocabRowsInput& input,
                         const at::Tensor& logprobs_E,
                         const at::Tensor& entropy_R) {
  return {.num_rows = logits_RV.size(0),
          .vocab = logits_RV.size(1),
          .logits_RV = logits_RV.mutable_data_ptr<float>(),
          .row_offsets = input.row_offsets.const_data_ptr<int64_t>(),
          .targets_E = input.targets_E.const_data_ptr<int64_t>(),
          .temperature_R = input.temperature_R.const_data_ptr<float>(),
          .softcap = static_cast<float>(input.softcap),
          .clear_targets = input.clear_targets,
          .logprobs_E = logprobs_E.mutable_data_ptr<float>(),
          .entropy_R = entropy_R.defined() ? entropy_R.mutable_data_ptr<float>()
                                           : nullptr};
}

// Does not check stride(0), because the rows may be part of a larger matrix.
bool HasRowsOfBytes(const at::Tensor& weight) {
  return weight.is_cuda() && weight.scalar_type() == at::kChar &&
         weight.stride(1) == 1;
}

k::Int8Weight Int8WeightOf(const at::Tensor& weight) {
  return {.outputs = weight.size(0),
          .inputs = kernels::cpu::Int8RowInputs(weight.size(1)),
          .rows_OB = weight.const_data_ptr<int8_t>(),
          .stride = weight.stride(0)};
}

}  // namespace

namespace k = kernels::cuda;

CUstream_st* CurrentStream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

void WaitForStream() {
  // Does not call LibTorch's synchronize(), because LibTorch's search for
  // unintended waits (SyncDebugMode) would count it.
  C10_CUDA_CHECK(cudaStreamSynchronize(CurrentStream()));
}

void QueueDownload(const void* from, int64_t bytes, void* to) {
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost,
                                 CurrentStream()));
}

void QueueUpload(const void* from, int64_t bytes, void* to) {
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice,
                                 CurrentStream()));
}

void CopyToHost(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  // LibTorch's own copy would make the allocator query the device when the
  // pinned memory is freed. If the device was lost in between, that query would
  // end the process.
  for (const auto& [from, to] : copies) {
    QueueDownload(from.const_data_ptr(), static_cast<int64_t>(from.nbytes()),
                  to.mutable_data_ptr());
  }
  WaitForStream();
}

bool HasGroupedProduct() {
  int device = 0, major = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9 || major == 10;
}

void RmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
             at::Tensor& y_TD) {
  CheckSameType(x_TD, y_TD);
  const at::Tensor weight = weight_D.contiguous();
  C10_CUDA_CHECK(k::RmsNorm(NormRows(x_TD, weight, eps),
                            y_TD.mutable_data_ptr(), y_TD.stride(0),
                            CurrentStream()));
}

void RmsNormBackward(const at::Tensor& dy_TD, const at::Tensor& x_TD,
                     const at::Tensor& weight_D, double eps,
                     at::Tensor& dx_TD) {
  CheckSameType(x_TD, dy_TD);
  CheckSameType(x_TD, dx_TD);
  const at::Tensor weight = weight_D.contiguous();
  C10_CUDA_CHECK(k::RmsNormBackward(
      NormRows(x_TD, weight, eps), dy_TD.const_data_ptr(), dy_TD.stride(0),
      dx_TD.mutable_data_ptr(), dx_TD.stride(0), CurrentStream()));
}

void AddRmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
                at::Tensor& sum_TD, at::Tensor& y_TD) {
  CheckSameType(x_TD, sum_TD);
  CheckSameType(x_TD, y_TD);
  const at::Tensor weight = weight_D.contiguous();
  C10_CUDA_CHECK(k::AddRmsNorm(
      NormRows(x_TD, weight, eps), sum_TD.mutable_data_ptr(), sum_TD.stride(0),
      y_TD.mutable_data_ptr(), y_TD.stride(0), CurrentStream()));
}

void PrepareHeads(const Heads& heads, const at::Tensor& positions_T,
                  const RotaryTable& table, const HeadNorms& norms,
                  const KvSlots& slots) {
  const HeadArguments arguments(heads, positions_T, table, norms, slots);
  C10_CUDA_CHECK(k::Rotary(arguments.rows, arguments.norms, arguments.slots,
                           CurrentStream()));
}

void PrepareHeadsBackward(const Heads& gradients, const at::Tensor& positions_T,
                          const RotaryTable& table, const HeadNorms& norms,
                          const Heads& raw, const Heads& into) {
  const HeadArguments arguments(into, positions_T, table, norms,
                                /*head_slots=*/{});
  CheckSameHeads(gradients.q_TQC, into.q_TQC);
  CheckSameHeads(gradients.k_TKC, into.k_TKC);
  k::HeadGradients read = {.q = RowsOfHeads(gradients.q_TQC),
                           .k = RowsOfHeads(gradients.k_TKC)};
  if (!gradients.v_TKC.is_same(into.v_TKC)) {
    CheckSameHeads(gradients.v_TKC, into.v_TKC);
    CheckSameHeads(into.v_TKC, into.k_TKC);
    read.v = RowsOfHeads(gradients.v_TKC);
    read.v_to = RowsOfHeads(into.v_TKC);
  }
  if (norms.q_C.defined()) {
    CheckSameHeads(raw.q_TQC, into.q_TQC);
    CheckSameHeads(raw.k_TKC, into.k_TKC);
    read.raw_q = RowsOfHeads(raw.q_TQC);
    read.raw_k = RowsOfHeads(raw.k_TKC);
  }
  C10_CUDA_CHECK(k::RotaryBackward(arguments.rows, arguments.norms, read,
                                   CurrentStream()));
}

void GatedProduct(Activation activation, const at::Tensor& gate_up_T2F,
                  at::Tensor& out_TF) {
  CheckSameType(gate_up_T2F, out_TF);
  C10_CUDA_CHECK(k::GatedProduct(DTypeOf(gate_up_T2F), ActivationOf(activation),
                                 out_TF.size(0), out_TF.size(1),
                                 gate_up_T2F.const_data_ptr(),
                                 out_TF.mutable_data_ptr(), CurrentStream()));
}

void GatedProductBackward(Activation activation, const at::Tensor& dout_TF,
                          at::Tensor& gate_up_T2F) {
  CheckSameType(gate_up_T2F, dout_TF);
  C10_CUDA_CHECK(k::GatedProductBackward(
      DTypeOf(gate_up_T2F), ActivationOf(activation), dout_TF.size(0),
      dout_TF.size(1), dout_TF.const_data_ptr(), gate_up_T2F.mutable_data_ptr(),
      CurrentStream()));
}

void MergeByLse(const at::Tensor& part_NHC, const at::Tensor& part_lse_NH,
                at::Tensor& out_NHC, at::Tensor& lse_NH) {
  CheckSameType(part_NHC, out_NHC);
  const at::Tensor part = part_NHC.contiguous();
  const at::Tensor part_lse = part_lse_NH.contiguous();
  C10_CUDA_CHECK(k::LseMergeRows(
      DTypeOf(out_NHC), lse_NH.numel(), out_NHC.size(2), part.const_data_ptr(),
      part_lse.const_data_ptr<float>(), out_NHC.mutable_data_ptr(),
      lse_NH.mutable_data_ptr<float>(), CurrentStream()));
}

void VocabRows(at::Tensor& logits_RV, const VocabRowsInput& input,
               bool softmax_in_place, at::Tensor& logprobs_E,
               at::Tensor& entropy_R) {
  k::VocabRows rows = RowsOfVocab(logits_RV, input, logprobs_E, entropy_R);
  if (softmax_in_place) rows.softmax = k::VocabSoftmax::kInPlace;
  C10_CUDA_CHECK(k::ScoreVocabRows(rows, CurrentStream()));
}

void VocabWeights(const at::Tensor& logits_RV, const VocabRowsInput& input,
                  at::Tensor& weights_RV, at::Tensor& scale_R,
                  at::Tensor& logprobs_E, at::Tensor& entropy_R) {
  k::VocabRows rows = RowsOfVocab(logits_RV, input, logprobs_E, entropy_R);
  rows.softmax = k::VocabSoftmax::kWeights;
  rows.weights_RV = weights_RV.mutable_data_ptr();
  rows.scale_R = scale_R.mutable_data_ptr<float>();
  C10_CUDA_CHECK(k::ScoreVocabRows(rows, CurrentStream()));
}

void HeadGradient(const at::Tensor& projection_RH, const at::Tensor& factor_R,
                  const at::Tensor& scale_R, const at::Tensor& row_offsets,
                  const at::Tensor& targets_E, const at::Tensor& coefficient_E,
                  const at::Tensor& weight_VH, at::Tensor& out_RH) {
  CheckSameType(weight_VH, out_RH);
  C10_CUDA_CHECK(
      k::HeadGradient({.dtype = DTypeOf(weight_VH),
                       .num_rows = projection_RH.size(0),
                       .hidden = projection_RH.size(1),
                       .projection_RH = projection_RH.const_data_ptr<float>(),
                       .factor_R = factor_R.const_data_ptr<float>(),
                       .scale_R = scale_R.const_data_ptr<float>(),
                       .row_offsets = row_offsets.const_data_ptr<int64_t>(),
                       .targets_E = targets_E.const_data_ptr<int64_t>(),
                       .coefficient_E = coefficient_E.const_data_ptr<float>(),
                       .weight_VH = weight_VH.const_data_ptr(),
                       .out_RH = out_RH.mutable_data_ptr()},
                      CurrentStream()));
}

bool TakesPagedAttention(const at::Tensor& q_BHC) {
  return HasCudaKernel(q_BHC) && q_BHC.size(2) >= 1 &&
         q_BHC.size(2) <= k::kMaxHeadFeatures;
}

void PagedAttention(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                    const at::Tensor& v_pages_PSKC,
                    const at::Tensor& page_table_BL,
                    const at::Tensor& lengths_B, const AttentionRule& rule,
                    const at::Tensor& sinks_H, at::Tensor& out_BHC) {
  CheckSameType(q_BHC, k_pages_PSKC);
  CheckSameType(q_BHC, v_pages_PSKC);
  CheckSameType(q_BHC, out_BHC);
  // q may be a view of the query heads in rows that also hold k and v. The
  // kernel reads such a view without a copy.
  const bool is_packed =
      q_BHC.stride(2) == 1 && q_BHC.stride(1) == q_BHC.size(2);
  const at::Tensor q = is_packed ? q_BHC : q_BHC.contiguous();
  const at::Tensor table = page_table_BL.contiguous();
  const at::Tensor lengths = lengths_B.contiguous();
  k::PagedAttentionBatch batch = {
      .dtype = DTypeOf(q),
      .batch = q.size(0),
      .num_heads = q.size(1),
      .num_kv_heads = k_pages_PSKC.size(2),
      .head_features = q.size(2),
      .page_tokens = k_pages_PSKC.size(1),
      .q_BHC = q.const_data_ptr(),
      .q_stride = q.stride(0),
      .k_pages_PSKC = k_pages_PSKC.const_data_ptr(),
      .v_pages_PSKC = v_pages_PSKC.const_data_ptr(),
      .page_table_BL = table.const_data_ptr<int32_t>(),
      .table_entries = table.size(1),
      .lengths_B = lengths.const_data_ptr<int32_t>(),
      .window = rule.window,
      .scale = static_cast<float>(rule.scale),
      .softcap = static_cast<float>(rule.softcap),
      .sinks_H = sinks_H.defined() ? sinks_H.const_data_ptr<float>() : nullptr,
      .out_BHC = out_BHC.mutable_data_ptr()};
  batch.splits = k::ChooseAttentionSplits(batch);
  const at::Tensor workspace = at::empty({k::PagedAttentionWorkspace(batch)},
                                         q.options().dtype(at::kFloat));
  batch.workspace = workspace.mutable_data_ptr<float>();
  C10_CUDA_CHECK(k::PagedAttention(batch, CurrentStream()));
}

bool TakesWidenInt8Rows(const at::Tensor& weight, at::ScalarType dtype) {
  return HasRowsOfBytes(weight) && k::TakesInt8(Int8WeightOf(weight)) &&
         (dtype == at::kFloat || dtype == at::kBFloat16);
}

at::Tensor WidenInt8Rows(const at::Tensor& weight, int64_t begin, int64_t end,
                         at::ScalarType dtype) {
  at::Tensor wide_OI =
      at::empty({weight.size(0), end - begin}, weight.options().dtype(dtype));
  C10_CUDA_CHECK(k::WidenInt8Rows(Int8WeightOf(weight), begin, end,
                                  DTypeOf(wide_OI), wide_OI.mutable_data_ptr(),
                                  CurrentStream()));
  return wide_OI;
}

bool TakesInt8FewRows(const at::Tensor& x_MI, const at::Tensor& weight) {
  return HasRowsOfBytes(weight) && x_MI.is_cuda() &&
         x_MI.scalar_type() == at::kBFloat16 && x_MI.stride(1) == 1 &&
         k::TakesInt8FewRows({.num_rows = x_MI.size(0),
                              .weight = Int8WeightOf(weight),
                              .x_MI = x_MI.const_data_ptr(),
                              .x_stride = x_MI.stride(0)});
}

void Int8FewRows(const at::Tensor& x_MI, const at::Tensor& weight,
                 const at::Tensor& bias_O, at::Tensor& y_MO) {
  const k::Int8Weight stored = Int8WeightOf(weight);
  TORCH_CHECK(
      x_MI.size(1) == stored.inputs &&
          y_MO.sizes() == at::IntArrayRef({x_MI.size(0), stored.outputs}) &&
          y_MO.stride(1) == 1 &&
          (!bias_O.defined() || bias_O.numel() == stored.outputs),
      "rows ", x_MI.sizes(), " and ", y_MO.sizes(),
      " do not fit a weight of 8 bits ", weight.sizes());
  at::Tensor bias;
  if (bias_O.defined()) bias = bias_O.to(x_MI.scalar_type()).contiguous();
  C10_CUDA_CHECK(k::Int8FewRows(
      {.num_rows = x_MI.size(0),
       .weight = stored,
       .x_MI = x_MI.const_data_ptr(),
       .x_stride = x_MI.stride(0),
       .bias_O = bias.defined() ? bias.const_data_ptr() : nullptr,
       .y_dtype = DTypeOf(y_MO),
       .y_MO = y_MO.mutable_data_ptr(),
       .y_stride = y_MO.stride(0)},
      CurrentStream()));
}

ExpertOrder SortByExpert(const at::Tensor& experts_TK, int64_t num_experts) {
  TORCH_CHECK(experts_TK.is_cuda() && experts_TK.is_contiguous() &&
                  experts_TK.scalar_type() == at::kLong,
              "a sort by expert wants contiguous i64 on a CUDA device");
  const int64_t num_rows = experts_TK.numel();
  ExpertOrder order{
      .tokens_N = at::empty({num_rows}, experts_TK.options()),
      .pairs_N = at::empty({num_rows}, experts_TK.options()),
      .places_TK = at::empty_like(experts_TK),
      .ends_E = at::empty({num_experts}, experts_TK.options().dtype(at::kInt))};
  C10_CUDA_CHECK(
      k::SortByExpert({.experts_TK = experts_TK.const_data_ptr<int64_t>(),
                       .num_rows = num_rows,
                       .per_token = experts_TK.size(1),
                       .num_experts = num_experts,
                       .tokens_N = order.tokens_N.mutable_data_ptr<int64_t>(),
                       .pairs_N = order.pairs_N.mutable_data_ptr<int64_t>(),
                       .places_TK = order.places_TK.mutable_data_ptr<int64_t>(),
                       .ends_E = order.ends_E.mutable_data_ptr<int32_t>()},
                      CurrentStream()));
  return order;
}

at::Tensor SumExpertRows(const at::Tensor& rows_NH,
                         const at::Tensor& places_TK) {
  const at::Tensor rows = rows_NH.contiguous();
  const at::Tensor places = places_TK.contiguous();
  at::Tensor sums_TH =
      at::empty({places.size(0), rows.size(1)}, rows.options());
  C10_CUDA_CHECK(
      k::SumExpertRows({.dtype = DTypeOf(rows),
                        .num_tokens = places.size(0),
                        .per_token = places.size(1),
                        .features = rows.size(1),
                        .places_TK = places.const_data_ptr<int64_t>(),
                        .rows_NH = rows.const_data_ptr(),
                        .sums_TH = sums_TH.mutable_data_ptr()},
                       CurrentStream()));
  return sums_TH;
}

void KeepExperts(const at::Tensor& experts_TK, const at::Tensor& slots_T,
                 int64_t column, const at::Tensor& experts_SW) {
  const int64_t num_tokens = experts_TK.size(0);
  const at::Tensor experts = experts_TK.contiguous();
  TORCH_CHECK(experts_SW.is_cuda() && experts_SW.is_contiguous() &&
                  column + experts.size(1) <= experts_SW.size(1) &&
                  slots_T.is_contiguous() && slots_T.numel() == num_tokens,
              "kept experts want a slot for each token, and contiguous slots");
  C10_CUDA_CHECK(
      k::KeepExperts({.experts_TK = experts.const_data_ptr<int64_t>(),
                      .num_tokens = num_tokens,
                      .per_token = experts.size(1),
                      .slots_T = slots_T.const_data_ptr<int64_t>(),
                      .experts_SW = experts_SW.mutable_data_ptr<int16_t>(),
                      .width = experts_SW.size(1),
                      .column = column},
                     CurrentStream()));
}

void AdamW(const kernels::cpu::AdamWScalars& scalars,
           const at::Tensor& weights_N, const at::Tensor& gradient_N,
           at::Tensor& moment1_N, at::Tensor& moment2_N,
           at::Tensor& weights_out_N) {
  C10_CUDA_CHECK(k::AdamW(
      scalars, weights_N.numel(), weights_N.const_data_ptr<float>(),
      gradient_N.const_data_ptr<float>(), moment1_N.mutable_data_ptr<float>(),
      moment2_N.mutable_data_ptr<float>(),
      weights_out_N.mutable_data_ptr<float>(), CurrentStream()));
}

double SumOfSquares(const at::Tensor& x_N) {
  const at::Tensor partials = at::empty({k::SumOfSquaresPartials(x_N.numel())},
                                        x_N.options().dtype(at::kDouble));
  C10_CUDA_CHECK(k::SumOfSquares(x_N.const_data_ptr<float>(), x_N.numel(),
                                 partials.mutable_data_ptr<double>(),
                                 CurrentStream()));
  return partials[0].item<double>();
}

}  // namespace weft::ops::cuda
