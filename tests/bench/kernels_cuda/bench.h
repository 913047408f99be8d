// Functions that the benches share. They measure time on the device, run cuBLAS
// products, and print one line of JSON per measurement.
#ifndef WEFT_TESTS_BENCH_KERNELS_CUDA_BENCH_H_
#define WEFT_TESTS_BENCH_KERNELS_CUDA_BENCH_H_

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tests/bench/kernels_cuda/buffer.h"

namespace weft::kernels::cuda::bench {

// More bytes than any device's cache holds. A launch that touches all of them
// replaces everything in the cache.
inline constexpr int64_t kColdBytes = int64_t{1} << 28;

// Returns the least number of layers whose matrices have kColdBytes or more.
// One layer reads matrices of `layer_bytes` bytes.
constexpr int64_t ColdLayers(int64_t layer_bytes) {
  return (kColdBytes + layer_bytes - 1) / layer_bytes;
}

// The device, and the rate of a plain copy on it.
class Device {
 public:
  Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  // Returns the device time of one call of `run`, in seconds. This time is the
  // best of several calls, each with a cold cache. `run` queues work on the
  // default stream.
  double Seconds(const std::function<void()>& run) const;
  // Returns the rate of a copy from device to device: the bytes read plus the
  // bytes written, per second.
  double copy_rate() const { return copy_rate_; }
  cublasHandle_t cublas() const { return cublas_; }

 private:
  cublasHandle_t cublas_ = nullptr;
  FloatBuffer flush_;
  double copy_rate_ = 0;
};

// Records run(layer, stream) for layers [0, num_layers) in a graph, several
// times if there are few layers. Returns the seconds per layer in the best of
// several replays. With ColdLayers(...) layers, each layer finds none of its
// matrices in the cache.
double ReplaySeconds(
    int64_t num_layers,
    const std::function<void(int64_t layer, cudaStream_t stream)>& run);

// A row-major operand of a product, or the transpose of a row-major matrix.
struct Operand {
  const void* data = nullptr;  // bf16.
  int64_t stride = 0;
  bool transposed = false;
};
// Computes c [m, n] = a [m, k] b [k, n], on tensor cores with f32 sums.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  Operand a, b;
  void* c = nullptr;
  int64_t c_stride = 0;
  bool c_is_f32 = false;  // Otherwise bf16.
};
void RunGemm(const Device& device, const Gemm& gemm);

// Collects fields and prints them as a line such as {"bench": "Name", ...}.
class Line {
 public:
  explicit Line(const std::string& bench);
  Line& Add(const char* name, int64_t value);
  Line& Add(const char* name, const char* value);
  // AddTime takes seconds and prints microseconds. AddRatio prints a plain
  // number.
  Line& AddTime(const char* name, double seconds);
  Line& AddRatio(const char* name, double ratio);
  // Times `run`, and compares it with a copy that moves `num_bytes`.
  Line& AddBytes(const Device& device, double num_bytes,
                 const std::function<void()>& run);
  void Print() const;

 private:
  std::string text_;
};

void BenchRows(const Device& device);
void BenchOptimizer(const Device& device);
void BenchHead(const Device& device);
void BenchAttention(const Device& device);
void BenchSampler(const Device& device);
void BenchInt8(const Device& device);
void BenchDelta(const Device& device);
void BenchLora(const Device& device);
void BenchLoraFew(const Device& device);
void BenchLoraAddOn(const Device& device);

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_TESTS_BENCH_KERNELS_CUDA_BENCH_H_
