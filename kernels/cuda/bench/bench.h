// What the benches share: device memory of random numbers, time on the device,
// cuBLAS, checks, and the line of JSON that each measurement prints.
#ifndef WEFT_KERNELS_CUDA_BENCH_BENCH_H_
#define WEFT_KERNELS_CUDA_BENCH_BENCH_H_

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::kernels::cuda::bench {

// A bench that goes wrong, or whose kernel is, ends the process with status 1.
void Check(bool is_right, const std::string& what);
void Check(cudaError_t status);
// Of a result stored in a dtype of this epsilon, a sum of `terms` in f32 with
// `magnitude` the largest on the way.
void CheckNear(double actual, double expected, double stored_epsilon,
               int64_t terms, double magnitude, const std::string& what);

[[nodiscard]] float FromBf16(uint16_t bits);

// Device memory. Random numbers in [-1, 1): zeros would run faster than real
// data.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count);
  explicit Buffer(const std::vector<T>& values);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
  // `count` elements from `begin` on.
  [[nodiscard]] std::vector<T> Read(int64_t begin, int64_t count) const {
    std::vector<T> host(static_cast<size_t>(count));
    Check(cudaMemcpy(host.data(), data() + begin, host.size() * sizeof(T),
                     cudaMemcpyDeviceToHost));
    return host;
  }
  // The same as floats.
  [[nodiscard]] std::vector<float> Floats(int64_t begin, int64_t count) const {
    std::vector<float> floats;
    for (const T x : Read(begin, count)) {
      if constexpr (sizeof(T) == 2) {
        floats.push_back(FromBf16(x));
      } else {
        floats.push_back(static_cast<float>(x));
      }
    }
    return floats;
  }

 private:
  void* data_ = nullptr;
};
using Bf16Buffer = Buffer<uint16_t>;
using FloatBuffer = Buffer<float>;

template <typename T>
void FillRandom(std::vector<T>* values);

template <typename T>
Buffer<T>::Buffer(const std::vector<T>& values) {
  Check(cudaMalloc(&data_, values.size() * sizeof(T)));
  Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T),
                   cudaMemcpyHostToDevice));
}

template <typename T>
Buffer<T>::Buffer(int64_t count) {
  // One pattern again and again: to make all numbers takes longer than the
  // bench.
  constexpr int64_t kPattern = (int64_t{1} << 20) + 7;
  std::vector<T> pattern(static_cast<size_t>(std::min(count, kPattern)));
  FillRandom(&pattern);
  Check(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)));
  for (int64_t done = 0; done < count; done += kPattern) {
    Check(cudaMemcpy(
        data() + done, pattern.data(),
        static_cast<size_t>(std::min(kPattern, count - done)) * sizeof(T),
        cudaMemcpyHostToDevice));
  }
}

// The device, and what it reaches without our kernels.
class Device {
 public:
  Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  // Seconds of one call on the default stream, the best of several, each with a
  // cold cache.
  [[nodiscard]] double Seconds(const std::function<void()>& run) const;
  // Bytes per second that a copy from device to device reads and writes.
  [[nodiscard]] double copy_rate() const { return copy_rate_; }
  [[nodiscard]] cublasHandle_t cublas() const { return cublas_; }

 private:
  cublasHandle_t cublas_ = nullptr;
  FloatBuffer flush_;
  double copy_rate_ = 0;
};

// Row-major operand of a product, or the transposed of one that lies so.
struct Operand {
  const void* data = nullptr;  // bf16.
  int64_t stride = 0;
  bool transposed = false;
};
// c [m, n] = a [m, k] b [k, n] + beta c, on tensor cores with f32 sums.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  Operand a, b;
  float beta = 0;
  void* c = nullptr;
  int64_t c_stride = 0;
  bool c_is_f32 = false;  // Otherwise bf16.
};
void RunGemm(const Device& device, const Gemm& gemm);

// {"bench": "Name", ...}
class Line {
 public:
  explicit Line(const std::string& bench);
  Line& Add(const char* name, int64_t value);
  Line& Add(const char* name, const char* value);
  // Times in microseconds, rates and ratios.
  Line& AddTime(const char* name, double seconds);
  Line& AddRatio(const char* name, double ratio);
  void Print() const;

 private:
  std::string text_;
};

// Times `run`, whose peer is the copy of the `num_bytes` that must move.
void AddBytes(const Device& device, double num_bytes,
              const std::function<void()>& run, Line* line);

void BenchRows(const Device& device);
void BenchOptimizer(const Device& device);
void BenchHead(const Device& device);
void BenchAttention(const Device& device);
void BenchSampler(const Device& device);
void BenchLora(const Device& device);
void BenchLoraAddOn(const Device& device);

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_KERNELS_CUDA_BENCH_BENCH_H_
