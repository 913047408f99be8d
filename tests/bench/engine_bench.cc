// Times ForwardBackward of Weft's engine in this process, without a server:
//   engine_bench MODEL_DIR TOKENS_FILE SEQUENCES RANK REPS THREADS f32|bf16
// TOKENS_FILE has SEQUENCES rows of int32 tokens, of equal length. Each token
// predicts the next one. Prints one JSON line with the loss of the first step
// and the seconds of REPS later steps.
#include <chrono>
#include <cstdint>
#include <fstream>
#include <future>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/registry.h"
#include "src/engine/engine.h"
#include "tests/bench/bench.h"

namespace {

using weft::bench::ValueOf;
using weft::engine::Engine;

std::vector<weft::Datum> ReadData(const std::string& path, int64_t sequences) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto bytes = static_cast<int64_t>(file.tellg());
  const int64_t width =
      bytes / static_cast<int64_t>(sizeof(int32_t)) / sequences;
  TORCH_CHECK(file && width >= 2, path, " has no rows of 2 tokens");
  file.seekg(0);
  std::vector<weft::Datum> data;
  for (int64_t i = 0; i < sequences; ++i) {
    std::vector<int32_t> row(width);
    file.read(reinterpret_cast<char*>(row.data()),
              width * static_cast<int64_t>(sizeof(int32_t)));
    data.push_back({.tokens = {row.begin(), row.end() - 1},
                    .targets = {row.begin() + 1, row.end()}});
  }
  return data;
}

double Step(Engine& engine, const std::vector<weft::Datum>& data) {
  std::promise<absl::StatusOr<weft::StepReply<weft::TrainResult>>> reply;
  engine.Train({.adapter_id = "bench", .data = data},
               [&](auto result) { reply.set_value(std::move(result)); });
  return ValueOf(reply.get_future().get()).result.metrics.at("loss:sum");
}

void CreateAdapter(Engine& engine, int rank) {
  std::promise<absl::StatusOr<weft::AdapterInfo>> reply;
  engine.CreateAdapter(
      {.adapter_id = "bench", .tenant = "bench", .config = {.rank = rank}},
      [&](auto result) { reply.set_value(std::move(result)); });
  ValueOf(reply.get_future().get());
}

bool Run(const std::vector<std::string>& words) {
  if (words.size() != 7) return false;
  const std::vector<int64_t> numbers = weft::bench::Numbers(words, 2);
  const std::vector<weft::Datum> data = ReadData(words[1], numbers[0]);
  prometheus::Registry registry;
  const auto engine = ValueOf(weft::engine::StartEngine(
      {.model_dir = words[0],
       .device = weft::Device::kCpu,
       .dtype = words[6] == "bf16" ? weft::Dtype::kBf16 : weft::Dtype::kF32,
       .num_threads = static_cast<int>(numbers[3]),
       .checkpoint_dir = words[1] + ".d"},
      weft::World(), &registry, {}));
  CreateAdapter(*engine, static_cast<int>(numbers[1]));
  const double loss = Step(*engine, data);
  std::vector<double> seconds;
  for (int64_t rep = 0; rep < numbers[2]; ++rep) {
    const auto start = std::chrono::steady_clock::now();
    Step(*engine, data);
    seconds.push_back(weft::bench::SecondsSince(start));
  }
  std::cout << nlohmann::json{{"loss", loss}, {"seconds", seconds}}
            << std::endl;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  return weft::bench::Main(
      argc, argv,
      "engine_bench MODEL_DIR TOKENS_FILE SEQUENCES RANK REPS THREADS f32|bf16",
      Run);
}
