#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "src/ops/small_products.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::panel_multiplier_test {
namespace {

// Sizes near the edges of the kernels' blocks: tiles of 4 or 8 rows, parts of
// 256 terms, panels of 3 vectors of 4, 8 or 16 columns.
constexpr int64_t kRows[] = {1, 4, 5, 8, 9};
constexpr int64_t kTerms[] = {1, 7, 256, 513};
constexpr int64_t kColumns[] = {1,  3,  4,  11, 12, 13, 16, 17,
                                23, 24, 25, 47, 48, 49, 96, 97};

enum class Layout : uint8_t { kRowMajor, kTransposed, kSpread };

// Returns x [rows, columns] as a part of a larger matrix.
at::Tensor Stored(int64_t rows, int64_t columns, Layout layout) {
  switch (layout) {
    case Layout::kTransposed:
      return at::randn({columns, rows + 5}).narrow(1, 2, rows).t();
    case Layout::kSpread:  // No stride is 1.
      return at::randn({rows, columns, 3}).select(2, 1);
    case Layout::kRowMajor:
      break;
  }
  return at::randn({rows, columns + 5}).narrow(1, 2, columns);
}

at::Tensor Product(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a.to(at::kDouble), b.to(at::kDouble));
}

// Returns the error bound of the product a b. No partial sum exceeds |a| |b|.
double ToleranceOf(const at::Tensor& a, const at::Tensor& b) {
  return Tolerance(kEpsilonF32, a.size(1),
                   Product(a.abs(), b.abs()).max().item<double>());
}

// Overwrites a part of a matrix with 0.5 a b and then adds 0.5 a b to it.
void ExpectProducts(PanelMultiplier* multiplier, const at::Tensor& a,
                    const at::Tensor& b) {
  const int64_t columns = b.size(1);
  const at::Tensor expected = 0.5 * Product(a, b);
  const double tolerance = ToleranceOf(a, b);
  const at::Tensor whole = at::full({a.size(0), columns + 2}, 3.0F);
  const at::Tensor out = whole.narrow(1, 1, columns);
  multiplier->Multiply(out, a, b, /*adds=*/false, 0.5);
  EXPECT_LE(MaxDifference(out, expected), tolerance);
  multiplier->Multiply(out, a, b, /*adds=*/true, 0.5);
  EXPECT_LE(MaxDifference(out, 2 * expected), tolerance);
  EXPECT_TRUE((whole.select(1, 0) == 3).all().item<bool>());
  EXPECT_TRUE((whole.select(1, columns + 1) == 3).all().item<bool>());
}

TEST(PanelMultiplierTest, ProductsOfAllSizesAndLayoutsAreThoseOfF64) {
  at::manual_seed(1);
  PanelMultiplier multiplier;  // Keeps its buffer from product to product.
  for (const int64_t m : kRows) {
    for (const int64_t k : kTerms) {
      for (const int64_t n : kColumns) {
        for (const Layout a :
             {Layout::kRowMajor, Layout::kTransposed, Layout::kSpread}) {
          for (const Layout b : {Layout::kRowMajor, Layout::kTransposed}) {
            SCOPED_TRACE(::testing::Message()
                         << m << " x " << k << " x " << n << ", layouts "
                         << static_cast<int>(a) << static_cast<int>(b));
            ExpectProducts(&multiplier, Stored(m, k, a), Stored(k, n, b));
          }
        }
      }
    }
  }
}

TEST(PanelMultiplierTest, RowsOfTheLeftMatrixMayBeOneRow) {
  at::manual_seed(2);
  PanelMultiplier multiplier;
  ExpectProducts(&multiplier, at::randn({1, 70}).expand({9, 70}),
                 Stored(70, 49, Layout::kRowMajor));
}

TEST(PanelMultiplierTest, BitsDoNotDependOnOtherRowsOrColumns) {
  at::manual_seed(3);
  const at::Tensor a = Stored(9, 300, Layout::kRowMajor);
  const at::Tensor b = Stored(300, 53, Layout::kTransposed);
  PanelMultiplier multiplier;
  const at::Tensor whole = at::empty({9, 53});
  multiplier.Multiply(whole, a, b, /*adds=*/false, 0.3);
  for (const int64_t m : {1, 3, 8}) {
    for (const int64_t n : {1, 12, 48, 49}) {
      const at::Tensor part = at::empty({m, n});
      multiplier.Multiply(part, a.narrow(0, 1, m), b.narrow(1, 4, n),
                          /*adds=*/false, 0.3);
      EXPECT_TRUE(at::equal(part, whole.narrow(0, 1, m).narrow(1, 4, n)))
          << m << " rows, " << n << " columns";
    }
  }
}

}  // namespace
}  // namespace weft::ops::panel_multiplier_test
