#include "src/request/loss_operations.h"

#include <algorithm>
#include <utility>

#include "absl/strings/strip.h"

namespace weft {
namespace {

using enum OperationKind;
using enum OperationCost;

constexpr LossOperation kOperations[] = {
    // Functions of each value.
    {"abs", kPlain, "abs"},
    {"atan", kPlain, "atan"},
    {"bitwise_not", kPlain, "bitwise_not"},
    {"ceil", kPlain, "ceil"},
    {"clone", kPlain, "clone"},
    {"contiguous", kPlain, "contiguous"},
    {"cos", kPlain, "cos"},
    {"erf", kPlain, "erf"},
    {"exp", kPlain, "exp"},
    {"exp2", kPlain, "exp2"},
    {"expm1", kPlain, "expm1"},
    {"floor", kPlain, "floor"},
    {"isfinite", kPlain, "isfinite"},
    {"isinf", kPlain, "isinf"},
    {"isnan", kPlain, "isnan"},
    {"log", kPlain, "log"},
    {"log10", kPlain, "log10"},
    {"log1p", kPlain, "log1p"},
    {"log2", kPlain, "log2"},
    {"log_sigmoid", kPlain, "log_sigmoid"},
    {"logical_not", kPlain, "logical_not"},
    {"logsigmoid", kPlain, "log_sigmoid"},
    {"nan_to_num", kPlain, "nan_to_num"},
    {"neg", kPlain, "neg"},
    {"positive", kView, "positive"},
    {"reciprocal", kPlain, "reciprocal"},
    {"relu", kPlain, "relu"},
    {"round", kPlain, "round"},
    {"rsqrt", kPlain, "rsqrt"},
    {"sigmoid", kPlain, "sigmoid"},
    {"sign", kPlain, "sign"},
    {"sin", kPlain, "sin"},
    {"softplus", kPlain, "softplus"},
    {"sqrt", kPlain, "sqrt"},
    {"square", kPlain, "square"},
    {"tanh", kPlain, "tanh"},
    {"trunc", kPlain, "trunc"},
    // Functions of two or three values. A number stands for a tensor.
    {"add", kPlain, "add.Tensor"},
    {"bitwise_and", kPlain, "bitwise_and.Tensor"},
    {"bitwise_or", kPlain, "bitwise_or.Tensor"},
    {"bitwise_xor", kPlain, "bitwise_xor.Tensor"},
    {"clamp", kPlain, "clamp clamp.Tensor"},
    {"clamp_max", kPlain, "clamp_max clamp_max.Tensor"},
    {"clamp_min", kPlain, "clamp_min clamp_min.Tensor"},
    {"clip", kPlain, "clamp clamp.Tensor"},
    {"div", kPlain, "div.Tensor div.Tensor_mode"},
    {"eq", kPlain, "eq.Tensor"},
    {"floor_divide", kSlow, "floor_divide"},
    {"ge", kPlain, "ge.Tensor"},
    {"gt", kPlain, "gt.Tensor"},
    {"le", kPlain, "le.Tensor"},
    {"lerp", kPlain, "lerp.Scalar lerp.Tensor"},
    {"logaddexp", kPlain, "logaddexp"},
    {"logical_and", kPlain, "logical_and"},
    {"logical_or", kPlain, "logical_or"},
    {"logical_xor", kPlain, "logical_xor"},
    {"lt", kPlain, "lt.Tensor"},
    {"masked_fill", kPlain, "masked_fill.Scalar masked_fill.Tensor"},
    {"masked_select", kPlain, "masked_select"},
    {"maximum", kPlain, "maximum"},
    {"minimum", kPlain, "minimum"},
    {"mul", kPlain, "mul.Tensor"},
    {"ne", kPlain, "ne.Tensor"},
    {"pow", kPlain, "pow.Tensor_Scalar pow.Tensor_Tensor"},
    {"remainder", kSlow, "remainder.Tensor"},
    {"sub", kPlain, "sub.Tensor"},
    {"where", kPlain, "where.self"},
    {"xlogy", kPlain, "xlogy.Tensor"},
    // Sums and their like, of all values or over dimensions.
    {"all", kPlain, "all all.dim"},
    {"amax", kPlain, "amax"},
    {"amin", kPlain, "amin"},
    {"any", kPlain, "any any.dim"},
    {"argmax", kPlain, "argmax"},
    {"argmin", kPlain, "argmin"},
    {"argsort", kSlow, "argsort"},
    {"count_nonzero", kPlain, "count_nonzero count_nonzero.dim_IntList"},
    {"cumsum", kPlain, "cumsum"},
    {"dot", kPlain, "dot"},
    {"log_softmax", kPlain, "log_softmax.int"},
    {"logcumsumexp", kSlow, "logcumsumexp"},
    {"logsumexp", kPlain, "logsumexp"},
    {"max", kPlain, "max max.dim max.other"},
    {"mean", kPlain, "mean mean.dim"},
    {"median", kSlow, "median median.dim"},
    {"min", kPlain, "min min.dim min.other"},
    {"prod", kPlain, "prod prod.dim_int"},
    {"softmax", kPlain, "softmax.int"},
    {"sort", kSlow, "sort"},
    {"std", kPlain, "std std.dim std.correction"},
    {"sum", kPlain, "sum sum.dim_IntList"},
    {"topk", kSlow, "topk"},
    {"var", kPlain, "var var.dim var.correction"},
    // Parts, and other shapes of the same values.
    {"broadcast_to", kView, "broadcast_to"},
    {"cat", kPlain, "cat"},
    {"detach", kView, "detach"},
    {"expand", kView, "expand"},
    {"expand_as", kView, "expand_as"},
    {"flatten", kPlain, "flatten.using_ints"},
    {"flip", kPlain, "flip"},
    {"gather", kPlain, "gather"},
    {"narrow", kView, "narrow"},
    {"permute", kView, "permute"},
    {"reshape", kPlain, "reshape"},
    {"roll", kPlain, "roll"},
    {"scatter_add", kPlain, "scatter_add"},
    {"select", kView, "select.int"},
    {"squeeze", kView, "squeeze squeeze.dim"},
    {"stack", kPlain, "stack"},
    {"t", kView, "t"},
    {"transpose", kView, "transpose.int"},
    {"tril", kPlain, "tril"},
    {"triu", kPlain, "triu"},
    {"unsqueeze", kView, "unsqueeze"},
    {"view", kView, "view"},
    {"view_as", kView, "view_as"},
    // New tensors.
    {"arange", kNew, "arange arange.start arange.start_step"},
    {"full", kNew, "full"},
    {"full_like", kPlain, "full_like"},
    {"ones", kNew, "ones"},
    {"ones_like", kPlain, "ones_like"},
    {"zeros", kNew, "zeros"},
    {"zeros_like", kPlain, "zeros_like"},
    // Types.
    {"bool", kPlain, "bool", kCast},
    {"double", kPlain, "float64", kCast},
    {"float", kPlain, "float32", kCast},
    {"int", kPlain, "int32", kCast},
    {"long", kPlain, "int64", kCast},
    {"to", kPlain, "to.dtype to.other", kConvert},
    {"type_as", kPlain, "type_as"},
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
