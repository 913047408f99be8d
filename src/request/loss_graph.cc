#include "src/request/loss_graph.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"
#include "src/request/field_names.h"

namespace weft {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 24;
constexpr size_t kMaxNameBytes = 128;
constexpr size_t kMaxInputNameBytes = 64;
constexpr size_t kMaxMetricBytes = 64;
constexpr absl::string_view kDtypes[] = {"float32", "float64", "int64", "int32",
                                         "bool"};
constexpr absl::string_view kFormats[] = {"contiguous_format",
                                          "preserve_format"};

std::string Path() { return NameOfField("loss.custom_loss"); }

template <typename... Parts>
absl::Status Bad(absl::string_view field, const Parts&... problem) {
  return absl::InvalidArgumentError(absl::StrCat(field, " ", problem...));
}

// Returns the first bytes of a client's text, escaped.
std::string Shortened(absl::string_view text) {
  constexpr size_t kShown = 64;
  return absl::CHexEscape(text.substr(0, kShown)).substr(0, kShown);
}

bool IsName(absl::string_view name, size_t most, bool lower) {
  return !name.empty() && name.size() <= most &&
         (name[0] < '0' || name[0] > '9') &&
         std::ranges::all_of(name, [lower](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                  c == '_' || (!lower && c >= 'A' && c <= 'Z');
         });
}

absl::Status CheckInputs(const std::vector<CustomLossInput>& inputs) {
  const std::string field = absl::StrCat(Path(), ".inputs");
  if (inputs.empty() || inputs.size() > kMaxLossInputs) {
    return Bad(field, "has ", inputs.size(), " inputs, must be in [1, ",
               kMaxLossInputs, "], logprobs included");
  }
  std::set<std::string> names;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const CustomLossInput& input = inputs[i];
    const std::string at = absl::StrCat(field, "[", i, "]");
    if (!IsName(input.name, kMaxInputNameBytes, /*lower=*/true)) {
      return Bad(absl::StrCat(at, ".name"), "is \"", Shortened(input.name),
                 "\", must be 1 to ", kMaxInputNameBytes,
                 " lowercase letters, digits and underscores");
    }
    if ((input.name == "logprobs") != (i == 0)) {
      return Bad(absl::StrCat(at, ".name"), "is ", input.name,
                 ", must be logprobs for the first input alone");
    }
    if (!names.insert(input.name).second) {
      return Bad(absl::StrCat(at, ".name"), "is ", input.name, " again");
    }
    const int lowest = i == 0 ? 1 : 0;
    if (input.rank < lowest || input.rank > 2) {
      return Bad(absl::StrCat(at, ".rank"), "is ", input.rank, ", must be in [",
                 lowest, ", 2]");
    }
  }
  return absl::OkStatus();
}

// Parses the text. Returns an error instead of a value that is nested deeper
// than kMaxDepth.
absl::StatusOr<Json> ParseText(const std::string& text) {
  const std::string field = absl::StrCat(Path(), ".graph");
  if (text.size() > kMaxGraphBytes) {
    return Bad(field, "has ", text.size(), " bytes, must have at most ",
               kMaxGraphBytes);
  }
  bool deep = false;
  const auto check = [&deep](int depth, Json::parse_event_t /*event*/,
                             Json& /*parsed*/) {
    deep |= depth > kMaxDepth;
    return !deep;
  };
  Json graph = Json::parse(text, check, /*allow_exceptions=*/false);
  if (deep) {
    return Bad(field, "is nested deeper than ", kMaxDepth);
  }
  if (!graph.is_object()) return Bad(field, "is not a JSON object");
  const auto format = graph.find("format");
  if (format != graph.end() && *format != 1) {
    return Bad(absl::StrCat(field, ".format"), "must be 1");
  }
  const auto nodes = graph.find("nodes");
  if (nodes == graph.end() || !nodes->is_array()) {
    return Bad(absl::StrCat(field, ".nodes"), "must be a list");
  }
  if (nodes->empty() || nodes->size() > kMaxGraphNodes) {
    return Bad(absl::StrCat(field, ".nodes"), "has ", nodes->size(),
               " nodes, must be in [1, ", kMaxGraphNodes, "]");
  }
  return std::move(*nodes);
}

// Reads the nodes in order, since a node names only earlier ones.
class GraphReader {
 public:
  explicit GraphReader(const CustomLoss& loss) : loss_(loss) {}

  absl::StatusOr<LossGraph> Read(const Json& nodes) {
    for (index_ = 0; index_ < nodes.size(); ++index_) {
      WEFT_RETURN_IF_ERROR(ReadNode(nodes[index_], index_ + 1 == nodes.size()));
    }
    return std::move(graph_);
  }

 private:
  template <typename... Parts>
  absl::Status BadNode(const Parts&... problem) const {
    return Bad(NodePath(index_, name_), problem...);
  }

  // Returns the node's field if it is a string, else "".
  static std::string Text(const Json& node, const char* field) {
    const auto found = node.find(field);
    return found != node.end() && found->is_string() ? found->get<std::string>()
                                                     : "";
  }

  absl::Status ReadNode(const Json& node, bool is_last) {
    name_.clear();
    if (!node.is_object()) return BadNode("must be an object");
    name_ = Text(node, "name");
    if (!IsName(name_, kMaxNameBytes, /*lower=*/false)) {
      const std::string shown = Shortened(std::exchange(name_, ""));
      return BadNode("has the name \"", shown, "\", must be 1 to ",
                     kMaxNameBytes, " letters, digits and underscores");
    }
    if (nodes_.contains(name_)) return BadNode("has the name of another node");
    const std::string op = Text(node, "op");
    if (is_last != (op == "output")) {
      return BadNode(is_last ? "is the last node, must be the output"
                             : "is an output, must be the last node");
    }
    if (op != "placeholder" && index_ < loss_.inputs.size()) {
      return BadNode("must be the placeholder of the input ",
                     loss_.inputs[index_].name);
    }
    GraphNode read{.name = name_};
    WEFT_RETURN_IF_ERROR(ReadArgs(node, op == "output", &read));
    const std::string target = Text(node, "target");
    if (op == "output") return ReadOutput(node);
    if (op == "placeholder") {
      WEFT_RETURN_IF_ERROR(CheckPlaceholder(target, read));
    } else {
      WEFT_RETURN_IF_ERROR(ReadCall(op, target, &read));
    }
    nodes_[name_] = index_;
    depends_.push_back(uses_logprobs_ || index_ == 0);
    graph_.nodes.push_back(std::move(read));
    return absl::OkStatus();
  }

  absl::Status CheckPlaceholder(const std::string& target,
                                const GraphNode& node) const {
    if (index_ >= loss_.inputs.size()) {
      return BadNode("is placeholder ", index_ + 1, ", but ", Path(),
                     ".inputs has ", loss_.inputs.size());
    }
    if (!node.args.empty() || !node.kwargs.empty()) {
      return BadNode("has arguments, must be an input without a default");
    }
    if (target == loss_.inputs[index_].name) return absl::OkStatus();
    return BadNode("has the target ", Shortened(target), ", must be ",
                   loss_.inputs[index_].name, " as in ", Path(), ".inputs");
  }

  absl::Status ReadCall(const std::string& op, const std::string& target,
                        GraphNode* out) const {
    if (op == "get_attr") {
      return BadNode(
          "has the op get_attr, a tensor that the function holds: a loss reads "
          "only its inputs. Make it of one, as torch.arange(x.shape[0]) does, "
          "or send it as an input");
    }
    if (op != "call_function" && op != "call_method") {
      return BadNode(
          "has the op ", op.empty() ? "\"\"" : Shortened(op),
          ", must be placeholder, call_function, call_method or output: a loss "
          "reads only its inputs, and calls only functions");
    }
    out->call = FindLossOperation(op == "call_method", target);
    if (out->call.operation != nullptr) return absl::OkStatus();
    return BadNode(
        "has the target ", target.empty() ? "\"\"" : Shortened(target),
        ", which is not offered: server/tinker/README.md lists what is");
  }

  // Reads the arguments, except those of the output.
  absl::Status ReadArgs(const Json& node, bool is_output, GraphNode* out) {
    uses_logprobs_ = false;
    const auto args = node.find("args");
    if (args != node.end() && !args->is_array()) {
      return BadNode("has args that are not a list");
    }
    const auto kwargs = node.find("kwargs");
    if (kwargs != node.end() && !kwargs->is_object()) {
      return BadNode("has kwargs that are not an object");
    }
    if (is_output) return absl::OkStatus();
    const size_t count = (args == node.end() ? 0 : args->size()) +
                         (kwargs == node.end() ? 0 : kwargs->size());
    if (count > kMaxNodeArgs) {
      return BadNode("has ", count, " arguments, must have at most ",
                     kMaxNodeArgs);
    }
    if (args != node.end()) {
      WEFT_ASSIGN_OR_RETURN(out->args, ReadList(*args));
      graph_.num_items -= static_cast<int64_t>(args->size());
    }
    if (kwargs == node.end()) return absl::OkStatus();
    for (const auto& [key, value] : kwargs->items()) {
      WEFT_ASSIGN_OR_RETURN(out->kwargs[key], ReadArg(value));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<GraphArg>> ReadList(const Json& list) {
    graph_.num_items += static_cast<int64_t>(list.size());
    std::vector<GraphArg> items;
    items.reserve(list.size());
    for (const Json& item : list) {
      WEFT_ASSIGN_OR_RETURN(GraphArg arg, ReadArg(item));
      items.push_back(std::move(arg));
    }
    return items;
  }

  // Its depth is bounded by kMaxDepth.
  absl::StatusOr<GraphArg> ReadArg(const Json& arg) {
    switch (arg.type()) {
      case Json::value_t::null:
        return GraphArg{};
      case Json::value_t::boolean:
        return GraphArg{arg.get<bool>()};
      case Json::value_t::number_integer:
        return GraphArg{arg.get<int64_t>()};
      case Json::value_t::number_unsigned:
        if (arg.get<uint64_t>() >
            uint64_t{std::numeric_limits<int64_t>::max()}) {
          return BadNode("has an argument above 2^63");
        }
        return GraphArg{arg.get<int64_t>()};
      case Json::value_t::number_float:
        return GraphArg{arg.get<double>()};
      case Json::value_t::string:
        return GraphArg{arg.get<std::string>()};
      case Json::value_t::array: {
        WEFT_ASSIGN_OR_RETURN(std::vector<GraphArg> items, ReadList(arg));
        return GraphArg{GraphList{.items = std::move(items)}};
      }
      default:
        return ReadTagged(arg);
    }
  }

  absl::StatusOr<GraphArg> ReadTagged(const Json& arg) {
    if (!arg.is_object() || arg.size() != 1) {
      return BadNode("has an argument that is an object of not one key");
    }
    const std::string key = arg.begin().key();
    const Json& value = arg.begin().value();
    if (key == "ref") {
      WEFT_ASSIGN_OR_RETURN(const size_t node, ReadRef(arg));
      return GraphArg{GraphRef{.node = node}};
    }
    if (key == "tuple" && value.is_array()) {
      WEFT_ASSIGN_OR_RETURN(std::vector<GraphArg> items, ReadList(value));
      return GraphArg{GraphList{.items = std::move(items), .is_tuple = true}};
    }
    if (key == "slice" && value.is_array() && value.size() == 3) {
      WEFT_ASSIGN_OR_RETURN(std::vector<GraphArg> parts, ReadList(value));
      return GraphArg{GraphSlice{.parts = std::move(parts)}};
    }
    if (key == "ellipsis" && value == true) {
      return GraphArg{GraphEllipsis{}};
    }
    if (!value.is_string()) return BadTag(arg);
    const auto text = value.get<std::string>();
    if (key == "float") return ReadFloat(text);
    const bool known =
        (key == "dtype" && std::ranges::count(kDtypes, text) > 0) ||
        (key == "device" && text == "cpu") ||
        (key == "layout" && text == "strided") ||
        (key == "memory_format" && std::ranges::count(kFormats, text) > 0);
    if (!known) return BadTag(arg);
    return GraphArg{text};
  }

  absl::Status BadTag(const Json& arg) const {
    return BadNode(
        "has the argument ",
        Shortened(arg.dump(-1, ' ', false, Json::error_handler_t::replace)),
        ", which is not offered: dtypes are float32, float64, int64, int32 and "
        "bool, and the device is cpu");
  }

  absl::StatusOr<GraphArg> ReadFloat(const std::string& text) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (text == "inf") return GraphArg{kInfinity};
    if (text == "-inf") return GraphArg{-kInfinity};
    if (text == "nan") {
      return GraphArg{std::numeric_limits<double>::quiet_NaN()};
    }
    return BadNode("has a float that is not inf, -inf or nan");
  }

  absl::StatusOr<size_t> ReadRef(const Json& arg) {
    const bool is_ref = arg.is_object() && arg.size() == 1 &&
                        arg.contains("ref") && arg["ref"].is_string();
    if (!is_ref) return BadNode("has a reference that names no node");
    const auto name = arg["ref"].get<std::string>();
    const auto found = nodes_.find(name);
    if (found == nodes_.end()) {
      return BadNode("refers to ", Shortened(name),
                     ", which is not an earlier node");
    }
    uses_logprobs_ |= depends_[found->second];
    return found->second;
  }

  absl::Status ReadOutput(const Json& node) {
    constexpr char kForm[] =
        "must return (loss, metrics): a tensor, and a dict of tensors";
    const auto args = node.find("args");
    if (args == node.end() || args->size() != 1) return BadNode(kForm);
    Json result = args->front();
    if (result.is_object() && result.size() == 1 && result.contains("tuple")) {
      result = Json(result["tuple"]);
    }
    if (!result.is_array() || result.size() != 2) return BadNode(kForm);
    const Json& metrics = result[1];
    if (!metrics.is_object() || metrics.size() != 1 ||
        !metrics.contains("dict") || !metrics["dict"].is_object()) {
      return BadNode(kForm);
    }
    WEFT_ASSIGN_OR_RETURN(graph_.loss, ReadRef(result[0]));
    if (!depends_[graph_.loss]) {
      return BadNode("returns a loss that does not depend on logprobs");
    }
    for (const auto& [key, value] : metrics["dict"].items()) {
      WEFT_RETURN_IF_ERROR(ReadMetric(key, value));
    }
    return absl::OkStatus();
  }

  absl::Status ReadMetric(absl::string_view key, const Json& value) {
    absl::string_view name = key;
    const bool is_mean = absl::ConsumeSuffix(&name, ":mean");
    const bool has_reduction = is_mean || absl::ConsumeSuffix(&name, ":sum");
    const auto in_name = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
             absl::StrContains("_./-", absl::string_view(&c, 1));
    };
    absl::string_view rest = name;
    if (!has_reduction || !absl::ConsumePrefix(&rest, "custom/") ||
        rest.empty() || rest.size() > kMaxMetricBytes ||
        !std::ranges::all_of(rest, in_name)) {
      return BadNode(
          "returns the metric \"", Shortened(key),
          "\", must be custom/<name>:sum or custom/<name>:mean in lowercase");
    }
    WEFT_ASSIGN_OR_RETURN(const size_t node, ReadRef(value));
    graph_.metrics.push_back(
        {.name = std::string(name), .is_mean = is_mean, .node = node});
    return absl::OkStatus();
  }

  const CustomLoss& loss_;
  LossGraph graph_;
  size_t index_ = 0;
  std::string name_;                     // Of the node at index_.
  std::map<std::string, size_t> nodes_;  // Indices of earlier nodes.
  std::vector<bool> depends_;            // On logprobs, for each earlier node.
  bool uses_logprobs_ = false;           // The arguments that were read do.
};

}  // namespace

std::string NodePath(size_t index, absl::string_view name) {
  return absl::StrCat(Path(), ".graph.nodes[", index, "]",
                      name.empty() ? "" : absl::StrCat(" (", name, ")"));
}

GraphLimits GraphLimitsOf(int64_t num_targets, size_t num_data) {
  const int64_t fixed = (int64_t{64} << 10) / static_cast<int64_t>(num_data);
  constexpr int64_t kPerTarget = 4096;
  constexpr int64_t kMost = int64_t{8} << 20;
  constexpr int64_t kBytesPerValue = 32;
  const int64_t values = std::min(fixed + kPerTarget * num_targets, kMost);
  return {.values = values, .bytes = values * kBytesPerValue};
}

absl::StatusOr<LossGraph> ReadLossGraph(const CustomLoss& loss) {
  WEFT_RETURN_IF_ERROR(CheckInputs(loss.inputs));
  WEFT_ASSIGN_OR_RETURN(const Json nodes, ParseText(loss.graph));
  return GraphReader(loss).Read(nodes);
}

}  // namespace weft
