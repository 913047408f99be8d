// Times each kernel and, in the same run, a peer: a copy from device to device,
// cuBLAS, or the launches that the kernel replaces. Before that, checks some
// elements of most results. Prints one line of JSON for each measurement. Each
// time is the best of several runs, in microseconds. Each run begins with a
// cold cache, but in lora_few only the adapters' matrices are cold. ctest does
// not run this program.
//   ninja cuda_kernel_bench && kernels/cuda/cuda_kernel_bench [NAME...]
// Exit status: 0 for success or without a device; 1 for an error or a wrong
// result; 2 for an unknown name.
#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "tests/bench/kernels_cuda/bench.h"

namespace weft::kernels::cuda::bench {
namespace {

struct Bench {
  std::string_view name;
  void (*run)(const Device& device);
};

constexpr Bench kBenches[] = {
    {"rows", BenchRows},        {"optimizer", BenchOptimizer},
    {"head", BenchHead},        {"attention", BenchAttention},
    {"sampler", BenchSampler},  {"int8", BenchInt8},
    {"delta", BenchDelta},      {"lora", BenchLora},
    {"lora_few", BenchLoraFew}, {"lora_add_on", BenchLoraAddOn}};

int Run(const std::vector<std::string_view>& names) {
  for (const std::string_view name : names) {
    if (std::ranges::find(kBenches, name, &Bench::name) == std::end(kBenches)) {
      std::fprintf(stderr, "no bench %s; there are", std::string(name).c_str());
      for (const Bench& bench : kBenches) {
        std::fprintf(stderr, " %s", std::string(bench.name).c_str());
      }
      std::fputs("\n", stderr);
      return 2;
    }
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::puts("no CUDA device");
    return 0;
  }
  const Device device;
  Line("copy").AddRatio("gb_per_second", device.copy_rate() / 1e9).Print();
  for (const Bench& bench : kBenches) {
    if (names.empty() || std::ranges::find(names, bench.name) != names.end()) {
      bench.run(device);
    }
  }
  return 0;
}

}  // namespace
}  // namespace weft::kernels::cuda::bench

int main(int argc, char** argv) {
  return weft::kernels::cuda::bench::Run(
      std::vector<std::string_view>(argv + 1, argv + argc));
}
