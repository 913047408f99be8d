// Times ForwardBackward of Weft's engine in this process, without a server:
//   engine_bench MODEL_DIR TOKENS_FILE SEQUENCES RANK REPS THREADS f32|bf16
// TOKENS_FILE has SEQUENCES rows of int32 tokens, of equal length. Each token
// predicts the next one. Prints one JSON line with the loss of the first step
// and the seconds of REPS later steps.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/registry.h"
#include "src/engine/engine.h"

namespace {

using weft::Engine;

[[noreturn]] void Fail(const std::string& what) {
  std::cerr << "engine_bench: " << what << "\n";
  std::exit(1);
}

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status().ToString());
  return *std::move(value);
}

std::vector<weft::Datum> ReadData(const std::string& path, int64_t sequences) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto bytes = static_cast<int64_t>(file.tellg());
  const int64_t width =
      bytes / static_cast<int64_t>(sizeof(int32_t)) / sequences;
  if (!file || width < 2) Fail("'" + path + "' has no rows of 2 tokens");
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
  return ValueOrDie(reply.get_future().get()).result.metrics.at("loss:sum");
}

void CreateAdapter(Engine& engine, int rank) {
  std::promise<absl::StatusOr<weft::AdapterInfo>> reply;
  engine.CreateAdapter(
      {.adapter_id = "bench", .tenant = "bench", .config = {.rank = rank}},
      [&](auto result) { reply.set_value(std::move(result)); });
  ValueOrDie(reply.get_future().get());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    Fail("usage: MODEL_DIR TOKENS_FILE SEQUENCES RANK REPS THREADS f32|bf16");
  }
  const bool is_bf16 = std::string(argv[7]) == "bf16";
  const std::vector<weft::Datum> data = ReadData(argv[2], std::atoll(argv[3]));
  prometheus::Registry registry;
  const auto engine = ValueOrDie(weft::StartEngine(
      {.model_dir = argv[1],
       .device = weft::Device::kCpu,
       .dtype = is_bf16 ? weft::Dtype::kBf16 : weft::Dtype::kF32,
       .num_threads = std::atoi(argv[6]),
       .checkpoint_dir = std::string(argv[2]) + ".d"},
      weft::World(), &registry));
  CreateAdapter(*engine, std::atoi(argv[4]));
  const double loss = Step(*engine, data);
  std::vector<double> seconds;
  for (int rep = 0; rep < std::atoi(argv[5]); ++rep) {
    const auto start = std::chrono::steady_clock::now();
    Step(*engine, data);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count());
  }
  std::cout << nlohmann::json{{"loss", loss}, {"seconds", seconds}}
            << std::endl;
  return 0;
}
