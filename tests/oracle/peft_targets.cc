// Prints which modules adapter_config.json files adapt, for a test that
// compares with peft:
//   peft_targets LAYERS
// Reads one file per line of stdin, for a model of LAYERS layers. Answers each
// line with {path: [rank, alpha]} of all adapted modules, or with
// {"error": reason} if the file is refused.
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "src/lora/adapter_layout.h"
#include "src/lora/peft_config.h"

namespace weft::lora {
namespace {

nlohmann::json Describe(const std::string& line,
                        const model_config::ModelShape& shape) {
  const auto config = ParsePeftConfig(line, shape);
  if (!config.ok()) return {{"error", std::string(config.status().message())}};
  nlohmann::json result = nlohmann::json::object();
  const AdapterLayout layout(shape, *config);
  for (const LoraFactor& factor : layout.factors()) {
    const LoraShape lora = config->ShapeOf(factor.layer, factor.module);
    result[ModulePath(factor)] = {lora.rank, lora.alpha};
  }
  return result;
}

}  // namespace
}  // namespace weft::lora

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const weft::model_config::ModelShape shape = {
      .num_layers = std::atoi(argv[1]),
      .hidden = 8,
      .q_width = 8,
      .kv_width = 8,
      .ffn = 8,
      .vocab = 8};
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << weft::lora::Describe(line, shape) << '\n';
  }
  return 0;
}
