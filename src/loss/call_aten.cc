#include "src/loss/call_aten.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_split.h"

namespace weft::loss {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;

constexpr std::pair<const char*, at::ScalarType> kNamedDtypes[] = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"int64", at::kLong},
    {"int32", at::kInt},     {"bool", at::kBool},
};

// Returns the overloads of every operation, found once.
const std::vector<c10::OperatorHandle>& OverloadsOf(
    const LossOperation& operation) {
  using Handles = std::vector<c10::OperatorHandle>;
  static const auto* const kAll = [] {
    auto* const all = new std::map<const LossOperation*, Handles>;
    for (const LossOperation& each : LossOperations()) {
      if (each.kind != OperationKind::kAten &&
          each.kind != OperationKind::kConvert) {
        continue;
      }
      for (const absl::string_view name : absl::StrSplit(each.overloads, ' ')) {
        const std::vector<std::string> parts = absl::StrSplit(name, '.');
        const std::string overload = parts.size() > 1 ? parts[1] : "";
        (*all)[&each].push_back(c10::Dispatcher::singleton().findSchemaOrThrow(
            ("aten::" + parts[0]).c_str(), overload.c_str()));
      }
    }
    return all;
  }();
  return kAll->at(&operation);
}

// Converts a value to the type of a parameter; nothing if it cannot.
std::optional<IValue> Coerce(const IValue& value, const c10::TypePtr& type);

// Converts a tuple to a list of T, an element type of ATen's lists.
template <typename T, typename Get>
std::optional<IValue> CoerceList(const IValue& value, const c10::TypePtr& type,
                                 const Get& get) {
  c10::List<T> list;
  for (const IValue& item : value.toTupleRef().elements()) {
    const std::optional<IValue> element = Coerce(item, type);
    if (!element) return std::nullopt;
    list.push_back(get(*element));
  }
  return IValue(std::move(list));
}

bool IsInt(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::IntType ||
         type->kind() == c10::TypeKind::SymIntType;
}

std::optional<IValue> CoerceToList(const IValue& value,
                                   const c10::TypePtr& element) {
  const auto as_int = [](const IValue& item) { return item.toInt(); };
  const auto as_tensor = [](const IValue& item) { return item.toTensor(); };
  if (value.isInt() && IsInt(element)) {
    return IValue(c10::List<int64_t>({value.toInt()}));
  }
  if (!value.isTuple()) return std::nullopt;
  if (IsInt(element)) {
    // Some functions recurse once for each integer.
    if (value.toTupleRef().elements().size() > size_t{kMaxGraphDims}) {
      return std::nullopt;
    }
    return CoerceList<int64_t>(value, element, as_int);
  }
  if (element->kind() == c10::TypeKind::TensorType) {
    return CoerceList<at::Tensor>(value, element, as_tensor);
  }
  return std::nullopt;
}

// Converts the name of a dtype, a device, a layout or a memory format.
std::optional<IValue> CoerceName(const std::string& name, c10::TypeKind kind) {
  switch (kind) {
    case c10::TypeKind::ScalarTypeType:
      return IValue(static_cast<int64_t>(DtypeOf(name)));
    case c10::TypeKind::DeviceObjType:
      if (name == "cpu") return IValue(at::Device(at::kCPU));
      return std::nullopt;
    case c10::TypeKind::LayoutType:
      if (name == "strided") return IValue(static_cast<int64_t>(at::kStrided));
      return std::nullopt;
    case c10::TypeKind::MemoryFormatType:
      return IValue(static_cast<int64_t>(name == "contiguous_format"
                                             ? at::MemoryFormat::Contiguous
                                             : at::MemoryFormat::Preserve));
    case c10::TypeKind::StringType:
      return IValue(name);
    default:
      return std::nullopt;
  }
}

std::optional<IValue> Coerce(const IValue& value, const c10::TypePtr& type) {
  const auto only_if = [&value](bool fits) {
    return fits ? std::optional<IValue>(value) : std::nullopt;
  };
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      if (value.isNone()) return value;
      return Coerce(value,
                    type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType:
      if (!IsNumber(value)) return only_if(value.isTensor());
      return IValue(at::native::wrapped_scalar_tensor(value.toScalar()));
    case c10::TypeKind::NumberType:
      return only_if(IsNumber(value));
    case c10::TypeKind::FloatType:
      if (value.isInt()) return IValue(static_cast<double>(value.toInt()));
      return only_if(value.isDouble());
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return only_if(value.isInt());
    case c10::TypeKind::BoolType:
      return only_if(value.isBool());
    case c10::TypeKind::ListType:
      return CoerceToList(value,
                          type->castRaw<c10::ListType>()->getElementType());
    default:
      if (!value.isString()) return std::nullopt;
      return CoerceName(value.toStringRef(), type->kind());
  }
}

bool IsIntList(const c10::TypePtr& type) {
  const c10::TypePtr inner =
      type->kind() == c10::TypeKind::OptionalType
          ? type->castRaw<c10::OptionalType>()->getElementType()
          : type;
  return inner->kind() == c10::TypeKind::ListType &&
         IsInt(inner->castRaw<c10::ListType>()->getElementType());
}

// The names by which Python calls a parameter of ATen.
bool Names(const std::string& python, const std::string& aten) {
  return python == aten || (python == "input" && aten == "self") ||
         (python == "axis" && aten == "dim");
}

// Takes the arguments of a call one after another.
class Binding {
 public:
  explicit Binding(const CallArguments& given) : given_(given) {}

  // Returns the stack for a function, or nothing if the function does not take
  // these arguments.
  std::optional<Stack> Bind(const c10::FunctionSchema& schema) {
    Stack stack;
    for (const c10::Argument& parameter : schema.arguments()) {
      const std::optional<IValue> value = Take(parameter);
      const std::optional<IValue> bound =
          value ? Coerce(*value, parameter.real_type()) : Default(parameter);
      if (!bound) return std::nullopt;
      stack.push_back(*bound);
    }
    const bool all =
        next_ == given_.args.size() && named_ == given_.kwargs.size();
    return all ? std::optional<Stack>(std::move(stack)) : std::nullopt;
  }

 private:
  // Returns the argument of a parameter, if there is one.
  std::optional<IValue> Take(const c10::Argument& parameter) {
    const std::vector<IValue>& args = given_.args;
    if (next_ < args.size() && !parameter.kwarg_only()) {
      const auto rest = args.begin() + static_cast<int64_t>(next_);
      if (args.size() - next_ > 1 && IsIntList(parameter.real_type()) &&
          std::all_of(rest, args.end(),
                      [](const IValue& v) { return v.isInt(); })) {
        next_ = args.size();
        return c10::ivalue::Tuple::create(Stack(rest, args.end()));
      }
      return args[next_++];
    }
    for (const auto& [name, value] : given_.kwargs) {
      if (!Names(name, parameter.name())) continue;
      ++named_;
      return value;
    }
    return std::nullopt;
  }

  static std::optional<IValue> Default(const c10::Argument& parameter) {
    if (parameter.default_value()) return *parameter.default_value();
    if (parameter.real_type()->kind() == c10::TypeKind::OptionalType) {
      return IValue();
    }
    return std::nullopt;
  }

  const CallArguments& given_;
  size_t next_ = 0;   // Arguments that were taken by place,
  size_t named_ = 0;  // and by name.
};

// Returns the tensors of the stack, also those of lists.
std::vector<at::Tensor> TensorsOf(const Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : stack) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& each : value.toTensorVector()) {
      tensors.push_back(each);
    }
  }
  return tensors;
}

// Returns the price of each value of a call.
int64_t PriceOf(const LossOperation& operation,
                const c10::FunctionSchema& schema, const Stack& stack) {
  constexpr int64_t kSlowPrice = 128;
  // A quotient that is rounded takes a remainder.
  bool is_slow = operation.cost == OperationCost::kSlow ||
                 schema.overload_name() == "Tensor_mode";
  if (operation.name == "pow") {
    is_slow =
        std::ranges::none_of(TensorsOf(stack), &at::Tensor::is_floating_point);
  }
  return is_slow ? kSlowPrice : 1;
}

// Refuses the one quotient of integers that does not fit, because the processor
// would end the process.
void CheckQuotients(const LossOperation& operation, const Stack& stack) {
  const bool divides = operation.name == "div" ||
                       operation.name == "floor_divide" ||
                       operation.name == "remainder";
  if (!divides) return;
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor& operand = stack[i].toTensor();
    if (!c10::isIntegralType(operand.scalar_type(), /*includeBool=*/false)) {
      continue;
    }
    const at::Scalar lowest = operand.scalar_type() == at::kInt
                                  ? std::numeric_limits<int32_t>::min()
                                  : std::numeric_limits<int64_t>::min();
    TORCH_CHECK(!at::eq(operand, lowest).any().item<bool>(),
                "has an integer that no quotient may have: ", lowest.toLong());
  }
}

std::string TypesOf(const CallArguments& arguments) {
  std::string text;
  for (const IValue& value : arguments.args) {
    text += (text.empty() ? "" : ", ") + value.tagKind();
  }
  for (const auto& [name, value] : arguments.kwargs) {
    text += (text.empty() ? "" : ", ") + name + "=" + value.tagKind();
  }
  return text;
}

}  // namespace

at::ScalarType DtypeOf(const std::string& name) {
  for (const auto& [known, dtype] : kNamedDtypes) {
    if (name == known) return dtype;
  }
  TORCH_CHECK(false, "has no dtype of this name");
}

std::string NameOfDtype(at::ScalarType dtype) {
  for (const auto& [name, known] : kNamedDtypes) {
    if (dtype == known) return name;
  }
  TORCH_CHECK(false, "has a dtype that is not offered");
}

constexpr double kManyValues = 1e15;  // More than any limit.

bool IsNumber(const IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

int64_t CostOf(at::IntArrayRef sizes) {
  double cost = 1;
  for (const int64_t size : sizes) {
    cost *= static_cast<double>(std::max<int64_t>(size, 1));
  }
  return static_cast<int64_t>(std::min(cost, kManyValues));
}

int64_t CostOf(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  std::vector<int64_t> shape;  // To which the tensors are broadcast; reversed.
  for (const at::Tensor& tensor : tensors) {
    sum += static_cast<double>(CostOf(tensor.sizes()));
    const auto dims = static_cast<size_t>(tensor.dim());
    if (shape.size() < dims) shape.resize(dims, 1);
    for (size_t i = 0; i < dims; ++i) {
      shape[i] = std::max(shape[i], tensor.sizes()[dims - 1 - i]);
    }
  }
  return std::max(CostOf(shape),
                  static_cast<int64_t>(std::min(sum, kManyValues)));
}

IValue CallAten(const LossOperation& operation, CallArguments arguments,
                const std::function<void(int64_t)>& charge) {
  // Functions of torch.nn.functional have these two, which change no value.
  arguments.kwargs.erase("_stacklevel");
  const auto in_place = arguments.kwargs.find("inplace");
  if (in_place != arguments.kwargs.end() && in_place->second.isBool() &&
      !in_place->second.toBool()) {
    arguments.kwargs.erase(in_place);
  }
  for (const char* const name : {"sparse_grad", "pin_memory"}) {
    TORCH_CHECK(!arguments.kwargs.contains(name), "has the argument ", name,
                ", which is not offered");
  }
  for (const c10::OperatorHandle& overload : OverloadsOf(operation)) {
    std::optional<Stack> stack = Binding(arguments).Bind(overload.schema());
    if (!stack) continue;
    charge(CostOf(TensorsOf(*stack)) *
           PriceOf(operation, overload.schema(), *stack));
    CheckQuotients(operation, *stack);
    overload.callBoxed(*stack);
    if (stack->size() == 1) return stack->front();
    return c10::ivalue::Tuple::create(std::move(*stack));
  }
  TORCH_CHECK(false, "does not take the arguments (", TypesOf(arguments), ")");
}

}  // namespace weft::loss
