// Compares the products by panels with the plain f64 loop of
// tests/kernels/cpu/reference.h, for every instruction set that this processor
// has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "tests/kernels/cpu/kernel_test.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cpu::panel_product_test {
namespace {

// The gap between the rows of every matrix reveals a wrong stride.
constexpr int64_t kGap = 5;
constexpr float kUntouched = -77;

// A matrix with gaps between its rows. If it is transposed, the gaps are
// between its columns.
struct Stored {
  std::vector<float> data;
  int64_t row_stride;
  int64_t column_stride;
};

Stored Store(const std::vector<float>& values, int64_t rows, int64_t columns,
             bool transposed) {
  Stored stored{.row_stride = transposed ? 1 : columns + kGap,
                .column_stride = transposed ? rows + kGap : 1};
  stored.data.assign(
      transposed ? columns * (rows + kGap) : rows * (columns + kGap),
      std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      stored.data[r * stored.row_stride + c * stored.column_stride] =
          values[r * columns + c];
    }
  }
  return stored;
}

// left [M, K], right [K, N].
struct Problem {
  int64_t rows, terms, columns;
  std::vector<float> left, right;

  Problem(int64_t m, int64_t k, int64_t n)
      : rows(m),
        terms(k),
        columns(n),
        left(RandomValues(m * k, 1)),
        right(RandomValues(k * n, 2)) {}
};

// How the matrices are stored.
struct Form {
  bool left_transposed = false;
  bool right_transposed = false;  // REQUIRES: panels is true.
  bool panels = true;
};

constexpr Form kForms[] = {{false, false, true},
                           {false, true, true},
                           {true, false, true},
                           {true, false, false}};

class PanelProductTest : public KernelTest {
 protected:
  // Returns `out` [M, N + kGap]. Before the product, it is full of kUntouched.
  std::vector<float> Run(const Problem& problem, const Form& form,
                         float scale = 1, bool adds = false) const {
    const Stored left =
        Store(problem.left, problem.rows, problem.terms, form.left_transposed);
    const Stored right = Store(problem.right, problem.terms, problem.columns,
                               form.right_transposed);
    std::vector<float> panels(PanelFloats(problem.terms, problem.columns));
    if (form.panels) {
      table_->copy_panels({.from_KN = right.data.data(),
                           .k_stride = right.row_stride,
                           .n_stride = right.column_stride,
                           .num_terms = problem.terms,
                           .num_columns = problem.columns,
                           .panels = panels.data()});
    }
    const int64_t out_stride = problem.columns + kGap;
    std::vector<float> out(problem.rows * out_stride, kUntouched);
    table_->panel_product(
        {.left_MK = left.data.data(),
         .m_stride = left.row_stride,
         .k_stride = left.column_stride,
         .right_KN = form.panels ? panels.data() : right.data.data(),
         .right_stride = form.panels ? 0 : right.row_stride,
         .num_rows = problem.rows,
         .num_terms = problem.terms,
         .num_columns = problem.columns,
         .scale = scale,
         .adds = adds,
         .out_MN = out.data(),
         .out_stride = out_stride});
    return out;
  }
};

TEST_P(PanelProductTest, MatchesTheReference) {
  for (const int64_t rows : {1, 2, 3, 4, 7, 8, 15, 17}) {
    for (const int64_t terms : {1, 3, 4, 9, 64, 255, 257, 600}) {
      for (const int64_t columns : {1, 3, 4, 8, 15, 16, 17, 33, 48, 64, 101}) {
        const Problem problem(rows, terms, columns);
        const std::vector<double> expected =
            reference::Product(problem.left, problem.right, rows, columns);
        const double tolerance = Tolerance(kEpsilonF32, terms, 10);
        for (const Form& form : kForms) {
          const std::vector<float> out = Run(problem, form);
          for (int64_t i = 0; i < rows * (columns + kGap); ++i) {
            const int64_t m = i / (columns + kGap), n = i % (columns + kGap);
            if (n >= columns) {
              ASSERT_EQ(out[i], kUntouched);
            } else {
              ASSERT_NEAR(out[i], expected[m * columns + n], tolerance)
                  << rows << " x " << terms << " x " << columns << ", row " << m
                  << " column " << n;
            }
          }
        }
      }
    }
  }
}

TEST_P(PanelProductTest, ScalesTheProductAndAddsToWhatIsThere) {
  for (const int64_t terms : {5, 300}) {
    const Problem problem(11, terms, 37);
    const std::vector<double> product =
        reference::Product(problem.left, problem.right, 11, 37);
    for (const Form& form : kForms) {
      const std::vector<float> out =
          Run(problem, form, /*scale=*/0.5F, /*adds=*/true);
      for (int64_t i = 0; i < 11 * 37; ++i) {
        EXPECT_NEAR(out[i / 37 * (37 + kGap) + i % 37],
                    kUntouched + 0.5 * product[i],
                    Tolerance(kEpsilonF32, terms, 100));
      }
    }
  }
}

// Adapters rely on this: an element has the same bits, however the rows and
// columns are divided among products.
TEST_P(PanelProductTest, AnElementIsTheSameToTheBitInEveryProduct) {
  const Problem all(17, 300, 53);
  const std::vector<float> whole =
      Run(all, kForms[0], /*scale=*/0.3F, /*adds=*/true);
  for (const Form& form : kForms) {
    ASSERT_EQ(Run(all, form, 0.3F, true), whole);
  }
  for (int64_t rows = 1; rows <= all.rows; ++rows) {
    for (int64_t columns = 1; columns <= all.columns; columns += 4) {
      Problem part(rows, all.terms, columns);
      part.left.assign(all.left.begin(), all.left.begin() + rows * all.terms);
      for (int64_t k = 0; k < all.terms; ++k) {
        for (int64_t n = 0; n < columns; ++n) {
          part.right[k * columns + n] = all.right[k * all.columns + n];
        }
      }
      const std::vector<float> out = Run(part, kForms[0], 0.3F, true);
      for (int64_t i = 0; i < rows * columns; ++i) {
        const int64_t m = i / columns, n = i % columns;
        ASSERT_EQ(out[m * (columns + kGap) + n],
                  whole[m * (all.columns + kGap) + n])
            << rows << " rows, " << columns << " columns";
      }
    }
  }
}

TEST_P(PanelProductTest, NanStaysInItsRowAndColumn) {
  Problem problem(9, 21, 19);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  problem.left[2 * 21 + 20] = nan;
  problem.right[3 * 19 + 18] = nan;
  for (const Form& form : kForms) {
    const std::vector<float> out = Run(problem, form);
    for (int64_t m = 0; m < 9; ++m) {
      for (int64_t n = 0; n < 19; ++n) {
        EXPECT_EQ(std::isnan(out[m * (19 + kGap) + n]), m == 2 || n == 18);
      }
    }
  }
}

// Gradients rely on this: a sum over rows has the same bits, however the rows
// are cut into batches.
TEST_P(PanelProductTest, ASumInOrderIsTheSameToTheBitHoweverItIsCut) {
  for (const auto& [rows, terms, columns] :
       {std::tuple{9, 700, 53}, {16, 300, 96}, {5, 37, 7}}) {
    const Problem problem(rows, terms, columns);
    const auto run = [&, rows = rows,
                      columns = columns](const std::vector<int64_t>& cuts) {
      std::vector<float> out = RandomValues(rows * columns, 9);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        table_->panel_product(
            {.left_MK = problem.left.data() + cuts[i],
             .m_stride = problem.terms,
             .right_KN = problem.right.data() + cuts[i] * columns,
             .right_stride = columns,
             .num_rows = rows,
             .num_terms = cuts[i + 1] - cuts[i],
             .num_columns = columns,
             .adds = true,
             .in_order = true,
             .out_MN = out.data(),
             .out_stride = columns});
      }
      return out;
    };
    const std::vector<float> whole = run({0, terms});
    EXPECT_EQ(run({0, 1, 20, terms}), whole);
    EXPECT_EQ(run({0, terms / 2, terms - 1, terms}), whole);
    const std::vector<double> product =
        reference::Product(problem.left, problem.right, rows, columns);
    const std::vector<float> before = RandomValues(rows * columns, 9);
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(whole[i], before[i] + product[i],
                  Tolerance(kEpsilonF32, terms, 100));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, PanelProductTest, kEveryIsa,
                         CaseOfIsa);

}  // namespace
}  // namespace weft::kernels::cpu::panel_product_test
