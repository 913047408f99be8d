#include "src/request/loss_operations.h"

#include <algorithm>
#include <utility>

#include "absl/strings/strip.h"

namespace weft {
namespace {

using enum OperationKind;
using enum ResultSize;

constexpr LossOperation kOperations[] = {
    // Functions of each value.
    {"abs", kLargest, "abs"},
    {"atan", kLargest, "atan"},
    {"bitwise_not", kLargest, "bitwise_not"},
    {"ceil", kLargest, "ceil"},
    {"clone", kLargest, "clone"},
    {"contiguous", kLargest, "contiguous"},
    {"cos", kLargest, "cos"},
    {"erf", kLargest, "erf"},
    {"exp", kLargest, "exp"},
    {"exp2", kLargest, "exp2"},
    {"expm1", kLargest, "expm1"},
    {"floor", kLargest, "floor"},
    {"isfinite", kLargest, "isfinite"},
    {"isinf", kLargest, "isinf"},
    {"isnan", kLargest, "isnan"},
    {"log", kLargest, "log"},
    {"log10", kLargest, "log10"},
    {"log1p", kLargest, "log1p"},
    {"log2", kLargest, "log2"},
    {"log_sigmoid", kLargest, "log_sigmoid"},
    {"logical_not", kLargest, "logical_not"},
    {"logsigmoid", kLargest, "log_sigmoid"},
    {"nan_to_num", kLargest, "nan_to_num"},
    {"neg", kLargest, "neg"},
    {"positive", kView, "positive"},
    {"reciprocal", kLargest, "reciprocal"},
    {"relu", kLargest, "relu"},
    {"round", kLargest, "round"},
    {"rsqrt", kLargest, "rsqrt"},
    {"sigmoid", kLargest, "sigmoid"},
    {"sign", kLargest, "sign"},
    {"sin", kLargest, "sin"},
    {"softplus", kLargest, "softplus"},
    {"sqrt", kLargest, "sqrt"},
    {"square", kLargest, "square"},
    {"tanh", kLargest, "tanh"},
    {"trunc", kLargest, "trunc"},
    // Functions of two or three values. A number stands for a tensor.
    {"add", kBroadcast, "add.Tensor"},
    {"bitwise_and", kBroadcast, "bitwise_and.Tensor"},
    {"bitwise_or", kBroadcast, "bitwise_or.Tensor"},
    {"bitwise_xor", kBroadcast, "bitwise_xor.Tensor"},
    {"clamp", kBroadcast, "clamp clamp.Tensor"},
    {"clamp_max", kBroadcast, "clamp_max clamp_max.Tensor"},
    {"clamp_min", kBroadcast, "clamp_min clamp_min.Tensor"},
    {"clip", kBroadcast, "clamp clamp.Tensor"},
    {"div", kBroadcast, "div.Tensor div.Tensor_mode"},
    {"eq", kBroadcast, "eq.Tensor"},
    {"floor_divide", kBroadcast, "floor_divide"},
    {"ge", kBroadcast, "ge.Tensor"},
    {"gt", kBroadcast, "gt.Tensor"},
    {"le", kBroadcast, "le.Tensor"},
    {"lerp", kBroadcast, "lerp.Scalar lerp.Tensor"},
    {"logaddexp", kBroadcast, "logaddexp"},
    {"logical_and", kBroadcast, "logical_and"},
    {"logical_or", kBroadcast, "logical_or"},
    {"logical_xor", kBroadcast, "logical_xor"},
    {"lt", kBroadcast, "lt.Tensor"},
    {"masked_fill", kBroadcast, "masked_fill.Scalar masked_fill.Tensor"},
    {"masked_select", kBroadcast, "masked_select"},
    {"maximum", kBroadcast, "maximum"},
    {"minimum", kBroadcast, "minimum"},
    {"mul", kBroadcast, "mul.Tensor"},
    {"ne", kBroadcast, "ne.Tensor"},
    {"pow", kBroadcast, "pow.Tensor_Scalar pow.Tensor_Tensor"},
    {"remainder", kBroadcast, "remainder.Tensor"},
    {"sub", kBroadcast, "sub.Tensor"},
    {"where", kBroadcast, "where.self"},
    {"xlogy", kBroadcast, "xlogy.Tensor"},
    // Sums and their like, of all values or over dimensions.
    {"all", kLargest, "all all.dim"},
    {"amax", kLargest, "amax"},
    {"amin", kLargest, "amin"},
    {"any", kLargest, "any any.dim"},
    {"argmax", kLargest, "argmax"},
    {"argmin", kLargest, "argmin"},
    {"argsort", kSorted, "argsort"},
    {"count_nonzero", kLargest, "count_nonzero count_nonzero.dim_IntList"},
    {"cumsum", kLargest, "cumsum"},
    {"dot", kLargest, "dot"},
    {"log_softmax", kLargest, "log_softmax.int"},
    {"logcumsumexp", kSorted, "logcumsumexp"},
    {"logsumexp", kLargest, "logsumexp"},
    {"max", kBroadcast, "max max.dim max.other"},
    {"mean", kLargest, "mean mean.dim"},
    {"median", kSorted, "median median.dim"},
    {"min", kBroadcast, "min min.dim min.other"},
    {"prod", kLargest, "prod prod.dim_int"},
    {"softmax", kLargest, "softmax.int"},
    {"sort", kSorted, "sort"},
    {"std", kLargest, "std std.dim std.correction"},
    {"sum", kLargest, "sum sum.dim_IntList"},
    {"topk", kSorted, "topk"},
    {"var", kLargest, "var var.dim var.correction"},
    // Parts, and other shapes of the same values.
    {"broadcast_to", kView, "broadcast_to"},
    {"cat", kSum, "cat"},
    {"detach", kView, "detach"},
    {"expand", kView, "expand"},
    {"expand_as", kView, "expand_as"},
    {"flatten", kLargest, "flatten.using_ints"},
    {"flip", kLargest, "flip"},
    {"gather", kLargest, "gather"},
    {"narrow", kView, "narrow"},
    {"permute", kView, "permute"},
    {"reshape", kLargest, "reshape"},
    {"roll", kLargest, "roll"},
    {"scatter_add", kLargest, "scatter_add"},
    {"select", kView, "select.int"},
    {"squeeze", kView, "squeeze squeeze.dim"},
    {"stack", kSum, "stack"},
    {"t", kView, "t"},
    {"transpose", kView, "transpose.int"},
    {"tril", kLargest, "tril"},
    {"triu", kLargest, "triu"},
    {"unsqueeze", kView, "unsqueeze"},
    {"view", kView, "view"},
    {"view_as", kView, "view_as"},
    // New tensors.
    {"arange", kRange, "arange arange.start arange.start_step"},
    {"full", kGiven, "full"},
    {"full_like", kLargest, "full_like"},
    {"ones", kGiven, "ones"},
    {"ones_like", kLargest, "ones_like"},
    {"zeros", kGiven, "zeros"},
    {"zeros_like", kLargest, "zeros_like"},
    // Types.
    {"bool", kLargest, "bool", kCast},
    {"double", kLargest, "float64", kCast},
    {"float", kLargest, "float32", kCast},
    {"int", kLargest, "int32", kCast},
    {"long", kLargest, "int64", kCast},
    {"to", kLargest, "to.dtype to.other", kConvert},
    {"type_as", kLargest, "type_as"},
    // What Python does with a tensor.
    {"dim", kView, "", kDim},
    {"getattr", kView, "", kGetAttr},
    {"getitem", kView, "", kGetItem},
    {"numel", kView, "", kNumel},
    {"size", kView, "", kSize}};

// Names of Python's modules operator and math that differ from ATen's.
constexpr std::pair<absl::string_view, absl::string_view> kOtherNames[] = {
    {"and_", "bitwise_and"},      {"fabs", "abs"},
    {"floordiv", "floor_divide"}, {"invert", "bitwise_not"},
    {"mod", "remainder"},         {"or_", "bitwise_or"},
    {"pos", "positive"},          {"truediv", "div"},
    {"xor", "bitwise_xor"}};

const LossOperation* FindName(absl::string_view name) {
  const auto* const found =
      std::ranges::find(kOperations, name, &LossOperation::name);
  return found == std::end(kOperations) ? nullptr : found;
}

const LossOperation* FindPythons(absl::string_view name) {
  for (const auto& [python, ours] : kOtherNames) {
    if (name == python) return FindName(ours);
  }
  return FindName(name);
}

}  // namespace

absl::Span<const LossOperation> LossOperations() { return kOperations; }

FoundOperation FindLossOperation(bool is_method, absl::string_view target) {
  if (is_method) return {.operation = FindName(target)};
  if (target == "getattr") return {.operation = FindName(target)};
  if (absl::ConsumePrefix(&target, "math.")) {
    const LossOperation* const found = FindPythons(target);
    const bool takes_numbers =
        found != nullptr && found->kind == OperationKind::kAten;
    return {.operation = takes_numbers ? found : nullptr, .of_math = true};
  }
  if (absl::ConsumePrefix(&target, "operator.")) {
    return {.operation = FindPythons(target)};
  }
  for (const absl::string_view module :
       {"torch.Tensor.", "torch.nn.functional.", "torch._C._nn.", "torch."}) {
    if (absl::ConsumePrefix(&target, module)) {
      return {.operation = FindName(target)};
    }
  }
  return {};
}

}  // namespace weft
