// Runs graphs of custom losses:
//   loss_graphs --list    prints the names of the operations, one a line
//   loss_graphs           reads lines {"graph", "inputs": [{"name", "rank"}],
//                         "logprobs", "targets_per_token", "values": {name:
//                         {"shape", "floats" or "ints"}}, "backward"}
// Answers each line with {"loss", "gradients", "metrics"} or {"error"}.
#include <iostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "src/loss/run_loss_graph.h"
#include "src/request/loss_graph.h"

namespace {

using Json = nlohmann::json;

weft::Datum ReadDatum(const Json& ask) {
  weft::Datum datum;
  datum.targets_per_token = ask.at("targets_per_token");
  const size_t width = datum.targets_per_token > 0
                           ? ask.at("targets_per_token").get<size_t>()
                           : 1;
  datum.targets.resize(ask.at("logprobs").size());
  datum.tokens.resize(datum.targets.size() / width);
  for (const auto& [name, value] : ask.at("values").items()) {
    weft::CustomInput& input = datum.custom_inputs[name];
    value.at("shape").get_to(input.shape);
    input.is_int = value.contains("ints");
    if (input.is_int) {
      value.at("ints").get_to(input.ints);
    } else {
      value.at("floats").get_to(input.floats);
    }
  }
  return datum;
}

Json Answer(const Json& ask) {
  weft::CustomLoss loss{.graph = ask.at("graph").dump()};
  for (const Json& input : ask.at("inputs")) {
    loss.inputs.push_back({.name = input.at("name"), .rank = input.at("rank")});
  }
  const absl::StatusOr<weft::LossGraph> graph = weft::ReadLossGraph(loss);
  if (!graph.ok()) return {{"error", graph.status().ToString()}};
  const weft::Datum datum = ReadDatum(ask);
  const auto logprobs = ask.at("logprobs").get<std::vector<float>>();
  std::vector<float> losses(logprobs.size());
  std::vector<float> gradients(logprobs.size());
  weft::loss::MetricSums metrics;
  const absl::Status run = weft::loss::RunLossGraph(
      *graph, loss, datum,
      weft::loss::MaxGraphValues(static_cast<int64_t>(logprobs.size()), 1),
      logprobs, ask.at("backward"), absl::MakeSpan(losses),
      absl::MakeSpan(gradients), &metrics);
  if (!run.ok()) return {{"error", run.ToString()}};
  return {{"loss", losses[0]},
          {"gradients", gradients},
          {"metrics", metrics.Metrics()}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--list") {
    for (const weft::LossOperation& operation : weft::LossOperations()) {
      std::cout << operation.name << "\n";
    }
    return 0;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << Answer(Json::parse(line)).dump() << std::endl;
  }
  return 0;
}
