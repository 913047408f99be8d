// Times Weft's decode loop by itself, without a server:
//   decode_bench MODEL_DIR f32|bf16|int8 BATCH PROMPT TOKENS THREADS cpu|cuda
// BATCH sequences of PROMPT tokens draw TOKENS tokens each. Prints one JSON
// line with the seconds of the fastest and of the median iteration, and the
// tokens per second of both. The line also has the bytes that an iteration must
// read: the weights once, and the keys, values and states of every sequence. An
// expert counts only if a token chose it. Weights are random if MODEL_DIR has
// only config.json.
//
// The line also has the memory bandwidth, measured in the same run. On a CPU it
// is the rate at which THREADS threads read cache lines. On a device it is the
// rate of reading or of copying, whichever is higher.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "prometheus/registry.h"
#include "src/base/huge_pages.h"
#include "src/engine/decode/sample_loop.h"
#include "src/engine/start/memory_plan.h"
#include "src/model/decoder.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_config.h"
#include "src/weights/checkpoint.h"
#include "tests/bench/bench.h"

namespace {

using weft::SampleRequest;
using weft::bench::SecondsSince;
using weft::bench::ValueOf;
using weft::engine::CacheUnitsOf;
using weft::engine::KvPool;
using weft::engine::SampleLoop;
using weft::engine::SizesOf;
using weft::model::Decoder;

struct Arguments {
  std::string model_dir;
  at::ScalarType dtype;
  weft::model_config::MatrixFormat format;
  int64_t batch, prompt, tokens;
  at::Device device;
};

double Middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Like ReadMemory, on a device. Measures the rate of a sum over all of
// `memory`, and the rate of a copy from one half to the other half. Appends the
// higher rate, because a sum can be too slow to use the full bandwidth. Each
// rate is the mean of `times` runs, because a single run may take no longer
// than its launch.
void ReadDeviceMemory(const at::Tensor& memory, int64_t times,
                      std::vector<double>* rates) {
  const std::vector<at::Tensor> halves = memory.chunk(2);
  const at::Tensor from = halves[0].slice(0, 0, halves[1].size(0));
  const auto rate = [&](const auto& move) {
    at::Tensor result = move();
    static_cast<void>(result.view(-1)[0].item());  // Warms up the device.
    const auto start = std::chrono::steady_clock::now();
    for (int64_t time = 0; time < times; ++time) result = move();
    static_cast<void>(result.view(-1)[0].item());
    return static_cast<double>(times * memory.nbytes()) / SecondsSince(start);
  };
  const double reading = rate([&] { return memory.sum(); });
  const double copying = rate([&] { return halves[1].copy_(from); });
  rates->push_back(std::max(reading, copying));
}

// Makes `times` passes over `memory`, each with all threads together. Appends
// the bytes per second of each pass.
void ReadMemory(const at::Tensor& memory, int64_t times,
                std::vector<double>* rates) {
  if (memory.is_cuda()) return ReadDeviceMemory(memory, times, rates);
  // Reads only one number of each cache line. So threads wait only for memory,
  // whatever the width of their registers.
  constexpr int64_t kLineNumbers = 8;
  constexpr int64_t kAhead = 128 * kLineNumbers;
  const auto* data = memory.const_data_ptr<int64_t>();
  const int64_t lines = memory.numel() / kLineNumbers;
  for (int64_t time = 0; time < times; ++time) {
    const auto start = std::chrono::steady_clock::now();
    at::parallel_for(0, lines, 1, [&](int64_t begin, int64_t end) {
      int64_t sum = 0;
      for (int64_t line = begin; line < end; ++line) {
        __builtin_prefetch(data + line * kLineNumbers + kAhead);
        sum += data[line * kLineNumbers];
      }
      volatile int64_t keep = 0;
      keep = sum;
      static_cast<void>(keep);
    });
    rates->push_back(static_cast<double>(memory.nbytes()) /
                     SecondsSince(start));
  }
}

// Returns the bytes of the weights that every iteration reads. Leaves out the
// routed experts, because an iteration reads only some of them.
int64_t CommonWeightBytes(const Decoder& decoder) {
  const weft::model::DecoderWeights& w = decoder.weights();
  int64_t bytes = 0;
  const auto add = [&bytes](const at::Tensor& weight) {
    if (weight.defined()) bytes += static_cast<int64_t>(weight.nbytes());
  };
  add(w.head_VH);
  for (const weft::model::LayerWeights& layer : w.layers) {
    for (const weft::lora::BaseLinear* linear :
         {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
      add(linear->weight_OI);
    }
    add(layer.experts.router_EH);
    add(layer.experts.shared_gate_up_S2H);
    add(layer.experts.shared_down_HS);
  }
  return bytes;
}

// Returns the bytes of one expert of one layer; 0 without experts.
int64_t ExpertBytes(const Decoder& decoder) {
  const weft::model_config::ExpertShape& experts = decoder.config().moe.shape;
  for (const weft::model::LayerWeights& layer : decoder.weights().layers) {
    if (!layer.experts.gate_up_GH.defined()) continue;
    return static_cast<int64_t>(layer.experts.gate_up_GH.nbytes() +
                                layer.experts.down_DF.nbytes()) /
           experts.count;
  }
  return 0;
}

// Returns how many experts an average iteration reads, summed over the layers.
// An iteration computes one token of every sequence. `routings` has the
// Sample::routing of each sequence.
double ExpertsPerIteration(const weft::model_config::ExpertShape& experts,
                           const std::vector<std::vector<uint16_t>>& routings,
                           int64_t prompt) {
  const int64_t width = experts.routing_width();
  if (width == 0) return 0;
  const auto length = static_cast<int64_t>(routings.at(0).size()) / width;
  int64_t count = 0;
  for (int64_t token = prompt; token < length; ++token) {
    std::set<std::pair<int64_t, uint16_t>> distinct;
    for (const std::vector<uint16_t>& routing : routings) {
      for (int64_t i = 0; i < width; ++i) {
        distinct.emplace(i / experts.per_token, routing.at(token * width + i));
      }
    }
    count += static_cast<int64_t>(distinct.size());
  }
  return static_cast<double>(count) / static_cast<double>(length - prompt);
}

int64_t KvBytesPerToken(const Decoder& decoder) {
  const weft::model_config::ModelConfig& config = decoder.config();
  const auto num_linear = std::ranges::count(config.delta.layers, true);
  return 2 * (config.num_layers - num_linear) * config.num_kv_heads *
         config.head_dim *
         static_cast<int64_t>(at::elementSize(decoder.dtype()));
}

struct Decoded {
  std::vector<double> seconds;  // One entry for each iteration.
  double experts_per_iteration = 0;
};

// Decodes all sequences. An iteration draws one token for each of them.
Decoded Decode(const Decoder& decoder, const Arguments& arguments) {
  const int64_t length = arguments.prompt + arguments.tokens;
  prometheus::Registry registry;
  weft::engine::EngineProbe probe(&registry);
  weft::executor::Executor group(
      decoder, {.chunk_rows = 1024, .softcap = decoder.config().final_softcap},
      /*links=*/{});
  SampleLoop loop(&group,
                  {.kv_cache_bytes = weft::engine::BytesFor(
                       CacheUnitsOf(SizesOf(decoder)),
                       2 * arguments.batch * KvPool::PagesFor(length + 64),
                       arguments.batch),
                   .max_decode_sequences = static_cast<int>(arguments.batch),
                   .max_prefill_tokens = arguments.batch * arguments.prompt,
                   .decode_graphs = true},
                  /*token_bytes=*/nullptr, &probe);
  std::vector<SampleRequest> requests(arguments.batch);
  for (int64_t b = 0; b < arguments.batch; ++b) {
    requests[b].config = {.max_tokens = static_cast<int>(arguments.tokens),
                          .seed = static_cast<uint64_t>(b),
                          .stop = {.ignore_eos = true}};
    requests[b].return_routing = decoder.config().moe.shape.count > 0;
    for (int64_t t = 0; t < arguments.prompt; ++t) {
      requests[b].prompt.push_back(
          static_cast<int32_t>((b * 131 + t * 7) % decoder.config().vocab));
    }
    loop.Admit({.id = static_cast<uint64_t>(b),
                .request = &requests[b],
                .accepted_at = absl::Now()},
               /*version=*/nullptr);
  }
  TORCH_CHECK(arguments.tokens > 1, "TOKENS must be at least 2");
  std::vector<double> seconds;
  std::vector<std::vector<uint16_t>> routings;
  while (loop.active() > 0) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<weft::engine::SampleEvent> events = loop.Step();
    seconds.push_back(SecondsSince(start));
    for (const weft::engine::SampleEvent& event : events) {
      TORCH_CHECK(event.result.ok(), event.result.status().ToString());
      if (event.finished) {
        routings.push_back(event.result->samples.at(0).routing);
      }
    }
  }
  // The first steps are the prefill, which drew the first token. In a model
  // with states it has two passes (sample_sequences.h).
  const auto num_prefills =
      static_cast<int64_t>(seconds.size()) - (arguments.tokens - 1);
  TORCH_CHECK(num_prefills == 1 || num_prefills == 2, seconds.size(),
              " steps for ", arguments.tokens, " tokens of each sequence");
  seconds.erase(seconds.begin(), seconds.begin() + num_prefills);
  return {.seconds = std::move(seconds),
          .experts_per_iteration = ExpertsPerIteration(
              decoder.config().moe.shape, routings, arguments.prompt)};
}

weft::model::DecoderWeights LoadWeights(
    const Arguments& arguments, const weft::model_config::ModelConfig& config) {
  constexpr uint64_t kSeed = 1;
  const auto checkpoint = weft::weights::Checkpoint::Open(arguments.model_dir);
  if (absl::IsNotFound(checkpoint.status())) {
    return weft::model::MakeDummyWeights(config, arguments.dtype,
                                         arguments.device, kSeed,
                                         /*shard=*/{}, arguments.format);
  }
  TORCH_CHECK(checkpoint.ok(), checkpoint.status().ToString());
  return ValueOf(weft::model::LoadDecoderWeights(
      **checkpoint, config, arguments.dtype, arguments.device, /*shard=*/{},
      arguments.format));
}

void Run(const Arguments& arguments) {
  const at::InferenceMode no_autograd;
  weft::model_config::ModelConfig config =
      ValueOf(weft::model_config::ReadModelConfig(arguments.model_dir));
  const Decoder decoder(config, LoadWeights(arguments, config),
                        arguments.prompt + arguments.tokens);
  const int64_t common_bytes = CommonWeightBytes(decoder);
  const int64_t expert_bytes = ExpertBytes(decoder);
  const weft::model_config::ExpertShape& experts = config.moe.shape;
  const int64_t all_bytes =
      common_bytes + expert_bytes * experts.count * experts.num_layers();
  at::Tensor memory =
      at::empty({all_bytes / 8}, at::dtype(at::kLong).device(arguments.device));
  // Uses huge pages, because the weights are in huge pages, too.
  if (memory.is_cpu()) {
    weft::PreferHugePages(absl::MakeSpan(
        static_cast<std::byte*>(memory.mutable_data_ptr()), memory.nbytes()));
  }
  memory.fill_(1);
  std::vector<double> rates;
  ReadMemory(memory, arguments.tokens, &rates);
  const auto [seconds, experts_per_iteration] = Decode(decoder, arguments);
  ReadMemory(memory, arguments.tokens, &rates);
  const double read_rate = Middle(rates);
  const double best = *std::min_element(seconds.begin(), seconds.end());
  const double middle = Middle(seconds);
  const auto batch = static_cast<double>(arguments.batch);
  // Counts the KV cache at its average length.
  const double bytes =
      static_cast<double>(common_bytes) +
      experts_per_iteration * static_cast<double>(expert_bytes) +
      batch * static_cast<double>((arguments.prompt + arguments.tokens / 2) *
                                      KvBytesPerToken(decoder) +
                                  CacheUnitsOf(SizesOf(decoder)).state);
  std::cout << nlohmann::json{{"batch", arguments.batch},
                              {"seconds", best},
                              {"middle_seconds", middle},
                              {"tokens_per_second", batch / best},
                              {"middle_tokens_per_second", batch / middle},
                              {"bytes_per_iteration", bytes},
                              {"experts_per_iteration", experts_per_iteration},
                              {"read_bytes_per_second", read_rate},
                              {"fraction_of_read_rate",
                               bytes / middle / read_rate},
                              {"threads", at::get_num_threads()}}
            << std::endl;
}

bool Start(const std::vector<std::string>& words) {
  if (words.size() != 7) return false;
  const std::string& dtype = words[1];
  const std::string& device = words[6];
  const bool is_int8 = dtype == "int8";
  if (dtype != "f32" && dtype != "bf16" && !is_int8) return false;
  if (device != "cpu" && device != "cuda") return false;
  const std::vector<int64_t> numbers = weft::bench::Numbers(words, 2);
  at::set_num_threads(static_cast<int>(numbers[3]));
  Run({.model_dir = words[0],
       .dtype = dtype == "bf16" || (is_int8 && device == "cuda") ? at::kBFloat16
                                                                 : at::kFloat,
       .format = is_int8 ? weft::model_config::MatrixFormat::kInt8
                         : weft::model_config::MatrixFormat::kDtype,
       .batch = numbers[0],
       .prompt = numbers[1],
       .tokens = numbers[2],
       .device = at::Device(device)});
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  return weft::bench::Main(argc, argv,
                           "decode_bench MODEL_DIR f32|bf16|int8 BATCH PROMPT "
                           "TOKENS THREADS cpu|cuda",
                           Start);
}
