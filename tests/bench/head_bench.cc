// Runs Weft's head by itself, for tests/bench/logprobs.py:
//   head_bench FOLDER ROWS HIDDEN VOCAB CHUNK THREADS REPS cpu|cuda
// Reads hidden [R, H], weight [V, H], gradients [R] (f32) and targets [R] (i64)
// from FOLDER, raw and little-endian. Writes logprobs [R] and dhidden [R, H]
// there, in f32. Prints one JSON line with the seconds of the pass with
// gradient, the seconds of the forward pass alone, and the memory used beyond
// the inputs. This is resident memory on a CPU, and the allocator's memory on
// CUDA. Computes in f32 on a CPU and in bf16 on CUDA.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "src/loss/fused_head.h"
#include "tests/bench/bench.h"

namespace {

using weft::loss::HeadResult;
using weft::loss::ScoreRows;

at::Tensor ReadTensor(const std::string& path, at::IntArrayRef shape,
                      at::ScalarType type) {
  at::Tensor tensor = at::empty(shape, type);
  std::ifstream file(path, std::ios::binary);
  file.read(static_cast<char*>(tensor.mutable_data_ptr()),
            static_cast<std::streamsize>(tensor.nbytes()));
  TORCH_CHECK(file.good() && file.peek() == EOF, path, " is not ", shape);
  return tensor;
}

void WriteTensor(const std::string& path, const at::Tensor& tensor) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(tensor.const_data_ptr()),
             static_cast<std::streamsize>(tensor.nbytes()));
  TORCH_CHECK(file.good(), "cannot write ", path);
}

int64_t StatusBytes(const std::string& field) {
  constexpr int64_t kKilobyte = 1024;
  return weft::bench::ProcSelf("status", field) * kKilobyte;
}

// The memory that a computation needs in addition to the memory at its start.
class PeakMemory {
 public:
  explicit PeakMemory(const at::Device& device) : device_(device) {
    if (device_.is_cuda()) {
      at::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
      before_bytes_ = Allocated().current;
      return;
    }
    // Resets the high-water mark to the memory that is resident now.
    std::ofstream("/proc/self/clear_refs") << "5";
    before_bytes_ = StatusBytes("VmRSS");
  }

  nlohmann::json Read() const {
    if (device_.is_cuda()) {
      return {{"extra_allocated_bytes", Allocated().peak - before_bytes_}};
    }
    const int64_t peak_bytes = StatusBytes("VmHWM");
    return {{"peak_rss_bytes", peak_bytes},
            {"extra_rss_bytes", peak_bytes - before_bytes_}};
  }

 private:
  c10::CachingAllocator::Stat Allocated() const {
    return at::getDeviceAllocator(device_.type())
        ->getDeviceStats(device_.index())
        .allocated_bytes[static_cast<size_t>(
            c10::CachingAllocator::StatType::AGGREGATE)];
  }

  at::Device device_;
  int64_t before_bytes_ = 0;
};

// Waits until the device has done all queued work.
void WaitFor(const at::Tensor& result) {
  if (result.is_cuda()) static_cast<void>(result.view(-1)[0].item());
}

template <typename Call>
std::vector<double> Times(int64_t reps, const Call& call) {
  std::vector<double> seconds;
  for (int64_t i = 0; i <= reps; ++i) {  // The first repetition warms up.
    const auto start = std::chrono::steady_clock::now();
    WaitFor(call());
    const double taken = weft::bench::SecondsSince(start);
    if (i > 0) seconds.push_back(taken);
  }
  return seconds;
}

ScoreRows OneTargetPerRow(const at::Tensor& targets) {
  const int64_t* data = targets.const_data_ptr<int64_t>();
  const int64_t count = targets.numel();
  ScoreRows rows{.row_offsets = std::vector<int64_t>(count + 1),
                 .targets = std::vector<int64_t>(data, data + count),
                 .temperatures = std::vector<float>(count, 1.0F)};
  std::iota(rows.row_offsets.begin(), rows.row_offsets.end(), 0);
  return rows;
}

void Run(const std::string& folder, const std::vector<int64_t>& numbers,
         const at::Device& device) {
  const int64_t num_rows = numbers[0], hidden_size = numbers[1],
                vocab = numbers[2], reps = numbers[5];
  at::set_num_threads(static_cast<int>(numbers[4]));
  const at::ScalarType dtype = device.is_cuda() ? at::kBFloat16 : at::kFloat;
  const at::Tensor hidden =
      ReadTensor(folder + "/hidden", {num_rows, hidden_size}, at::kFloat)
          .to(device, dtype);
  const at::Tensor weight =
      ReadTensor(folder + "/weight", {vocab, hidden_size}, at::kFloat)
          .to(device, dtype);
  const at::Tensor gradients =
      ReadTensor(folder + "/gradients", {num_rows}, at::kFloat).to(device);
  const ScoreRows rows =
      OneTargetPerRow(ReadTensor(folder + "/targets", {num_rows}, at::kLong));
  const PeakMemory memory(hidden.device());
  const weft::loss::HeadOptions options{.chunk_rows = numbers[3]};
  at::Tensor logprobs;
  at::Tensor dhidden;
  const std::vector<double> seconds = Times(reps, [&] {
    HeadResult forward = ScoreHead(hidden, weight, rows, options,
                                   /*want_gradient=*/true,
                                   /*want_entropy=*/false);
    logprobs = forward.logprobs_E;
    dhidden = HeadBackward(std::move(forward), hidden, weight, rows, options,
                           gradients, /*gradients=*/{});
    return dhidden;
  });
  nlohmann::json line = memory.Read();
  WriteTensor(folder + "/logprobs", logprobs.cpu());
  WriteTensor(folder + "/dhidden", dhidden.to(at::kCPU, at::kFloat));
  const std::vector<double> forward_seconds = Times(reps, [&] {
    return ScoreHead(hidden, weight, rows, options, /*want_gradient=*/false,
                     /*want_entropy=*/false)
        .logprobs_E;
  });
  line["seconds"] = seconds;
  line["forward_seconds"] = forward_seconds;
  std::cout << line << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  return weft::bench::Main(
      argc, argv,
      "head_bench FOLDER ROWS HIDDEN VOCAB CHUNK THREADS REPS cpu|cuda",
      [](const std::vector<std::string>& words) {
        if (words.size() != 8) return false;
        if (words[7] != "cpu" && words[7] != "cuda") return false;
        Run(words[0], weft::bench::Numbers(words, 1), at::Device(words[7]));
        return true;
      });
}
