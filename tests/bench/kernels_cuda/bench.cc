#include "tests/bench/kernels_cuda/bench.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int kWarmUps = 3;
constexpr int kRepetitions = 20;

// Returns a new seed for each buffer. If two buffers were equal, a product
// would multiply rows with themselves, so its results would not be random.
uint32_t NextSeed() {
  static uint32_t seed = 7;
  return seed++;
}

void CheckCublas(cublasStatus_t status) {
  Check(status == CUBLAS_STATUS_SUCCESS, cublasGetStatusString(status));
}

}  // namespace

void Check(bool is_right, const std::string& what) {
  if (is_right) return;
  std::fprintf(stderr, "cuda_kernel_bench: %s\n", what.c_str());
  std::exit(1);
}

void Check(cudaError_t status) {
  Check(status == cudaSuccess, cudaGetErrorString(status));
}

void CheckNear(double actual, double expected, double stored_epsilon,
               int64_t terms, double magnitude, const std::string& what) {
  const double tolerance = StoredTolerance(stored_epsilon, terms,
                                           std::max(1.0, magnitude), expected);
  Check(std::abs(actual - expected) <= tolerance,
        what + " is " + std::to_string(actual) + ", not " +
            std::to_string(expected));
}

float FromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <typename T>
void FillRandom(float limit, std::vector<T>* values) {
  std::mt19937 generator(NextSeed());
  for (T& x : *values) {
    const float value =
        limit * (static_cast<float>(generator() % 2048) / 1024 - 1);
    if constexpr (sizeof(T) == 4) {
      x = value;
    } else {
      x = static_cast<T>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }
}
template void FillRandom(float limit, std::vector<float>* values);
template void FillRandom(float limit, std::vector<uint16_t>* values);

Device::Device() : flush_(kColdBytes / sizeof(float)) {
  CheckCublas(cublasCreate(&cublas_));
  constexpr int64_t kCopied = int64_t{1} << 26;
  const FloatBuffer from(kCopied), to(kCopied);
  const double seconds = Seconds([&] {
    Check(cudaMemcpyAsync(to.data(), from.data(), kCopied * sizeof(float),
                          cudaMemcpyDeviceToDevice, nullptr));
  });
  copy_rate_ = 2.0 * kCopied * sizeof(float) / seconds;
}

Device::~Device() { cublasDestroy(cublas_); }

double Device::Seconds(const std::function<void()>& run) const {
  cudaEvent_t begin = nullptr, end = nullptr;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  float best = INFINITY;
  for (int i = 0; i < kWarmUps + kRepetitions; ++i) {
    // Fills the cache with other data. The launches below queue up behind this
    // memset, so that their cost on the host is not timed.
    Check(cudaMemsetAsync(flush_.data(), i, kColdBytes, nullptr));
    Check(cudaEventRecord(begin, nullptr));
    run();
    Check(cudaEventRecord(end, nullptr));
    Check(cudaEventSynchronize(end));
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= kWarmUps) best = std::min(best, milliseconds);
  }
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  return best / 1e3;
}

double ReplaySeconds(
    int64_t num_layers,
    const std::function<void(int64_t layer, cudaStream_t stream)>& run) {
  constexpr int kRepetitions = 10;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  Check(cudaStreamCreate(&stream));
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  // Records the layers again until there are at least kLaunches calls of `run`,
  // so that a graph always has many launches.
  constexpr int64_t kLaunches = 128;
  int64_t num_recorded = 0;
  while (num_recorded < kLaunches) {
    for (int64_t i = 0; i < num_layers; ++i) run(i, stream);
    num_recorded += num_layers;
  }
  Check(cudaStreamEndCapture(stream, &graph));
  Check(cudaGraphInstantiate(&executable, graph, 0));
  float best = INFINITY;
  for (int i = 0; i < kRepetitions; ++i) {
    Check(cudaEventRecord(begin, stream));
    Check(cudaGraphLaunch(executable, stream));
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end));
    best = std::min(best, milliseconds);
  }
  Check(cudaGraphExecDestroy(executable));
  Check(cudaGraphDestroy(graph));
  Check(cudaStreamDestroy(stream));
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  return best / 1e3 / static_cast<double>(num_recorded);
}

void RunGemm(const Device& device, const Gemm& gemm) {
  const auto op = [](const Operand& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  constexpr float kOne = 1, kZero = 0;
  // cuBLAS is column-major, so this computes c^T [n, m] = b^T [n, k] a^T [k,
  // m].
  CheckCublas(cublasGemmEx(
      device.cublas(), op(gemm.b), op(gemm.a), static_cast<int>(gemm.n),
      static_cast<int>(gemm.m), static_cast<int>(gemm.k), &kOne, gemm.b.data,
      CUDA_R_16BF, static_cast<int>(gemm.b.stride), gemm.a.data, CUDA_R_16BF,
      static_cast<int>(gemm.a.stride), &kZero, gemm.c,
      gemm.c_is_f32 ? CUDA_R_32F : CUDA_R_16BF, static_cast<int>(gemm.c_stride),
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

Line::Line(const std::string& bench) : text_("{\"bench\": \"" + bench + "\"") {}

Line& Line::Add(const char* name, int64_t value) {
  text_ += std::string(", \"") + name + "\": " + std::to_string(value);
  return *this;
}

Line& Line::Add(const char* name, const char* value) {
  text_ += std::string(", \"") + name + "\": \"" + value + "\"";
  return *this;
}

Line& Line::AddTime(const char* name, double seconds) {
  char number[32];
  std::snprintf(number, sizeof(number), "%.1f", seconds * 1e6);
  text_ += std::string(", \"") + name + "_us\": " + number;
  return *this;
}

Line& Line::AddRatio(const char* name, double ratio) {
  char number[32];
  std::snprintf(number, sizeof(number), "%.3f", ratio);
  text_ += std::string(", \"") + name + "\": " + number;
  return *this;
}

void Line::Print() const {
  std::printf("%s}\n", text_.c_str());
  std::fflush(stdout);
}

Line& Line::AddBytes(const Device& device, double num_bytes,
                     const std::function<void()>& run) {
  const double seconds = device.Seconds(run);
  const double copy_seconds = num_bytes / device.copy_rate();
  return AddTime("time", seconds)
      .AddTime("copy_time", copy_seconds)
      .AddRatio("of_copy", copy_seconds / seconds);
}

}  // namespace weft::kernels::cuda::bench
