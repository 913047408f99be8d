// The graph of a custom loss, as the Tinker SDK writes it (custom_loss_graph,
// format 1): nodes in the order in which they run, each an input, a call of an
// operation of the closed list, or the output. It runs once for each datum, and
// takes the log-probabilities of the datum's targets and the datum's inputs. It
// returns (loss, metrics). Torch-free; src/loss/run_loss_graph.h runs a graph.
// Threads: any.
#ifndef WEFT_SRC_REQUEST_LOSS_GRAPH_H_
#define WEFT_SRC_REQUEST_LOSS_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "src/request/loss_operations.h"
#include "src/request/train.h"

namespace weft {

// The limits of a graph. A graph of the largest size takes at most 8 MiB while
// it is parsed.
inline constexpr size_t kMaxGraphBytes = size_t{128} << 10;
inline constexpr size_t kMaxGraphNodes = 512;
inline constexpr size_t kMaxLossInputs = 16;
inline constexpr size_t kMaxNodeArgs = 16;
// The nodes of a request's graph and the items of its lists, times the data.
// Each takes some 10 microseconds of the engine thread, besides the time for
// its values.
inline constexpr int64_t kMaxNodeRuns = int64_t{128} << 10;

struct GraphArg;

// The result of an earlier node.
struct GraphRef {
  size_t node = 0;
};

// A list or a tuple.
struct GraphList {
  std::vector<GraphArg> items;
  bool is_tuple = false;
};

// Start, stop and step; each may be None.
struct GraphSlice {
  std::vector<GraphArg> parts;
};

struct GraphEllipsis {};

// An argument of a call. The monostate is None. A string is also the name of a
// dtype, a device, a layout or a memory format.
struct GraphArg {
  std::variant<std::monostate, bool, int64_t, double, std::string, GraphRef,
               GraphList, GraphSlice, GraphEllipsis>
      value;
};

struct GraphNode {
  std::string name;
  // None for an input: node i < the number of inputs is input i.
  FoundOperation call;
  std::vector<GraphArg> args;
  std::map<std::string, GraphArg> kwargs;
};

struct LossGraph {
  struct Metric {
    std::string name;      // Such as "custom/kl", without the reduction.
    bool is_mean = false;  // The mean over the data, else the sum.
    size_t node = 0;
  };

  std::vector<GraphNode> nodes;  // Without the output.
  int64_t num_items = 0;         // Of all lists.
  size_t loss = 0;               // The node that gives the loss.
  std::vector<Metric> metrics;

  // What kMaxNodeRuns counts.
  int64_t num_calls() const {
    return static_cast<int64_t>(nodes.size()) + num_items;
  }
};

// What a graph may take for one datum.
struct GraphLimits {
  // The values of the tensors that its operations read (OperationCost).
  int64_t values = 0;
  // All that is allocated, in the backward pass, too.
  int64_t bytes = 0;
};

// Returns the limits for a datum with this many targets, of a request with
// `num_data` data. A target's values take a small part of the time that its row
// takes in the model; what a graph may take besides is for the whole request,
// because it may have thousands of data with one token. The largest datum may
// have 8 Mi values and 256 MiB.
GraphLimits GraphLimitsOf(int64_t num_targets, size_t num_data);

// Returns "loss.custom_loss.graph.nodes[<index>] (<name>)", or what the client
// calls it (NameOfField).
std::string NodePath(size_t index, absl::string_view name);

// Reads and checks a custom loss. Errors: INVALID_ARGUMENT, which names the
// node: for a graph that is not of format 1, an operation that is not offered,
// an argument that no operation takes, a result that does not depend on the
// log-probabilities, or more than the limits above.
absl::StatusOr<LossGraph> ReadLossGraph(const CustomLoss& loss);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_LOSS_GRAPH_H_
