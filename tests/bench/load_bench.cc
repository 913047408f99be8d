// Times loading weights, for tests/bench/load.py:
//   load_bench MODEL_DIR f32|bf16 REPS
// Loads the weights of a model as the daemon does, REPS times. Prints one JSON
// line with the time of the first load, and with the time, memory and bytes
// read of the fastest load.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model/decoder_weights.h"
#include "src/model_config/weight_list.h"
#include "tests/bench/bench.h"

namespace {

using weft::bench::ProcSelf;
using weft::bench::SecondsSince;
using weft::bench::ValueOf;

constexpr int64_t kKilobyte = 1024;

// Returns the bytes that the process holds after it has loaded `entries`.
int64_t KeptBytes(const std::vector<weft::model_config::WeightEntry>& entries,
                  at::ScalarType dtype) {
  int64_t elements = 0;
  for (const auto& entry : entries) elements += entry.num_elements();
  return elements * static_cast<int64_t>(c10::elementSize(dtype));
}

nlohmann::json Load(const std::string& folder, at::ScalarType dtype) {
  const int64_t read_before = ProcSelf("io", "rchar");
  const auto start = std::chrono::steady_clock::now();
  const auto config = ValueOf(weft::model_config::ReadModelConfig(folder));
  const auto checkpoint = ValueOf(weft::weights::Checkpoint::Open(folder));
  const auto weights = ValueOf(
      weft::model::LoadDecoderWeights(*checkpoint, config, dtype, at::kCPU));
  return {
      {"seconds", SecondsSince(start)},
      {"kept_bytes", KeptBytes(weft::model_config::ListWeights(config), dtype)},
      {"files", checkpoint->files().size()},
      {"bytes_read", checkpoint->bytes_read()},
      {"rchar_bytes", ProcSelf("io", "rchar") - read_before},
      {"peak_rss_bytes", ProcSelf("status", "VmHWM") * kKilobyte}};
}

bool Run(const std::vector<std::string>& words) {
  if (words.size() != 3) return false;
  const at::ScalarType dtype = words[1] == "bf16" ? at::kBFloat16 : at::kFloat;
  nlohmann::json best;
  double first_seconds = 0;
  for (int rep = 0; rep < std::stoi(words[2]); ++rep) {
    nlohmann::json load = Load(words[0], dtype);
    if (rep == 0) first_seconds = load["seconds"];
    if (rep == 0 || load["seconds"] < best["seconds"]) best = load;
  }
  best["first_seconds"] = first_seconds;
  std::cout << best.dump() << "\n";
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  return weft::bench::Main(argc, argv, "load_bench MODEL_DIR f32|bf16 REPS",
                           Run);
}
