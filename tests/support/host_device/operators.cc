// LibTorch's operators on the device of host_device.h. Each runs the CPU's
// operator on host views of its tensors.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/GroupedMMUtils.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/host_device/host_device.h"
#include "tests/support/host_device/host_tensor.h"

namespace weft::testing {
namespace {

using c10::IValue;

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::CUDA);
const at::Device kDevice(at::kCUDA, 0);

// Returns a device tensor that keeps a host tensor alive.
at::Tensor DeviceOf(const at::Tensor& host) {
  if (!host.defined() || host.is_cuda()) return host;
  AddLiveAllocations(1);
  return at::from_blob(
      host.data_ptr(), host.sizes(), host.strides(),
      [host](void*) { AddLiveAllocations(-1); }, host.options().device(kDevice),
      kDevice);
}

// On a device, a host tensor may only be a single number.
void CheckDevice(const at::Tensor& tensor, const std::string& op) {
  TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || tensor.dim() == 0, op,
              " mixes tensors of the host and of the device");
}

IValue HostArgument(const IValue& value, const std::string& op) {
  if (value.isTensor()) {
    CheckDevice(value.toTensor(), op);
    return HostOf(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> hosts;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      CheckDevice(tensor, op);
      hosts.push_back(HostOf(tensor));
    }
    return hosts;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> hosts;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorVector()) {
      if (tensor.has_value()) CheckDevice(*tensor, op);
      hosts.push_back(tensor.has_value() ? std::optional(HostOf(*tensor))
                                         : std::nullopt);
    }
    return hosts;
  }
  if (value.isDevice()) return at::Device(at::kCPU);
  return value;
}

// Returns the argument that the operator writes and returns as this result.
// Returns null if the result is a new tensor.
const IValue* ReturnedArgument(const c10::FunctionSchema& schema, size_t result,
                               const std::vector<IValue>& arguments) {
  const c10::AliasInfo* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return nullptr;
  TORCH_CHECK(alias->isWrite(), schema.name(),
              " makes a view, which the device on the host does not know");
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* own = schema.arguments()[i].alias_info();
    if (own != nullptr && *own == *alias) return &arguments[i];
  }
  TORCH_CHECK(false, schema.name(), " returns none of its arguments");
}

// Returns whether the host reads the operator's result or the result's size.
bool HostReads(const std::string& op) {
  static const std::set<std::string> readers = {
      "_local_scalar_dense", "_unique2", "bincount", "equal",
      "masked_select",       "nonzero",  "_unique",  "unique_consecutive"};
  return readers.contains(op);
}

// Turns "aten::add.out" into "add".
std::string ShortName(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.substr(name.find("::") + 2);
}

// Returns whether the argument is an empty tensor that LibTorch made for a
// result. The operator sets its size.
bool IsUnsized(const c10::Argument& argument, const IValue& value) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
         value.isTensor() && value.toTensor().defined() &&
         value.toTensor().numel() == 0;
}

// Gives an unsized tensor the memory and the sizes of another one.
void Become(const at::Tensor& tensor, const at::Tensor& other) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_sizes_and_strides(other.sizes(), other.strides());
}

// Moves the operator's host results to their place on the device.
void TakeResults(const c10::FunctionSchema& schema,
                 const std::vector<IValue>& arguments,
                 const std::vector<IValue>& hosts, torch::jit::Stack* stack) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!IsUnsized(schema.arguments()[i], arguments[i])) continue;
    Become(arguments[i].toTensor(), DeviceOf(hosts[i].toTensor()));
  }
  const size_t num_results = schema.returns().size();
  for (size_t i = 0; i < num_results; ++i) {
    IValue& result = (*stack)[stack->size() - num_results + i];
    if (!result.isTensor()) continue;
    const IValue* argument = ReturnedArgument(schema, i, arguments);
    result =
        argument != nullptr ? *argument : IValue(DeviceOf(result.toTensor()));
  }
}

void RunOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = ShortName(op);
  const size_t count = schema.arguments().size();
  const std::vector<IValue> arguments = torch::jit::last(*stack, count).vec();
  std::vector<IValue> hosts;
  for (size_t i = 0; i < count; ++i) {
    hosts.push_back(
        IsUnsized(schema.arguments()[i], arguments[i])
            ? IValue(at::empty(
                  {0}, arguments[i].toTensor().options().device(at::kCPU)))
            : HostArgument(arguments[i], name));
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), hosts.begin(), hosts.end());
  op.callBoxed(stack);
  CurrentEvents().launches.push_back(name);
  if (HostReads(name)) CurrentEvents().waits.push_back(name);
  TakeResults(schema, arguments, hosts, stack);
}

at::Tensor Empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>,
                 std::optional<at::MemoryFormat> memory_format) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(at::kCUDA),
                                   kDeviceKeys, dtype.value_or(at::kFloat),
                                   memory_format);
}

at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device>,
                        std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(at::kCUDA), kDeviceKeys,
      dtype.value_or(at::kFloat));
}

at::Tensor& Copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  HostOf(to).copy_(HostOf(from));
  if (to.numel() == 0) return to;
  DeviceEvents& events = CurrentEvents();
  if (to.is_cuda() && from.is_cuda()) {
    events.launches.emplace_back("copy_");
  } else if (to.is_cuda() && non_blocking && from.is_pinned()) {
    events.uploads.emplace_back("copy_");
  } else {
    events.waits.emplace_back(to.is_cuda() ? "copy_ of memory not pinned"
                                           : "copy_ to the host");
  }
  return to;
}

const at::Tensor& Resize(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  if (tensor.sizes() != sizes)
    Become(tensor, at::empty(sizes, tensor.options()));
  return tensor;
}

// On a GPU, cuBLAS widens the result. The CPU has no such product, so this
// widens the operands.
at::Tensor WideningMm(const at::Tensor& a, const at::Tensor& b,
                      at::ScalarType dtype) {
  CurrentEvents().launches.emplace_back("mm");
  return DeviceOf(at::mm(HostOf(a).to(dtype), HostOf(b).to(dtype)));
}
at::Tensor& WideningMmOut(const at::Tensor& a, const at::Tensor& b,
                          at::ScalarType dtype, at::Tensor& out) {
  HostOf(out).copy_(HostOf(WideningMm(a, b, dtype)));
  return out;
}

// Runs the CPU's product, after the checks of LibTorch's CUDA kernel. Records
// two launches.
at::Tensor GroupedMm(const at::Tensor& rows, const at::Tensor& weights,
                     const std::optional<at::Tensor>& ends,
                     const std::optional<at::Tensor>& bias,
                     std::optional<at::ScalarType> dtype) {
  at::native::_grouped_mm_validate_inputs(rows, weights, ends, bias, dtype);
  TORCH_CHECK(rows.scalar_type() == at::kBFloat16 && ends->is_cuda() &&
                  weights.size(0) < 1024,
              "the device's grouped product does not take these matrices");
  DeviceEvents& events = CurrentEvents();
  events.launches.emplace_back("prepare_grouped_gemm_data");
  events.launches.emplace_back("_grouped_mm");
  // The host's product reads the ends one by one. That of a device does not.
  const at::DisableRecordFunctionGuard unseen;
  return DeviceOf(
      at::_grouped_mm(HostOf(rows), HostOf(weights), HostOf(*ends)));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnHost>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyStrided);
  library.impl("resize_", &Resize);
  library.impl("copy_", &Copy);
  library.impl("mm.dtype", &WideningMm);
  library.impl("mm.dtype_out", &WideningMmOut);
  library.impl("_grouped_mm", &GroupedMm);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}

}  // namespace
}  // namespace weft::testing
