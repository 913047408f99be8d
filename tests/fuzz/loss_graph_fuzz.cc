// Fuzzes the graph of a custom loss. No input may crash, and every accepted
// graph is one that can run: its arguments and results are earlier nodes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <variant>
#include <vector>

#include "src/request/loss_graph.h"

namespace weft {
namespace {

bool Refers(const GraphArg& arg, size_t before) {
  if (const auto* ref = std::get_if<GraphRef>(&arg.value)) {
    return ref->node < before;
  }
  const std::vector<GraphArg>* parts = nullptr;
  if (const auto* list = std::get_if<GraphList>(&arg.value)) {
    parts = &list->items;
  }
  if (const auto* slice = std::get_if<GraphSlice>(&arg.value)) {
    if (slice->parts.size() != 3) return false;
    parts = &slice->parts;
  }
  if (parts == nullptr) return true;
  for (const GraphArg& part : *parts) {
    if (!Refers(part, before)) return false;
  }
  return true;
}

bool CanRun(const LossGraph& graph, size_t num_inputs) {
  if (graph.nodes.size() >= kMaxGraphNodes) return false;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const GraphNode& node = graph.nodes[i];
    if ((node.call.operation == nullptr) != (i < num_inputs)) return false;
    for (const GraphArg& arg : node.args) {
      if (!Refers(arg, i)) return false;
    }
    for (const auto& [name, arg] : node.kwargs) {
      if (!Refers(arg, i)) return false;
    }
  }
  for (const LossGraph::Metric& metric : graph.metrics) {
    if (metric.node >= graph.nodes.size()) return false;
  }
  return graph.loss < graph.nodes.size();
}

}  // namespace
}  // namespace weft

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const weft::CustomLoss loss = {
      .graph = std::string(reinterpret_cast<const char*>(data), size),
      .inputs = {{"logprobs", 1}, {"a", 1}}};
  const auto graph = weft::ReadLossGraph(loss);
  if (graph.ok() && !weft::CanRun(*graph, loss.inputs.size())) std::abort();
  return 0;
}
