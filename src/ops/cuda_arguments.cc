#include "src/ops/cuda_arguments.h"

#include <ATen/ATen.h>

#include "src/ops/cuda_dispatch.h"

namespace weft::ops::cuda {

namespace k = kernels::cuda;

namespace {

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

}  // namespace

k::DType DTypeOf(const at::Tensor& tensor) {
  TORCH_CHECK(HasCudaKernel(tensor), "the CUDA kernels take f32 and bf16, got ",
              tensor.scalar_type(), " on ", tensor.device());
  return tensor.scalar_type() == at::kBFloat16 ? k::DType::kBf16
                                               : k::DType::kF32;
}

void CheckSameType(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "a kernel's tensors are of ",
              a.scalar_type(), " and ", b.scalar_type());
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

}  // namespace weft::ops::cuda
