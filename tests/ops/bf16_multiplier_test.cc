#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "kernels/cpu/bf16_product.h"
#include "src/ops/small_products.h"
#include "tests/support/tensors_near.h"

namespace weft::ops {
namespace {

at::Tensor Rounded(const at::Tensor& x) {
  return x.to(at::kBFloat16).to(at::kDouble);
}

// Returns x [rows, columns] as a part of a larger matrix, maybe transposed.
at::Tensor PartOf(int64_t rows, int64_t columns, bool is_transposed) {
  return is_transposed ? at::randn({columns, rows + 5}).narrow(1, 2, rows).t()
                       : at::randn({rows, columns + 5}).narrow(1, 2, columns);
}

// The bounds are those of f32 sums over rounded operands.
TEST(Bf16MultiplierTest, OperandsAreRoundedAndSumsAreF32) {
  if (kernels::cpu::Bf16Kernels() == nullptr) {
    GTEST_SKIP() << "this processor lacks AVX512_BF16";
  }
  at::manual_seed(1);
  Bf16Multiplier multiplier;  // Keeps its buffers from product to product.
  for (const auto& [m, k, n] : {std::array<int64_t, 3>{192, 64, 512},
                                {7, 2051, 70},
                                {130, 33, 65},
                                {1, 1, 1},
                                {64, 191, 64}}) {
    for (const int layout : {0, 1, 2, 3}) {
      SCOPED_TRACE(::testing::Message()
                   << m << " x " << k << " x " << n << ", layout " << layout);
      const at::Tensor a = PartOf(m, k, (layout & 1) != 0);
      const at::Tensor b = PartOf(k, n, (layout & 2) != 0);
      // A power of two scales without another rounding.
      const at::Tensor product = 0.125 * at::mm(Rounded(a), Rounded(b));
      const double tolerance = Tolerance(kEpsilonF32, k, MaxAbs(product));
      const at::Tensor whole = at::full({m, n + 2}, 3.0F);
      const at::Tensor out = whole.narrow(1, 1, n);
      multiplier.Multiply(out, a, b, /*adds=*/true, 0.125);
      EXPECT_LE(MaxDifference(out, product + 3), tolerance + 4 * kEpsilonF32);
      multiplier.Multiply(out, a, b, /*adds=*/false, 0.125);
      EXPECT_LE(MaxDifference(out, product), tolerance);
      EXPECT_TRUE((whole.select(1, 0) == 3).all().item<bool>());
      EXPECT_TRUE((whole.select(1, n + 1) == 3).all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace weft::ops
