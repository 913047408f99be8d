// Device memory with random or given numbers, and checks of the results that
// kernels write.
#ifndef WEFT_TESTS_BENCH_KERNELS_CUDA_BUFFER_H_
#define WEFT_TESTS_BENCH_KERNELS_CUDA_BUFFER_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::kernels::cuda::bench {

// Ends the process with status 1 if `is_right` is false or `status` is an
// error.
void Check(bool is_right, const std::string& what);
void Check(cudaError_t status);
// Checks a result that is a sum of `terms` numbers in f32, stored in a dtype
// whose epsilon is `stored_epsilon`. `magnitude` bounds the partial sums.
void CheckNear(double actual, double expected, double stored_epsilon,
               int64_t terms, double magnitude, const std::string& what);

float FromBf16(uint16_t bits);

// Device memory with given values, or with random numbers in [-limit, limit).
// The numbers are random, because kernels run faster on zeros than on real
// data.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count, float limit = 1);
  explicit Buffer(const std::vector<T>& values);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  // Returns `count` elements from `begin` on.
  std::vector<T> Read(int64_t begin, int64_t count) const {
    std::vector<T> host(static_cast<size_t>(count));
    Check(cudaMemcpy(host.data(), data() + begin, host.size() * sizeof(T),
                     cudaMemcpyDeviceToHost));
    return host;
  }
  // Returns the elements of Read as floats.
  std::vector<float> Floats(int64_t begin, int64_t count) const {
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
void FillRandom(float limit, std::vector<T>* values);

template <typename T>
Buffer<T>::Buffer(const std::vector<T>& values) {
  Check(cudaMalloc(&data_, values.size() * sizeof(T)));
  Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T),
                   cudaMemcpyHostToDevice));
}

template <typename T>
Buffer<T>::Buffer(int64_t count, float limit) {
  // The buffer repeats a pattern of this length, because drawing all numbers
  // would take longer than the bench.
  constexpr int64_t kPattern = (int64_t{1} << 20) + 7;
  std::vector<T> pattern(static_cast<size_t>(std::min(count, kPattern)));
  FillRandom(limit, &pattern);
  Check(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)));
  for (int64_t done = 0; done < count; done += kPattern) {
    Check(cudaMemcpy(
        data() + done, pattern.data(),
        static_cast<size_t>(std::min(kPattern, count - done)) * sizeof(T),
        cudaMemcpyHostToDevice));
  }
}

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_TESTS_BENCH_KERNELS_CUDA_BUFFER_H_
