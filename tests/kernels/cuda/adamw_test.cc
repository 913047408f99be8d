// Compares AdamW and SumOfSquares with f64.
#include "kernels/cuda/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/cpu/reference.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

namespace reference = weft::kernels::cpu::reference;

constexpr cpu::AdamWScalars kScalars = {.gradient_scale = 0.5F,
                                        .beta1 = 0.9F,
                                        .one_minus_beta1 = 0.1F,
                                        .beta2 = 0.95F,
                                        .one_minus_beta2 = 0.05F,
                                        .weight_scale = 0.999F,
                                        .step_size = 1e-2F,
                                        .inverse_sqrt_bias2 = 2.0F,
                                        .eps = 1e-8F};

void ExpectNear(const std::vector<float>& actual,
                const std::vector<double>& expected, double magnitude) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], Tolerance(kEpsilonF32, 1, magnitude));
  }
}

class CudaAdamWTest : public CudaKernelTest {};

TEST_F(CudaAdamWTest, MatchesTheReferenceAlsoInPlace) {
  for (const int64_t n : {1, 31, 255, 256, 1023, 1024, 1025, 5000}) {
    const std::vector<float> w = RandomFloats(n, 11), g = RandomFloats(n, 12);
    const std::vector<float> m = RandomFloats(n, 13);
    std::vector<float> v = RandomFloats(n, 14);
    for (float& x : v) x = x * x;
    const reference::AdamWState expected = reference::AdamW(
        kScalars,
        {{w.begin(), w.end()}, {m.begin(), m.end()}, {v.begin(), v.end()}}, g);
    const DeviceBuffer<float> weights(w), gradient(g), moment1(m), moment2(v);
    const DeviceBuffer<float> out(g), moment1_again(m), moment2_again(v);
    ASSERT_EQ(
        AdamW(kScalars, n, weights.data(), gradient.data(),
              moment1_again.data(), moment2_again.data(), out.data(), nullptr),
        cudaSuccess);
    EXPECT_EQ(weights.Read(), w);
    ASSERT_EQ(AdamW(kScalars, n, weights.data(), gradient.data(),
                    moment1.data(), moment2.data(), weights.data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(out.Read(), weights.Read());
    ExpectNear(out.Read(), expected.weights, 5);
    ExpectNear(moment1.Read(), expected.moment1, 5);
    ExpectNear(moment2.Read(), expected.moment2, 10);
  }
}

TEST_F(CudaAdamWTest, NoElementsAreNoError) {
  EXPECT_EQ(
      AdamW(kScalars, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
      cudaSuccess);
}

double SquaresOf(const std::vector<float>& x) {
  const auto count = static_cast<int64_t>(x.size());
  const DeviceBuffer<float> device(x);
  const DeviceBuffer<double> partials(std::vector<double>(
      static_cast<size_t>(SumOfSquaresPartials(count)), kNan));
  EXPECT_EQ(SumOfSquares(device.data(), count, partials.data(), nullptr),
            cudaSuccess);
  return partials.Read()[0];
}

class CudaSumOfSquaresTest : public CudaKernelTest {};

TEST_F(CudaSumOfSquaresTest, IsExactToF64AndTheSameEveryTime) {
  for (const int64_t n : {0, 1, 255, 32768, 32769, 100000}) {
    const std::vector<float> x = RandomFloats(n, 15);
    double expected = 0;
    for (const double v : x) expected += v * v;
    const double sum = SquaresOf(x);
    EXPECT_NEAR(sum, expected, Tolerance(kEpsilonF64, n, expected));
    EXPECT_EQ(sum, SquaresOf(x));
  }
}

TEST_F(CudaSumOfSquaresTest, NanAndInfinityShow) {
  std::vector<float> x = RandomFloats(40000, 16);
  x[39999] = kInf;
  EXPECT_EQ(SquaresOf(x), kInf);
  x[5] = kNan;
  EXPECT_TRUE(std::isnan(SquaresOf(x)));
}

}  // namespace
}  // namespace weft::kernels::cuda
