#include "src/ops/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::ops {
namespace {

void CheckShapes(const at::Tensor& gate_up_T2F, const at::Tensor& out_TF) {
  TORCH_CHECK(gate_up_T2F.dim() == 2 && out_TF.dim() == 2 &&
                  gate_up_T2F.size(0) == out_TF.size(0) &&
                  gate_up_T2F.size(1) == 2 * out_TF.size(1),
              "swiglu wants [T, 2F] and [T, F], got ", gate_up_T2F.sizes(),
              " and ", out_TF.sizes());
  TORCH_CHECK(gate_up_T2F.is_contiguous() && out_TF.is_contiguous(),
              "swiglu wants contiguous tensors");
}

}  // namespace

void SwiGlu(const at::Tensor& gate_up_T2F, at::Tensor& out_TF) {
  CheckShapes(gate_up_T2F, out_TF);
  const int64_t features = out_TF.size(1);
  if (!HasCpuKernel(gate_up_T2F)) {
    const at::ScalarType compute = ComputeType(gate_up_T2F);
    const at::Tensor gate = gate_up_T2F.narrow(1, 0, features).to(compute);
    const at::Tensor up = gate_up_T2F.narrow(1, features, features).to(compute);
    out_TF.copy_(at::silu(gate) * up);
    return;
  }
  const float* gate = gate_up_T2F.const_data_ptr<float>();
  float* out = out_TF.mutable_data_ptr<float>();
  const auto row_kernel = kernels::cpu::Kernels().swiglu_row;
  at::parallel_for(
      0, out_TF.size(0), RowGrain(features), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const float* row = gate + t * 2 * features;
          row_kernel(row, row + features, features, out + t * features);
        }
      });
}

void SwiGluBackward(const at::Tensor& dout_TF, at::Tensor& gate_up_T2F) {
  CheckShapes(gate_up_T2F, dout_TF);
  const int64_t features = dout_TF.size(1);
  if (!HasCpuKernel(gate_up_T2F)) {
    const at::ScalarType compute = ComputeType(gate_up_T2F);
    at::Tensor gate_view = gate_up_T2F.narrow(1, 0, features);
    at::Tensor up_view = gate_up_T2F.narrow(1, features, features);
    const at::Tensor gate = gate_view.to(compute);
    const at::Tensor dout = dout_TF.to(compute);
    const at::Tensor sigmoid = gate.sigmoid();
    const at::Tensor silu = gate * sigmoid;
    const at::Tensor dgate =
        dout * up_view.to(compute) * (sigmoid + silu * (1 - sigmoid));
    gate_view.copy_(dgate);
    up_view.copy_(dout * silu);
    return;
  }
  const float* dout = dout_TF.const_data_ptr<float>();
  float* gate = gate_up_T2F.mutable_data_ptr<float>();
  const auto row_kernel = kernels::cpu::Kernels().swiglu_backward_row;
  at::parallel_for(
      0, dout_TF.size(0), RowGrain(features), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          float* row = gate + t * 2 * features;
          row_kernel(dout + t * features, features, row, row + features);
        }
      });
}

}  // namespace weft::ops
