// Compares HeadGradient with its formula in f64.
#include "kernels/cuda/head_gradient.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

class CudaHeadGradientTest : public CudaDtypeTest {};

// The four rows have one, no, three and two entries. The hidden sizes make the
// kernel read single elements or packs. 4096 is the size of a served model.
TEST_P(CudaHeadGradientTest, MatchesTheFormula) {
  constexpr int64_t kVocab = 7;
  const std::vector<int64_t> offsets = {0, 1, 1, 4, 6};
  const std::vector<int64_t> targets = {6, 0, 3, 3, 1, 6};
  const std::vector<float> factor = RandomFloats(4, 1);
  const std::vector<float> scale = RandomFloats(4, 2);
  const std::vector<float> coefficient = RandomFloats(6, 3);
  for (const int64_t hidden : {1, 33, 576, 4096}) {
    const std::vector<float> projection = RandomFloats(4 * hidden, 4);
    const std::vector<float> weight =
        Rounded(GetParam(), RandomFloats(kVocab * hidden, 5));
    const DeviceBuffer<int64_t> offsets_device(offsets),
        targets_device(targets);
    const DeviceBuffer<float> factor_device(factor), scale_device(scale),
        coefficient_device(coefficient), projection_device(projection);
    const DeviceArray weight_device(GetParam(), weight);
    const DeviceArray out(GetParam(), projection);
    ASSERT_EQ(HeadGradient({.dtype = GetParam(),
                            .num_rows = 4,
                            .hidden = hidden,
                            .projection_RH = projection_device.data(),
                            .factor_R = factor_device.data(),
                            .scale_R = scale_device.data(),
                            .row_offsets = offsets_device.data(),
                            .targets_E = targets_device.data(),
                            .coefficient_E = coefficient_device.data(),
                            .weight_VH = weight_device.data(),
                            .out_RH = out.data()},
                           nullptr),
              cudaSuccess);
    const std::vector<float> actual = out.Read();
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t i = 0; i < hidden; ++i) {
        double expected = static_cast<double>(factor[r]) * scale[r] *
                          projection[r * hidden + i];
        for (int64_t e = offsets[r]; e < offsets[r + 1]; ++e) {
          expected += static_cast<double>(coefficient[e]) *
                      weight[targets[e] * hidden + i];
        }
        ASSERT_NEAR(actual[r * hidden + i], expected,
                    StoredTolerance(EpsilonOf(GetParam()), 4, 8, expected));
      }
    }
  }
}

TEST_P(CudaHeadGradientTest, NoRowsAreNoError) {
  EXPECT_EQ(HeadGradient({.dtype = GetParam(), .hidden = 4}, nullptr),
            cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaHeadGradientTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

}  // namespace
}  // namespace weft::kernels::cuda
