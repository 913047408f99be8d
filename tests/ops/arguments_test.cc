// Tests that ops refuse an argument that does not fit, and name it in the
// error. The kernels take raw pointers, so they cannot check shapes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "src/ops/gated_product.h"
#include "src/ops/paged_attention.h"
#include "src/ops/vocab_rows.h"

namespace weft::ops {
namespace {

using ::testing::StartsWith;

// Returns the message of the c10::Error that `call` throws; empty if it throws
// none.
std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Returns the same values with a gap after each column in memory.
at::Tensor Strided(const at::Tensor& x) {
  return at::stack({x, x}, -1).select(-1, 0);
}

struct PagedCase {
  at::Tensor q = at::ones({2, 6, 8});
  at::Tensor k = at::ones({3, 4, 2, 8});
  at::Tensor v = at::ones({3, 4, 2, 8});
  at::Tensor table = at::zeros({2, 3}, at::kInt);
  at::Tensor lengths = at::ones({2}, at::kInt);
  at::Tensor out = at::empty({2, 6, 8});

  std::string Error() {
    return ErrorOf(
        [&] { PagedAttention(q, k, v, table, lengths, {.scale = 1}, out); });
  }
};

TEST(ArgumentsTest, PagedAttentionNamesTheOneThatDoesNotFit) {
  const auto error = [](at::Tensor PagedCase::*member,
                        const at::Tensor& value) {
    PagedCase changed;
    changed.*member = value;
    return changed.Error();
  };
  EXPECT_EQ(PagedCase().Error(), "");
  const PagedCase good;
  EXPECT_EQ(error(&PagedCase::table, Strided(good.table)), "");
  EXPECT_THAT(error(&PagedCase::q, at::ones({2, 48})),
              StartsWith("paged attention wants q_BHC"));
  EXPECT_THAT(error(&PagedCase::q, at::ones({2, 5, 8})),
              StartsWith("q_BHC has 5 heads"));
  EXPECT_THAT(error(&PagedCase::k, at::ones({3, 4, 2, 7})),
              StartsWith("k_pages_PSKC is Float [3, 4, 2, 7] on cpu, wanted "
                         "Float [3, 4, 2, 8] on cpu"));
  EXPECT_THAT(error(&PagedCase::k, good.k.to(at::kDouble)),
              StartsWith("k_pages_PSKC is Double"));
  EXPECT_THAT(error(&PagedCase::k, Strided(good.k)),
              StartsWith("k_pages_PSKC is not contiguous"));
  EXPECT_THAT(error(&PagedCase::v, at::ones({2, 4, 2, 8})),
              StartsWith("v_pages_PSKC is Float [2"));
  EXPECT_THAT(error(&PagedCase::table, good.table.to(at::kLong)),
              StartsWith("page_table_BL is Long"));
  EXPECT_THAT(error(&PagedCase::table, at::zeros({1, 3}, at::kInt)),
              StartsWith("page_table_BL is Int [1, 3]"));
  EXPECT_THAT(error(&PagedCase::lengths, at::ones({3}, at::kInt)),
              StartsWith("lengths_B is Int [3]"));
  EXPECT_THAT(error(&PagedCase::out, Strided(good.out)),
              StartsWith("out_BHC is not contiguous"));
  EXPECT_THAT(error(&PagedCase::out, at::Tensor()),
              StartsWith("out_BHC is undefined"));
  EXPECT_THAT(
      error(&PagedCase::lengths,
            at::ones({2}, at::TensorOptions(at::kMeta).dtype(at::kInt))),
      StartsWith("lengths_B is Int [2] on meta, wanted Int [2] on cpu"));
}

TEST(ArgumentsTest, GatedProductNamesTheOneThatDoesNotFit) {
  const auto forward = [](const at::Tensor& gate_up) {
    return ErrorOf([&] { (void)GatedProduct(Activation::kSilu, gate_up); });
  };
  const auto backward = [](at::Tensor gate_up, const at::Tensor& dout) {
    return ErrorOf(
        [&] { GatedProductBackward(Activation::kSilu, dout, gate_up); });
  };
  const at::Tensor wide = at::ones({3, 8}), narrow = at::ones({3, 4});
  EXPECT_EQ(forward(wide), "");
  EXPECT_EQ(backward(wide.clone(), narrow), "");
  EXPECT_THAT(forward(at::ones({3, 7})), StartsWith("gate_up_T2F is"));
  EXPECT_THAT(forward(Strided(wide)),
              StartsWith("gate_up_T2F is not contiguous"));
  EXPECT_THAT(backward(wide.clone(), narrow.to(at::kBFloat16)),
              StartsWith("dout_TF is BFloat16"));
  EXPECT_THAT(backward(wide.clone(), at::ones({2, 4})),
              StartsWith("dout_TF is Float [2, 4]"));
}

struct VocabCase {
  at::Tensor logits = at::randn({2, 9});
  at::Tensor row_offsets = at::arange(3);
  at::Tensor targets = at::zeros({2}, at::kLong);
  at::Tensor temperature = at::ones({2});
  at::Tensor logprobs = at::empty({2});
  at::Tensor entropy = at::empty({2});

  std::string Error() {
    return ErrorOf([&] {
      VocabRows(logits, {row_offsets, targets, temperature}, false, logprobs,
                entropy);
    });
  }
};

TEST(ArgumentsTest, VocabRowsNamesTheOneThatDoesNotFit) {
  const auto error = [](at::Tensor VocabCase::*member,
                        const at::Tensor& value) {
    VocabCase changed;
    changed.*member = value;
    return changed.Error();
  };
  EXPECT_EQ(VocabCase().Error(), "");
  EXPECT_EQ(error(&VocabCase::entropy, at::Tensor()), "");
  const VocabCase good;
  EXPECT_THAT(error(&VocabCase::logits, at::ones({18})),
              StartsWith("vocab_rows wants logits_RV"));
  EXPECT_THAT(error(&VocabCase::logits, Strided(good.logits)),
              StartsWith("logits_RV is not contiguous"));
  EXPECT_THAT(error(&VocabCase::row_offsets, at::arange(4)),
              StartsWith("row_offsets is Long [4]"));
  EXPECT_THAT(error(&VocabCase::targets, good.targets.to(at::kInt)),
              StartsWith("targets_E is Int"));
  EXPECT_THAT(error(&VocabCase::temperature, at::ones({3})),
              StartsWith("temperature_R is Float [3]"));
  EXPECT_THAT(error(&VocabCase::logprobs, at::empty({1})),
              StartsWith("logprobs_E is Float [1]"));
  EXPECT_THAT(error(&VocabCase::entropy, Strided(good.entropy)),
              StartsWith("entropy_R is not contiguous"));
}

}  // namespace
}  // namespace weft::ops
