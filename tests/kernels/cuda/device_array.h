// Device memory for the tests of kernels/cuda. The fixture skips tests if there
// is no device.
#ifndef WEFT_TESTS_KERNELS_CUDA_DEVICE_ARRAY_H_
#define WEFT_TESTS_KERNELS_CUDA_DEVICE_ARRAY_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/dtype.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The base of every fixture.
class CudaKernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

class CudaDtypeTest : public CudaKernelTest,
                      public ::testing::WithParamInterface<DType> {};

inline std::string DTypeName(const ::testing::TestParamInfo<DType>& info) {
  return info.param == DType::kBf16 ? "Bf16" : "F32";
}

// A copy of `values` on the device.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  // Waits for all queued work. Returns the device's values.
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

// Rounds to nearest, ties to even.
inline uint16_t ToBf16(float x) {
  if (std::isnan(x)) return 0x7FC0;
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float FromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds numbers to the dtype in which kernels store them.
inline std::vector<float> Rounded(DType dtype, std::vector<float> values) {
  if (dtype == DType::kBf16) {
    for (float& x : values) x = FromBf16(ToBf16(x));
  }
  return values;
}

// Floats on the device, stored in a dtype.
class DeviceArray {
 public:
  DeviceArray(DType dtype, const std::vector<float>& values)
      : dtype_(dtype),
        floats_(dtype == DType::kF32 ? values : std::vector<float>()),
        bf16_(Bf16Of(dtype, values)) {}

  void* data() const {
    return dtype_ == DType::kF32 ? static_cast<void*>(floats_.data())
                                 : static_cast<void*>(bf16_.data());
  }
  // Returns the address of element i.
  void* at(int64_t i) const {
    return static_cast<char*>(data()) + i * (dtype_ == DType::kF32 ? 4 : 2);
  }
  std::vector<float> Read() const {
    if (dtype_ == DType::kF32) return floats_.Read();
    std::vector<float> values;
    for (const uint16_t bits : bf16_.Read()) values.push_back(FromBf16(bits));
    return values;
  }

 private:
  static std::vector<uint16_t> Bf16Of(DType dtype,
                                      const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    if (dtype == DType::kF32) return bits;
    for (const float x : values) bits.push_back(ToBf16(x));
    return bits;
  }

  DType dtype_;
  DeviceBuffer<float> floats_;
  DeviceBuffer<uint16_t> bf16_;
};

inline double EpsilonOf(DType dtype) {
  return dtype == DType::kF32 ? kEpsilonF32 : kEpsilonBf16;
}

inline std::vector<float> RandomFloats(int64_t count, uint32_t seed,
                                       float scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(generator);
  return values;
}

// Appends a copy of the `count` elements, multiplied by `sign`. If one factor
// of a product has sign 1 and the other -1, the terms of its sum cancel. Then
// only rounding errors remain, which any other order of the terms changes.
inline void Repeat(float* begin, int64_t count, float sign) {
  for (int64_t i = 0; i < count; ++i) begin[count + i] = sign * begin[i];
}

// Returns `count` elements from `begin` on.
inline std::vector<float> Slice(const std::vector<float>& values, int64_t begin,
                                int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_TESTS_KERNELS_CUDA_DEVICE_ARRAY_H_
