#include "src/loss/run_loss_graph.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIndexing.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/loss/allocation_limit.h"
#include "src/loss/call_aten.h"

namespace weft::loss {
namespace {

using c10::IValue;

// Integers stay below this, so that their sums fit in int64_t.
constexpr int64_t kMaxInteger = int64_t{1} << 53;

// Returns the first line of an error of LibTorch, shortened.
std::string FirstLine(const char* text) {
  constexpr size_t kShown = 240;
  const std::string line = text;
  return line.substr(0, std::min(line.find('\n'), kShown));
}

absl::Status BadNode(const LossGraph& graph, size_t node,
                     absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat(NodePath(node, graph.nodes[node].name), " ", problem));
}

// Unlike at::isfinite, takes no memory.
bool IsFinite(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const auto [low, high] = at::aminmax(tensor.detach());
  return std::isfinite(low.item().toDouble()) &&
         std::isfinite(high.item().toDouble());
}

// The values of a graph's nodes for one datum.
class GraphRun {
 public:
  GraphRun(const LossGraph& graph, const std::optional<GraphLimits>& limits)
      : graph_(graph), limits_(limits) {
    if (limits) allocations_.emplace(limits->bytes);
  }

  // Runs all nodes. `inputs` has the first ones' values.
  absl::Status Run(const std::vector<at::Tensor>& inputs) {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      absl::Status failed;
      try {
        values_.push_back(i < inputs.size() ? IValue(inputs[i])
                                            : Call(graph_.nodes[i]));
        Check(values_.back());
      } catch (const std::bad_alloc&) {
        throw;
      } catch (const c10::Error& error) {
        failed = BadNode(graph_, i, FirstLine(error.what_without_backtrace()));
      } catch (const std::exception& error) {
        failed = BadNode(graph_, i, FirstLine(error.what()));
      }
      if (!failed.ok()) return failed;
    }
    return absl::OkStatus();
  }

  // Returns the scalar of a node.
  absl::StatusOr<at::Tensor> Scalar(size_t node, int64_t max_dims) const {
    const IValue& value = values_[node];
    if (!value.isTensor()) return BadNode(graph_, node, "is not a tensor");
    const at::Tensor& tensor = value.toTensor();
    if (tensor.numel() == 1 && tensor.dim() <= max_dims) return tensor;
    return BadNode(graph_, node,
                   absl::StrCat("has the shape ", c10::str(tensor.sizes()),
                                ", must be a scalar: end it with a sum"));
  }

  // Returns the first node whose value is not finite. Nothing runs afterwards.
  std::optional<size_t> FirstNotFinite() {
    allocations_.reset();
    for (size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].isTensor()) continue;
      const at::Tensor& tensor = values_[i].toTensor();
      if (tensor.is_floating_point() && !IsFinite(tensor)) return i;
    }
    return std::nullopt;
  }

 private:
  void Charge(int64_t values) {
    if (!limits_) return;
    TORCH_CHECK(values <= limits_->values - values_used_,
                "makes the graph compute more than ", limits_->values,
                " values for this datum, the limit for its targets");
    values_used_ += values;
  }

  static void Check(const IValue& value) {
    TORCH_CHECK(!value.isInt() || (-kMaxInteger <= value.toInt() &&
                                   value.toInt() <= kMaxInteger),
                "gives ", value.toInt(), ", must be at most 2^53");
    if (!value.isTensor()) return;
    const at::Tensor& tensor = value.toTensor();
    TORCH_CHECK(tensor.dim() <= kMaxGraphDims, "gives a tensor with ",
                tensor.dim(), " dimensions, must have at most ", kMaxGraphDims);
    TORCH_CHECK(!NameOfDtype(tensor.scalar_type()).empty());
  }

  IValue Resolve(const GraphArg& arg) const {
    if (const auto* ref = std::get_if<GraphRef>(&arg.value)) {
      return values_[ref->node];
    }
    if (const auto* list = std::get_if<GraphList>(&arg.value)) {
      std::vector<IValue> items;
      for (const GraphArg& item : list->items) items.push_back(Resolve(item));
      return c10::ivalue::Tuple::create(std::move(items));
    }
    if (const auto* value = std::get_if<bool>(&arg.value)) return *value;
    if (const auto* value = std::get_if<int64_t>(&arg.value)) {
      Check(IValue(*value));
      return *value;
    }
    if (const auto* value = std::get_if<double>(&arg.value)) return *value;
    if (const auto* value = std::get_if<std::string>(&arg.value)) {
      return *value;
    }
    TORCH_CHECK(std::holds_alternative<std::monostate>(arg.value),
                "has a slice or an ellipsis outside of an index");
    return {};
  }

  IValue Call(const GraphNode& node) {
    const LossOperation& operation = *node.call.operation;
    if (operation.kind == OperationKind::kGetItem) return GetItem(node);
    CallArguments call;
    for (const GraphArg& arg : node.args) call.args.push_back(Resolve(arg));
    for (const auto& [name, arg] : node.kwargs) {
      call.kwargs[name] = Resolve(arg);
    }
    const bool of_numbers = !call.args.empty() && call.kwargs.empty() &&
                            std::ranges::all_of(call.args, IsNumber) &&
                            (operation.cost == OperationCost::kPlain ||
                             operation.cost == OperationCost::kSlow);
    if (node.call.of_math || of_numbers) {
      return CallNumbers(node.call, std::move(call));
    }
    switch (operation.kind) {
      case OperationKind::kAten:
        return Aten(operation, std::move(call));
      case OperationKind::kConvert:
        if (call.args.size() == 2 && call.args[1].isString() &&
            call.args[1].toStringRef() == "cpu") {
          return call.args[0];
        }
        return Aten(operation, std::move(call));
      case OperationKind::kCast: {
        const at::Tensor self = Self(call);
        Charge(CostOf(self.sizes()));
        return self.to(DtypeOf(std::string(operation.overloads)));
      }
      default:
        return Shape(operation, call);
    }
  }

  IValue Aten(const LossOperation& operation, CallArguments call) {
    IValue result = CallAten(operation, std::move(call),
                             [this](int64_t values) { Charge(values); });
    if (operation.cost == OperationCost::kView && result.isTensor()) {
      Charge(CostOf(result.toTensor().sizes()));
    }
    return result;
  }

  static at::Tensor Self(const CallArguments& call) {
    TORCH_CHECK(!call.args.empty() && call.args[0].isTensor(),
                "is called on what is not a tensor");
    return call.args[0].toTensor();
  }

  // Calls a function of numbers, which are tensors without dimensions
  // meanwhile.
  IValue CallNumbers(const FoundOperation& call, CallArguments numbers) {
    const absl::string_view name = call.operation->name;
    std::vector<IValue>& args = numbers.args;
    for (IValue& arg : args) {
      if (arg.isTensor()) {
        const at::Tensor tensor = arg.toTensor();
        TORCH_CHECK(tensor.numel() == 1 && !tensor.requires_grad(),
                    "takes a number, not a tensor: use the function of torch");
        arg = IValue(tensor.item());
      }
      TORCH_CHECK(IsNumber(arg), "takes numbers");
    }
    const bool real =
        call.of_math || name == "div" ||
        (name == "pow" && args.size() > 1 && args[1].toScalar().toDouble() < 0);
    for (IValue& arg : args) {
      const at::Scalar scalar = arg.toScalar();
      arg = at::scalar_tensor(scalar, real ? at::kDouble : scalar.type());
    }
    const IValue result = Aten(*call.operation, std::move(numbers));
    TORCH_CHECK(result.isTensor(), "does not take numbers");
    const at::Scalar scalar = result.toTensor().item();
    const bool whole = name == "floor" || name == "ceil" || name == "trunc";
    if (!whole || !call.of_math) return scalar;
    const double number = scalar.toDouble();
    TORCH_CHECK(std::abs(number) <= kMaxInteger, "gives ", number,
                ", must be at most 2^53");
    return static_cast<int64_t>(number);
  }

  // Answers what a graph asks of a tensor's shape, or of a result's parts.
  static IValue Shape(const LossOperation& operation,
                      const CallArguments& call) {
    if (operation.kind == OperationKind::kGetAttr) return GetAttr(call);
    const at::Tensor self = Self(call);
    if (operation.kind == OperationKind::kNumel) return self.numel();
    if (operation.kind == OperationKind::kDim) return self.dim();
    if (call.args.size() == 1 && call.kwargs.empty()) return Sizes(self);
    const auto named = call.kwargs.find("dim");
    const IValue& dim = call.args.size() > 1         ? call.args[1]
                        : named != call.kwargs.end() ? named->second
                                                     : call.args[0];
    TORCH_CHECK(dim.isInt(), "takes the number of a dimension");
    return self.size(dim.toInt());
  }

  static IValue Sizes(const at::Tensor& tensor) {
    std::vector<IValue> sizes(tensor.sizes().begin(), tensor.sizes().end());
    return c10::ivalue::Tuple::create(std::move(sizes));
  }

  static IValue GetAttr(const CallArguments& call) {
    TORCH_CHECK(call.args.size() == 2 && call.args[1].isString(),
                "takes a value and the name of an attribute");
    const std::string& name = call.args[1].toStringRef();
    if (call.args[0].isTuple() && (name == "values" || name == "indices")) {
      return Element(call.args[0], name == "values" ? 0 : 1);
    }
    const at::Tensor self = Self(call);
    if (name == "shape") return Sizes(self);
    if (name == "ndim") return self.dim();
    if (name == "dtype") return NameOfDtype(self.scalar_type());
    if (name == "device") return std::string("cpu");
    TORCH_CHECK(name == "T" && self.dim() <= 2, "asks for ", name.substr(0, 64),
                ", must be shape, ndim, dtype, device, T of a matrix, or "
                "values or indices of a result");
    return self.t();
  }

  static IValue Element(const IValue& tuple, int64_t index) {
    const auto& elements = tuple.toTupleRef().elements();
    const auto size = static_cast<int64_t>(elements.size());
    TORCH_CHECK(index >= -size && index < size, "asks for element ", index,
                " of ", size);
    return elements[static_cast<size_t>(index < 0 ? index + size : index)];
  }

  IValue GetItem(const GraphNode& node) {
    TORCH_CHECK(node.args.size() == 2 && node.kwargs.empty(),
                "takes a value and an index");
    const IValue self = Resolve(node.args[0]);
    if (self.isTuple()) {
      const IValue index = Resolve(node.args[1]);
      TORCH_CHECK(index.isInt(), "takes an integer");
      return Element(self, index.toInt());
    }
    TORCH_CHECK(self.isTensor(), "takes a tensor or a tuple");
    const at::Tensor& tensor = self.toTensor();
    std::vector<at::indexing::TensorIndex> indices;
    const auto* const list = std::get_if<GraphList>(&node.args[1].value);
    if (list != nullptr && list->is_tuple) {
      for (const GraphArg& item : list->items) indices.push_back(Index(item));
    } else {
      indices.push_back(Index(node.args[1]));
    }
    // Each None adds a dimension, and a node of autograd that keeps its shape.
    TORCH_CHECK(!limits_ || static_cast<int64_t>(indices.size()) <=
                                tensor.dim() + kMaxGraphDims,
                "has ", indices.size(), " indices for ", tensor.dim(),
                " dimensions, must have at most ", kMaxGraphDims, " more");
    std::vector<at::Tensor> tensors;
    for (const at::indexing::TensorIndex& index : indices) {
      if (index.is_tensor()) tensors.push_back(index.tensor());
    }
    Charge(CostOf(tensors));
    at::Tensor result = at::indexing::get_item(tensor, indices);
    Charge(CostOf(result.sizes()));
    return result;
  }

  at::indexing::TensorIndex Index(const GraphArg& arg) const {
    if (std::holds_alternative<GraphEllipsis>(arg.value)) {
      return at::indexing::Ellipsis;
    }
    if (const auto* slice = std::get_if<GraphSlice>(&arg.value)) {
      return at::indexing::Slice(Bound(slice->parts[0]), Bound(slice->parts[1]),
                                 Bound(slice->parts[2]));
    }
    const IValue value = Resolve(arg);
    if (value.isNone()) return at::indexing::None;
    if (value.isBool() && !limits_) return value.toBool();
    TORCH_CHECK(!value.isBool(),
                "has a bool as an index: index by None or by a tensor");
    if (value.isInt()) return value.toInt();
    if (value.isTensor()) return value.toTensor();
    TORCH_CHECK(value.isTuple(), "has an index of another type");
    std::vector<int64_t> rows;
    for (const IValue& row : value.toTupleRef().elements()) {
      TORCH_CHECK(row.isInt(), "has an index that is a list of other things");
      rows.push_back(row.toInt());
    }
    return at::tensor(rows, at::kLong);
  }

  std::optional<c10::SymInt> Bound(const GraphArg& arg) const {
    const IValue value = Resolve(arg);
    if (value.isNone()) return std::nullopt;
    TORCH_CHECK(value.isInt(), "has a slice of other things than integers");
    return c10::SymInt(value.toInt());
  }

  const LossGraph& graph_;
  const std::optional<GraphLimits> limits_;
  std::optional<AllocationLimit> allocations_;
  int64_t values_used_ = 0;
  std::vector<IValue> values_;
};

at::Tensor InputOf(const CustomInput& input) {
  at::Tensor tensor =
      at::empty(input.shape, input.is_int ? at::kLong : at::kFloat);
  const void* const from = input.is_int
                               ? static_cast<const void*>(input.ints.data())
                               : static_cast<const void*>(input.floats.data());
  if (tensor.numel() > 0) {
    std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
  }
  return tensor;
}

std::vector<at::Tensor> InputsOf(const CustomLoss& custom, const Datum& datum,
                                 absl::Span<const float> logprobs) {
  const auto size = static_cast<int64_t>(logprobs.size());
  at::Tensor leaf = at::empty({size}, at::kFloat);
  std::memcpy(leaf.mutable_data_ptr(), logprobs.data(), leaf.nbytes());
  if (custom.inputs.front().rank == 2) {
    leaf = leaf.view({datum.num_tokens(), -1});
  }
  std::vector<at::Tensor> inputs = {leaf};
  for (size_t i = 1; i < custom.inputs.size(); ++i) {
    inputs.push_back(InputOf(datum.custom_inputs.at(custom.inputs[i].name)));
  }
  return inputs;
}

absl::Status NotFinite(const LossGraph& graph, GraphRun& run,
                       absl::string_view what) {
  const size_t node = run.FirstNotFinite().value_or(graph.loss);
  return BadNode(graph, node,
                 absl::StrCat("gives a value that is not finite, or whose "
                              "derivative is not: ",
                              what,
                              " is not finite. A branch that torch.where does "
                              "not take counts, too: clamp its argument"));
}

// Writes dLoss/dlogprob.
absl::Status Differentiate(const LossGraph& graph, GraphRun& run,
                           const at::Tensor& loss, const at::Tensor& leaf,
                           absl::Span<float> gradients) {
  constexpr char kNone[] = "gives a loss without a gradient by logprobs";
  if (!loss.requires_grad()) return BadNode(graph, graph.loss, kNone);
  loss.backward();
  const at::Tensor& gradient = leaf.grad();
  if (!gradient.defined()) return BadNode(graph, graph.loss, kNone);
  if (!IsFinite(gradient)) {
    return NotFinite(graph, run, "the gradient of the loss");
  }
  const at::Tensor flat = gradient.contiguous();
  std::memcpy(gradients.data(), flat.const_data_ptr(), flat.nbytes());
  return absl::OkStatus();
}

absl::Status RunAndDifferentiate(const LossGraph& graph,
                                 const CustomLoss& custom, const Datum& datum,
                                 const std::optional<GraphLimits>& limits,
                                 absl::Span<const float> logprobs,
                                 bool backward, absl::Span<float> losses,
                                 absl::Span<float> gradients,
                                 MetricSums* metrics) {
  const auto size = static_cast<int64_t>(logprobs.size());
  std::vector<at::Tensor> inputs = InputsOf(custom, datum, logprobs);
  inputs.front().set_requires_grad(backward);
  GraphRun run(graph, limits);  // Its limits do not count the inputs.
  WEFT_RETURN_IF_ERROR(run.Run(inputs));
  WEFT_ASSIGN_OR_RETURN(const at::Tensor loss,
                        run.Scalar(graph.loss, /*max_dims=*/0));
  const double value = loss.item().toDouble();
  if (!std::isfinite(value)) return NotFinite(graph, run, "the loss");
  if (backward) {
    WEFT_RETURN_IF_ERROR(
        Differentiate(graph, run, loss, inputs.front(), gradients));
  }
  std::vector<double> metric_values;
  for (const LossGraph::Metric& metric : graph.metrics) {
    WEFT_ASSIGN_OR_RETURN(const at::Tensor scalar,
                          run.Scalar(metric.node, kMaxGraphDims));
    metric_values.push_back(scalar.item().toDouble());
  }
  std::ranges::fill(losses, 0.0F);
  losses.front() = static_cast<float>(value);
  metrics->Add("loss", value);
  metrics->Add("tokens", static_cast<double>(size));
  for (size_t i = 0; i < metric_values.size(); ++i) {
    const LossGraph::Metric& metric = graph.metrics[i];
    metric.is_mean ? metrics->AddMean(metric.name, metric_values[i], 1)
                   : metrics->Add(metric.name, metric_values[i]);
  }
  return absl::OkStatus();
}

// Writes nothing. A graph could have LibTorch write warnings without end, and a
// log that nobody reads would block the engine.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

absl::Status RunLossGraph(const LossGraph& graph, const CustomLoss& custom,
                          const Datum& datum,
                          const std::optional<GraphLimits>& limits,
                          absl::Span<const float> logprobs, bool backward,
                          absl::Span<float> losses, absl::Span<float> gradients,
                          MetricSums* metrics) {
  // Some backward passes add up with atomics, in any order, if they have more
  // threads. OpenMP's number is this thread's; at::set_num_threads would change
  // the loops of other threads, too.
  const int threads = at::get_num_threads();
  omp_set_num_threads(1);
  const absl::Cleanup restore = [threads] { omp_set_num_threads(threads); };
  // The engine computes gradients by hand, so autograd is off elsewhere.
  const c10::InferenceMode with_autograd(false);
  const c10::AutoGradMode differentiate(backward);
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard silent(&none);
  // Whatever autograd throws is this request's failure, not the batch's.
  try {
    return RunAndDifferentiate(graph, custom, datum, limits, logprobs, backward,
                               losses, gradients, metrics);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return BadNode(
        graph, graph.loss,
        absl::StrCat("cannot be differentiated: ", FirstLine(error.what())));
  }
}

}  // namespace weft::loss
