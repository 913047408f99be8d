#include "src/ops/matmul.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>

#include "src/ops/cpu_dispatch.h"

namespace weft::ops {
namespace {

// LibTorch reaches oneDNN's dense product by this operator alone: x [M, K],
// weight [N, K] of any strides, bias, and a fused function, "none" here.
using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&,
                                   const std::optional<at::Tensor>&,
                                   std::string_view,
                                   c10::List<std::optional<at::Scalar>>,
                                   std::optional<std::string_view>);

const char* const kOperator = "mkldnn::_linear_pointwise";

at::Tensor OneDnnMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                        const std::optional<at::Tensor>& bias_N) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(kOperator, "")
                                 .typed<LinearPointwise>();
  return linear.call(a_MK, b_KN.t(), bias_N, "none",
                     c10::List<std::optional<at::Scalar>>(), std::nullopt);
}

// AMD's processors alone were measured; a LibTorch may lack the operator.
bool HasOneDnn() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") &&
         c10::Dispatcher::singleton().findSchema({kOperator, ""}).has_value();
#else
  return false;
#endif
}

bool PrefersOneDnn(const at::Tensor& a_MK) {
  static const bool has_one_dnn = HasOneDnn();
  // Empty products have nothing to gain.
  return has_one_dnn && HasCpuKernel(a_MK) && a_MK.numel() > 0;
}

}  // namespace

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return MatMul(a_MK, b_KN, at::Tensor());
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N) {
  if (!PrefersOneDnn(a_MK)) {
    return bias_N.defined() ? at::addmm(bias_N, a_MK, b_KN)
                            : at::mm(a_MK, b_KN);
  }
  return OneDnnMatMul(
      a_MK, b_KN,
      bias_N.defined() ? std::optional<at::Tensor>(bias_N) : std::nullopt);
}

}  // namespace weft::ops
