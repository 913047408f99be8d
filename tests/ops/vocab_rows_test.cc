#include "src/ops/vocab_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/support/tolerance.h"

namespace weft::ops::vocab_rows_test {
namespace {

struct Result {
  at::Tensor logprobs;
  at::Tensor entropy;
  at::Tensor buffer;
};

// Row r has r % 4 entries, because a row may have several targets or none.
VocabRowsInput MakeInput(int64_t rows, int64_t vocab, double softcap) {
  std::vector<int64_t> offsets = {0}, targets;
  std::vector<float> temperatures;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < r % 4; ++i) {
      targets.push_back((r * 31 + i * 17) % vocab);
    }
    offsets.push_back(static_cast<int64_t>(targets.size()));
    temperatures.push_back(0.5F + 0.25F * static_cast<float>(r % 5));
  }
  return {at::tensor(offsets, at::kLong), at::tensor(targets, at::kLong),
          at::tensor(temperatures, at::kFloat), softcap};
}

Result RunVocabRows(const at::Tensor& logits, const VocabRowsInput& input,
                    bool softmax_in_place) {
  Result result{at::empty({input.targets_E.numel()}, logits.options()),
                at::empty({logits.size(0)}, logits.options()), logits.clone()};
  VocabRows(result.buffer, input, softmax_in_place, result.logprobs,
            result.entropy);
  return result;
}

// Computes log_softmax and the other results in f64.
Result Dense(const at::Tensor& logits, const VocabRowsInput& input) {
  const at::Tensor x = logits.to(at::kDouble);
  const at::Tensor temperature =
      input.temperature_R.to(at::kDouble).unsqueeze(1);
  const double cap = input.softcap;
  const at::Tensor tanh = cap > 0 ? (x / cap).tanh() : at::zeros_like(x);
  const at::Tensor z = (cap > 0 ? cap * tanh : x) / temperature;
  const at::Tensor log_p = z.log_softmax(1);
  const at::Tensor rows = at::repeat_interleave(input.row_offsets.diff());
  return {log_p.index({rows, input.targets_E}), -(log_p.exp() * log_p).sum(1),
          log_p.exp() * (1 - tanh.square())};
}

using Case = std::tuple<at::ScalarType, int64_t, int64_t, double>;
class VocabRowsTest : public ::testing::TestWithParam<Case> {};

TEST_P(VocabRowsTest, MatchesDenseLogSoftmax) {
  const auto [dtype, rows, vocab, softcap] = GetParam();
  at::manual_seed(4);
  const at::Tensor logits = at::randn({rows, vocab}, dtype) * 8;
  const VocabRowsInput input = MakeInput(rows, vocab, softcap);
  const Result expected = Dense(logits, input);
  const double epsilon = dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32;
  // In f64, the oracle's sums have rounding errors, too, as large as those of
  // the tested sums.
  const int64_t terms = dtype == at::kDouble ? vocab : 1;
  const double tolerance = Tolerance(epsilon, terms, 100);
  for (bool in_place : {false, true}) {
    const Result actual = RunVocabRows(logits, input, in_place);
    EXPECT_TRUE(at::allclose(actual.logprobs.to(at::kDouble), expected.logprobs,
                             0, tolerance));
    EXPECT_TRUE(at::allclose(actual.entropy.to(at::kDouble), expected.entropy,
                             0, tolerance));
    if (in_place) {
      EXPECT_TRUE(at::allclose(actual.buffer.to(at::kDouble), expected.buffer,
                               0, tolerance));
    } else {
      EXPECT_TRUE(at::equal(actual.buffer, logits));
    }
  }
}

std::string CaseName(
    const ::testing::TestParamInfo<VocabRowsTest::ParamType>& test) {
  const auto& [dtype, rows, vocab, softcap] = test.param;
  return absl::StrCat(c10::toString(dtype), "_Rows", rows, "_Vocab", vocab,
                      "_Softcap", softcap);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, VocabRowsTest,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble),
                       ::testing::Values(0, 1, 9),
                       ::testing::Values(1, 37, 4096, 10007),
                       ::testing::Values(0.0, 30.0)),
    CaseName);

TEST(VocabRowsNanTest, StaysInItsRow) {
  at::Tensor logits = at::randn({5, 5000});
  const VocabRowsInput input = MakeInput(5, 5000, 0);
  const Result clean = RunVocabRows(logits, input, true);
  logits[3][4999] = std::nan("");
  const Result actual = RunVocabRows(logits, input, true);
  EXPECT_TRUE(actual.buffer[3].isnan().all().item<bool>());
  EXPECT_TRUE(actual.entropy[3].isnan().item<bool>());
  for (int64_t row : {0, 1, 2, 4}) {
    EXPECT_TRUE(at::equal(actual.buffer[row], clean.buffer[row]));
    EXPECT_TRUE(at::equal(actual.entropy[row], clean.entropy[row]));
  }
  // Rows 1 and 2 own the entries 0..2, row 3 owns 3..5.
  EXPECT_TRUE(at::equal(actual.logprobs.narrow(0, 0, 3),
                        clean.logprobs.narrow(0, 0, 3)));
  EXPECT_TRUE(actual.logprobs.narrow(0, 3, 3).isnan().all().item<bool>());
}

TEST(VocabRowsEntropyTest, MayBeLeftOut) {
  at::Tensor logits = at::randn({4, 100});
  const VocabRowsInput input = MakeInput(4, 100, 0);
  const Result with = RunVocabRows(logits, input, false);
  at::Tensor logprobs = at::empty_like(with.logprobs), none;
  VocabRows(logits, input, false, logprobs, none);
  EXPECT_TRUE(at::equal(logprobs, with.logprobs));
}

TEST(VocabRowsRefusalTest, WrongNumberOfRowOffsetsThrows) {
  at::Tensor logits = at::randn({4, 10});
  EXPECT_THROW(RunVocabRows(logits, MakeInput(3, 10, 0), false), c10::Error);
}

}  // namespace
}  // namespace weft::ops::vocab_rows_test
