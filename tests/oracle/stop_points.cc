// Finds the token at which a stop string ends a sample:
//   stop_points MODEL_DIR
// Reads lines {"tokens": [...], "stops": ["text", ...]}. Answers each line with
// the number of tokens up to and including the token that ends the sample, or
// with 0 if no token ends it.
#include <iostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "src/sampling/stop_matcher.h"

namespace {

int Run(const std::string& model_dir) {
  using weft::sampling::StopMatcher;
  const auto bytes = weft::sampling::TokenBytes::Load(model_dir);
  if (!bytes.ok()) {
    std::cerr << bytes.status() << "\n";
    return 1;
  }
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json ask = nlohmann::json::parse(line);
    StopMatcher matcher(
        {.byte_strings = ask.at("stops").get<std::vector<std::string>>()},
        &*bytes);
    size_t count = 0;
    size_t stopped = 0;
    for (const int32_t token : ask.at("tokens")) {
      ++count;
      if (!matcher.Push(token)) continue;
      stopped = count;
      break;
    }
    std::cout << stopped << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  return Run(argv[1]);
}
