// Runs graphs of custom losses:
//   loss_graphs --list    prints the names of the operations, one a line
//   loss_graphs --memory COUNT  reads graphs, and runs each with COUNT random
//                         numbers of targets. Answers with as many pairs: the
//                         bytes that are counted, and those of the graph's
//                         tensors at their peak.
//   loss_graphs           reads lines {"graph", "inputs": [{"name", "rank"}],
//                         "logprobs", "targets_per_token", "values": {name:
//                         {"shape", "floats" or "ints"}}, "backward"}
// Answers each line with {"loss", "gradients", "metrics"} or {"error"}.
#include <cmath>
#include <iostream>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "src/loss/allocation_limit.h"
#include "src/loss/run_loss_graph.h"
#include "src/request/loss_graph.h"
#include "tests/support/limited_memory.h"

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
      weft::GraphLimitsOf(static_cast<int64_t>(logprobs.size()), 1), logprobs,
      ask.at("backward"), absl::MakeSpan(losses), absl::MakeSpan(gradients),
      &metrics);
  if (!run.ok()) return {{"error", run.ToString()}};
  return {{"loss", losses[0]},
          {"gradients", gradients},
          {"metrics", metrics.Metrics()}};
}

// A loss of logprobs, of reals y and of integers i below 6.
class MemoryOfGraph {
 public:
  explicit MemoryOfGraph(const std::string& graph)
      : loss_{.graph = graph,
              .inputs = {{.name = "logprobs", .rank = 1},
                         {.name = "y", .rank = 1},
                         {.name = "i", .rank = 1}}},
        graph_(weft::ReadLossGraph(loss_).value()) {}

  // Returns {counted, peak}: what is counted of the graph with `num_targets`
  // targets, and what its tensors take at their peak. Both are in bytes.
  Json Take(size_t num_targets) {
    weft::Datum datum{.tokens = std::vector<int32_t>(num_targets, 1),
                      .targets = std::vector<int32_t>(num_targets, 1)};
    weft::CustomInput& y = datum.custom_inputs["y"];
    weft::CustomInput& i = datum.custom_inputs["i"];
    y.shape = i.shape = {static_cast<int64_t>(num_targets)};
    i.is_int = true;
    std::vector<float> logprobs;
    for (size_t k = 0; k < num_targets; ++k) {
      logprobs.push_back(-1.0F - static_cast<float>(k % 7) / 64);
      y.floats.push_back(1.0F + static_cast<float>(k % 5) / 8);
      i.ints.push_back(static_cast<int64_t>(k * 5 % 6));
    }
    std::vector<float> losses(logprobs.size());
    std::vector<float> gradients(logprobs.size());
    weft::loss::MetricSums metrics;
    const int64_t before = memory_.used();
    (void)memory_.TakePeak();
    const weft::loss::AllocationLimit counted(int64_t{1} << 40);
    const absl::Status run = weft::loss::RunLossGraph(
        graph_, loss_, datum, std::nullopt, logprobs, /*backward=*/true,
        absl::MakeSpan(losses), absl::MakeSpan(gradients), &metrics);
    if (!run.ok()) return run.ToString();
    return {counted.taken(), memory_.TakePeak() - before};
  }

 private:
  inline static weft::testing::LimitedMemory memory_;
  weft::CustomLoss loss_;
  weft::LossGraph graph_;
};

void TellMemory(int count) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> logarithm(0, std::log(4096.0));
  for (std::string line; std::getline(std::cin, line);) {
    MemoryOfGraph memory(line);
    Json taken = Json::array();
    for (int i = 0; i < count; ++i) {
      const auto sixes = static_cast<size_t>(std::exp(logarithm(random)));
      taken.push_back(memory.Take(6 * sixes));
    }
    std::cout << taken.dump() << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  weft::loss::AllocationLimit::Install();
  if (argc > 1 && std::string(argv[1]) == "--list") {
    for (const weft::LossOperation& operation : weft::LossOperations()) {
      std::cout << operation.name << "\n";
    }
    return 0;
  }
  if (argc > 2 && std::string(argv[1]) == "--memory") {
    TellMemory(std::stoi(argv[2]));
    return 0;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << Answer(Json::parse(line)).dump() << std::endl;
  }
  return 0;
}
