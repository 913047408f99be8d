#include "src/ops/gated_product.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

#include "kernels/cpu/kernels.h"
#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

void CheckGateUp(const at::Tensor& gate_up_T2F) {
  TORCH_CHECK(gate_up_T2F.dim() == 2 && gate_up_T2F.size(1) % 2 == 0,
              "gate_up_T2F is ", gate_up_T2F.sizes(), ", wanted [T, 2F]");
  CheckArgument("gate_up_T2F", gate_up_T2F, gate_up_T2F,
                gate_up_T2F.scalar_type(), gate_up_T2F.sizes());
}

// The value and the derivative of a function. An activation is x sigmoid(z(x)).
// SiLU has z = x. GELU's tanh form has z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
// The clamped SiLU has z = 1.702 x with x = min(gate, 7).
struct Gate {
  at::Tensor value;
  at::Tensor slope;
};

Gate Activate(Activation activation, const at::Tensor& x) {
  if (activation == Activation::kClampedSilu) {
    const at::Tensor clamped = x.clamp_max(kClampedSiluLimit);
    const at::Tensor sigmoid = (clamped * kClampedSiluSlope).sigmoid();
    const at::Tensor value = clamped * sigmoid;
    const at::Tensor slope =
        sigmoid + kClampedSiluSlope * value * (1 - sigmoid);
    return {value, slope * (x <= kClampedSiluLimit)};
  }
  if (activation == Activation::kSilu) {
    const at::Tensor sigmoid = x.sigmoid();
    const at::Tensor value = x * sigmoid;
    return {value, sigmoid + value * (1 - sigmoid)};
  }
  const double k = 2 * std::sqrt(2 / std::numbers::pi);
  const at::Tensor square = x.square();
  const at::Tensor sigmoid = (x * (k + k * 0.044715 * square)).sigmoid();
  const at::Tensor value = x * sigmoid;
  const at::Tensor dz = k + 3 * k * 0.044715 * square;
  return {value, sigmoid + value * (1 - sigmoid) * dz};
}

// Returns the factor by which the activation is multiplied, and the factor's
// derivative with respect to `up`.
Gate Factor(Activation activation, const at::Tensor& up) {
  if (activation != Activation::kClampedSilu) return {up, at::ones_like(up)};
  return {up.clamp(-kClampedSiluLimit, kClampedSiluLimit) + 1,
          (up.abs() <= kClampedSiluLimit).to(up.scalar_type())};
}

// The CPU kernels of an activation.
struct RowKernels {
  GatedRow forward;
  void (*backward)(const float* dout, int64_t features, float* gate, float* up);
};

RowKernels KernelsOf(Activation activation) {
  const kernels::cpu::KernelTable& table = kernels::cpu::Kernels();
  switch (activation) {
    case Activation::kSilu:
      return {table.swiglu_row, table.swiglu_backward_row};
    case Activation::kGeluTanh:
      return {table.geglu_row, table.geglu_backward_row};
    default:
      return {table.clamped_swiglu_row, table.clamped_swiglu_backward_row};
  }
}

}  // namespace

GatedRow GatedRowOf(Activation activation) {
  return KernelsOf(activation).forward;
}

at::Tensor GatedProduct(Activation activation, const at::Tensor& gate_up_T2F) {
  CheckGateUp(gate_up_T2F);
  const int64_t features = gate_up_T2F.size(1) / 2;
  at::Tensor out_TF =
      at::empty({gate_up_T2F.size(0), features}, gate_up_T2F.options());
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(gate_up_T2F)) {
      cuda::GatedProduct(activation, gate_up_T2F, out_TF);
      return out_TF;
    }
  }
  if (!HasCpuKernel(gate_up_T2F)) {
    const at::ScalarType compute = ComputeType(gate_up_T2F);
    const at::Tensor gate = gate_up_T2F.narrow(1, 0, features).to(compute);
    const at::Tensor up = gate_up_T2F.narrow(1, features, features).to(compute);
    out_TF.copy_(Activate(activation, gate).value *
                 Factor(activation, up).value);
    return out_TF;
  }
  const float* gate = gate_up_T2F.const_data_ptr<float>();
  float* out = out_TF.mutable_data_ptr<float>();
  const GatedRow row_kernel = GatedRowOf(activation);
  ParallelFor(out_TF.size(0), RowGrain(features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  const float* row = gate + t * 2 * features;
                  row_kernel(row, row + features, features, out + t * features);
                }
              });
  return out_TF;
}

void GatedProductBackward(Activation activation, const at::Tensor& dout_TF,
                          at::Tensor& gate_up_T2F) {
  CheckGateUp(gate_up_T2F);
  const int64_t features = gate_up_T2F.size(1) / 2;
  CheckArgument("dout_TF", dout_TF, gate_up_T2F, gate_up_T2F.scalar_type(),
                {gate_up_T2F.size(0), features});
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(gate_up_T2F)) {
      return cuda::GatedProductBackward(activation, dout_TF, gate_up_T2F);
    }
  }
  if (!HasCpuKernel(gate_up_T2F)) {
    const at::ScalarType compute = ComputeType(gate_up_T2F);
    at::Tensor gate_view = gate_up_T2F.narrow(1, 0, features);
    at::Tensor up_view = gate_up_T2F.narrow(1, features, features);
    const Gate gate = Activate(activation, gate_view.to(compute));
    const Gate up = Factor(activation, up_view.to(compute));
    const at::Tensor dout = dout_TF.to(compute);
    gate_view.copy_(dout * up.value * gate.slope);
    up_view.copy_(dout * gate.value * up.slope);
    return;
  }
  const float* dout = dout_TF.const_data_ptr<float>();
  float* gate = gate_up_T2F.mutable_data_ptr<float>();
  const auto row_kernel = KernelsOf(activation).backward;
  ParallelFor(
      dout_TF.size(0), RowGrain(features), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          float* row = gate + t * 2 * features;
          row_kernel(dout + t * features, features, row, row + features);
        }
      });
}

}  // namespace weft::ops
