// Each kernel beside a peer of the same run: what a device-to-device copy moves
// in a second, and cuBLAS for the adapters' products, which are compared with
// its result before they are timed. One line of JSON each. Not part of ctest.
//   ninja cuda_kernel_bench && kernels/cuda/cuda_kernel_bench
// Exit status: 0, also without a device; 1 for an error or a wrong result.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cuda/adamw.h"
#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/rms_norm.h"
#include "kernels/cuda/vocab_rows.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kWarmUps = 3;
constexpr int kRepetitions = 20;
constexpr int64_t kRows = 8192;
constexpr int64_t kHidden = 4096;
constexpr int64_t kRank = 16;
constexpr int64_t kVocab = 128256;
constexpr int64_t kVocabRows = 512;
constexpr int64_t kParameters = int64_t{1} << 26;

void Check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "cuda_kernel_bench: %s\n", what);
  std::exit(1);
}
void Check(cudaError_t status) {
  Check(status == cudaSuccess, cudaGetErrorString(status));
}

// Device memory of random numbers: zeros would run faster than real data.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    std::vector<T> host(static_cast<size_t>(count));
    std::minstd_rand generator(7);
    for (T& x : host) {
      const float value = static_cast<float>(generator() % 2048) / 1024 - 1;
      if constexpr (sizeof(T) == 4) {
        x = value;
      } else {
        x = static_cast<T>(std::bit_cast<uint32_t>(value) >> 16);
      }
    }
    Check(cudaMalloc(&data_, host.size() * sizeof(T)));
    Check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T),
                     cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
  [[nodiscard]] std::vector<T> Read() const {
    std::vector<T> host(static_cast<size_t>(count_));
    Check(cudaMemcpy(host.data(), data_, host.size() * sizeof(T),
                     cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  int64_t count_;
  void* data_ = nullptr;
};
using Bf16Buffer = Buffer<uint16_t>;
using FloatBuffer = Buffer<float>;

// Seconds of one call, the best of kRepetitions.
double Seconds(const std::function<void()>& run) {
  cudaEvent_t begin = nullptr, end = nullptr;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  float best = INFINITY;
  for (int i = 0; i < kWarmUps + kRepetitions; ++i) {
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

// Bytes per second that a copy reads and writes.
double CopyRate() {
  const FloatBuffer from(kParameters), to(kParameters);
  const size_t num_bytes = kParameters * sizeof(float);
  const double seconds = Seconds([&] {
    Check(cudaMemcpyAsync(to.data(), from.data(), num_bytes,
                          cudaMemcpyDeviceToDevice, nullptr));
  });
  return 2 * static_cast<double>(num_bytes) / seconds;
}

// The peer is the copy: `num_bytes` are those that must move.
void ReportBytes(const char* name, double num_bytes, double copy_rate,
                 const std::function<void()>& run) {
  const double seconds = Seconds(run);
  std::printf(
      "{\"kernel\": \"%s\", \"microseconds\": %.1f, \"gb_per_second\": %.0f, "
      "\"of_copy\": %.2f}\n",
      name, seconds * 1e6, num_bytes / seconds / 1e9,
      num_bytes / seconds / copy_rate);
}

void BenchRows(double copy_rate) {
  const Bf16Buffer x(kRows * kHidden), y(kRows * kHidden), weight(kHidden);
  const RmsNormRows rows = {.dtype = DType::kBf16,
                            .weight_dtype = DType::kBf16,
                            .num_rows = kRows,
                            .features = kHidden,
                            .eps = 1e-5F,
                            .x_TD = x.data(),
                            .x_stride = kHidden,
                            .weight_D = weight.data()};
  ReportBytes("RmsNorm", 4.0 * kRows * kHidden, copy_rate,
              [&] { Check(RmsNorm(rows, y.data(), kHidden, nullptr)); });
  const Bf16Buffer gate_up(2 * kRows * kHidden);
  ReportBytes("GatedProduct", 6.0 * kRows * kHidden, copy_rate, [&] {
    Check(GatedProduct(DType::kBf16, GateActivation::kSilu, kRows, kHidden,
                       gate_up.data(), y.data(), nullptr));
  });
}

void BenchVocabRows(double copy_rate) {
  const FloatBuffer logits(kVocabRows * kVocab), logprobs(kVocabRows);
  const FloatBuffer entropies(kVocabRows), temperatures(kVocabRows);
  const std::vector<float> ones(static_cast<size_t>(kVocabRows), 1);
  Check(cudaMemcpy(temperatures.data(), ones.data(),
                   ones.size() * sizeof(float), cudaMemcpyHostToDevice));
  std::vector<int64_t> host(static_cast<size_t>(kVocabRows) + 1);
  for (size_t r = 0; r < host.size(); ++r) host[r] = static_cast<int64_t>(r);
  void* offsets = nullptr;
  Check(cudaMalloc(&offsets, host.size() * sizeof(int64_t)));
  Check(cudaMemcpy(offsets, host.data(), host.size() * sizeof(int64_t),
                   cudaMemcpyHostToDevice));
  const auto* rows_of = static_cast<const int64_t*>(offsets);
  VocabRows rows = {.num_rows = kVocabRows,
                    .vocab = kVocab,
                    .logits_RV = logits.data(),
                    .row_offsets = rows_of,
                    .targets_E = rows_of,
                    .temperature_R = temperatures.data(),
                    .logprobs_E = logprobs.data(),
                    .entropy_R = entropies.data()};
  ReportBytes("ScoreVocabRows", 4.0 * kVocabRows * kVocab, copy_rate,
              [&] { Check(ScoreVocabRows(rows, nullptr)); });
  rows.softmax_in_place = true;
  ReportBytes("ScoreVocabRows, softmax in place", 8.0 * kVocabRows * kVocab,
              copy_rate, [&] { Check(ScoreVocabRows(rows, nullptr)); });
  Check(cudaFree(offsets));
}

void BenchAdamW(double copy_rate) {
  const FloatBuffer w(kParameters), g(kParameters), m(kParameters);
  const FloatBuffer v(kParameters);
  const cpu::AdamWScalars scalars = {.beta1 = 0.9F,
                                     .one_minus_beta1 = 0.1F,
                                     .beta2 = 0.95F,
                                     .one_minus_beta2 = 0.05F,
                                     .step_size = 1e-4F,
                                     .eps = 1e-12F};
  ReportBytes("AdamW", 28.0 * kParameters, copy_rate, [&] {
    Check(AdamW(scalars, kParameters, w.data(), g.data(), m.data(), v.data(),
                w.data(), nullptr));
  });
}

// The shrink of `num_adapters` with as many rows each, beside cuBLAS with all
// rows of one.
void BenchShrink(cublasHandle_t cublas, int64_t num_adapters, int num_splits) {
  const Bf16Buffer x(kRows * kHidden), weights(num_adapters * kRank * kHidden);
  const Bf16Buffer y(kRows * kRank), peer(kRows * kRank);
  std::vector<LoraProductItem> items;
  const int64_t rows_each = kRows / num_adapters;
  for (int64_t row = 0; row < kRows;
       row += std::min(kLoraItemRows, rows_each)) {
    items.push_back(
        {.row = row,
         .num_rows = std::min(kLoraItemRows, rows_each),
         .num_inputs = kHidden,
         .num_outputs = kRank,
         .weight = weights.data() + row / rows_each * kRank * kHidden});
  }
  void* on_device = nullptr;
  Check(cudaMalloc(&on_device, items.size() * sizeof(LoraProductItem)));
  Check(cudaMemcpy(on_device, items.data(),
                   items.size() * sizeof(LoraProductItem),
                   cudaMemcpyHostToDevice));
  LoraProduct product = {
      .items = static_cast<const LoraProductItem*>(on_device),
      .num_items = static_cast<int64_t>(items.size()),
      .max_outputs = kRank,
      .x_TI = x.data(),
      .x_stride = kHidden,
      .y_TO = y.data(),
      .y_stride = kRank,
      .num_splits = num_splits};
  const FloatBuffer workspace(
      std::max<int64_t>(1, LoraProductWorkspace(product)));
  product.workspace = workspace.data();
  const auto run = [&] { Check(RunLoraProduct(product, nullptr)); };
  const float one = 1, zero = 0;
  const auto run_peer = [&] {
    // Column-major: y^T [R, T] = A [R, I] x^T [I, T].
    Check(cublasGemmEx(cublas, CUBLAS_OP_T, CUBLAS_OP_N, kRank, kRows, kHidden,
                       &one, weights.data(), CUDA_R_16BF, kHidden, x.data(),
                       CUDA_R_16BF, kHidden, &zero, peer.data(), CUDA_R_16BF,
                       kRank, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS,
          "cuBLAS failed");
  };
  run();
  run_peer();
  const std::vector<uint16_t> ours = y.Read(), theirs = peer.Read();
  // The first adapter's rows have the peer's weights.
  for (int64_t i = 0; i < rows_each * kRank; ++i) {
    const auto widen = [](uint16_t bits) {
      return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    };
    const float expected = widen(theirs[i]);
    Check(std::abs(widen(ours[i]) - expected) <=
              0.02F * std::max(1.0F, std::abs(expected)),
          "the shrink is not cuBLAS's");
  }
  const double seconds = Seconds(run), peer_seconds = Seconds(run_peer);
  std::printf(
      "{\"kernel\": \"RunLoraProduct\", \"adapters\": %lld, \"splits\": %d, "
      "\"microseconds\": %.1f, \"cublas_one_adapter\": %.1f, \"ratio\": "
      "%.2f}\n",
      static_cast<long long>(num_adapters), num_splits, seconds * 1e6,
      peer_seconds * 1e6, peer_seconds / seconds);
  Check(cudaFree(on_device));
}

int Run() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::puts("no CUDA device");
    return 0;
  }
  const double copy_rate = CopyRate();
  std::printf("{\"peer\": \"copy\", \"gb_per_second\": %.0f}\n",
              copy_rate / 1e9);
  BenchRows(copy_rate);
  BenchVocabRows(copy_rate);
  BenchAdamW(copy_rate);
  cublasHandle_t cublas = nullptr;
  Check(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS, "no cuBLAS");
  for (const int64_t num_adapters : {1, 8, 64, 512}) {
    for (const int num_splits : {1, 4}) {
      BenchShrink(cublas, num_adapters, num_splits);
    }
  }
  cublasDestroy(cublas);
  return 0;
}

}  // namespace
}  // namespace weft::kernels::cuda

int main() { return weft::kernels::cuda::Run(); }
