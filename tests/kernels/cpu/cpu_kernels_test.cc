// Compares every kernel with the plain f64 loops of
// tests/kernels/cpu/reference.h, for every instruction set that this processor
// has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "tests/kernels/cpu/kernel_test.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cpu::cpu_kernels_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void ExpectNear(const std::vector<float>& actual,
                const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
  }
}

using CpuKernelsTest = KernelTest;

// Lengths around the vector widths, the unrolled strides and the vocabulary's
// blocks.
const std::vector<size_t> kLengths = {1,  2,  7,  15, 16, 17,  31,
                                      33, 63, 64, 65, 96, 127, 577};

TEST_P(CpuKernelsTest, ExpIsWithinTwoUnitsInTheLastPlace) {
  std::vector<float> x;
  for (int i = 0; i <= 200000; ++i) {
    x.push_back(-87.33F + static_cast<float>(i) * (175.7F / 200000));
  }
  std::vector<float> y(x.size());
  table_->exp(x.data(), static_cast<int64_t>(x.size()), y.data());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    int exponent = 0;
    std::frexp(exact, &exponent);
    const double ulp = std::ldexp(1.0, exponent - 24);
    worst = std::max(worst, std::abs(y[i] - exact) / ulp);
  }
  EXPECT_LE(worst, 2.0);
}

TEST_P(CpuKernelsTest, ExpIsRightAtTheEndsOfItsRange) {
  const std::vector<float> x = {-kInf, -1e30F, -88, 0, 89, 1e30F, kInf, kNan};
  std::vector<float> y(x.size());
  table_->exp(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(std::vector<float>(y.begin(), y.end() - 1),
            (std::vector<float>{0, 0, 0, 1, kInf, kInf, kInf}));
  EXPECT_TRUE(std::isnan(y.back()));
}

TEST_P(CpuKernelsTest, RmsNormAndItsBackwardMatchTheReference) {
  for (size_t n : kLengths) {
    const std::vector<float> x = RandomValues(n, 1), w = RandomValues(n, 2);
    const std::vector<float> dy = RandomValues(n, 3),
                             before = RandomValues(n, 4);
    const auto count = static_cast<int64_t>(n);
    std::vector<float> y(n), dx = before;
    table_->rms_norm_row(x.data(), w.data(), count, 1e-5F, y.data());
    ExpectNear(y, reference::RmsNormRow(x, w, 1e-5),
               Tolerance(kEpsilonF32, count, 10));
    table_->rms_norm_backward_row(dy.data(), x.data(), w.data(), count, 1e-5F,
                                  dx.data());
    std::vector<double> expected =
        reference::RmsNormBackwardRow(dy, x, w, 1e-5);
    // With one feature, x / |x| has no slope, so terms of size dy / x cancel.
    double scale = 10;
    for (float v : x) scale = std::max(scale, n == 1 ? 10.0 / std::abs(v) : 0);
    for (size_t i = 0; i < n; ++i) expected[i] += before[i];
    ExpectNear(dx, expected, Tolerance(kEpsilonF32, count, scale));
  }
}

TEST_P(CpuKernelsTest, RotaryMatchesTheReferenceAndInverts) {
  for (size_t half : kLengths) {
    const std::vector<float> x = RandomValues(2 * half, 5);
    std::vector<float> cos(half), sin(half);
    for (size_t c = 0; c < half; ++c) {
      const double angle = 0.37 * static_cast<double>(c);
      cos[c] = static_cast<float>(std::cos(angle));
      sin[c] = static_cast<float>(std::sin(angle));
    }
    std::vector<float> y = x;
    const auto count = static_cast<int64_t>(half);
    table_->rotary_head(y.data(), cos.data(), sin.data(), count, false);
    ExpectNear(y, reference::RotaryHead(x, cos, sin, false),
               Tolerance(kEpsilonF32, 2, 5));
    table_->rotary_head(y.data(), cos.data(), sin.data(), count, true);
    ExpectNear(y, {x.begin(), x.end()}, Tolerance(kEpsilonF32, 4, 5));
  }
}

using GatedRow = void (*)(const float*, const float*, int64_t, float*);
using GatedBackwardRow = void (*)(const float*, int64_t, float*, float*);

// The bounds of the output, of the gate's gradient and of up's gradient.
struct GatedBounds {
  double out;
  double gate;
  double up;
};

template <typename Reference, typename ReferenceBackward>
void CheckGated(GatedRow row, GatedBackwardRow backward, Reference reference,
                ReferenceBackward reference_backward, std::vector<float> gate,
                std::vector<float> up, const GatedBounds& bounds) {
  const std::vector<float> dout = RandomValues(gate.size(), 8);
  const auto count = static_cast<int64_t>(gate.size());
  std::vector<float> out(gate.size());
  row(gate.data(), up.data(), count, out.data());
  ExpectNear(out, reference(gate, up), Tolerance(kEpsilonF32, 1, bounds.out));
  const auto expected = reference_backward(dout, gate, up);
  backward(dout.data(), count, gate.data(), up.data());
  ExpectNear(gate, expected.gate, Tolerance(kEpsilonF32, 1, bounds.gate));
  ExpectNear(up, expected.up, Tolerance(kEpsilonF32, 1, bounds.up));
}

// Returns random gates. The first two have extreme values.
std::vector<float> Gates(size_t n) {
  std::vector<float> gate = RandomValues(n, 6, 4);
  gate[0] = -200;
  if (n > 1) gate[1] = 200;
  return gate;
}

TEST_P(CpuKernelsTest, SwiGluAndItsBackwardMatchTheReference) {
  for (size_t n : kLengths) {
    CheckGated(table_->swiglu_row, table_->swiglu_backward_row,
               reference::SwiGluRow, reference::SwiGluBackwardRow, Gates(n),
               RandomValues(n, 7), {200, 200, 400});
  }
}

TEST_P(CpuKernelsTest, GeGluAndItsBackwardMatchTheReference) {
  for (size_t n : kLengths) {
    CheckGated(table_->geglu_row, table_->geglu_backward_row,
               reference::GeGluRow, reference::GeGluBackwardRow, Gates(n),
               RandomValues(n, 7), {200, 200, 400});
  }
}

TEST_P(CpuKernelsTest, ClampedSwiGluAndItsBackwardMatchTheReference) {
  for (size_t n : kLengths) {
    std::vector<float> gate = Gates(n), up = RandomValues(n, 7, 6);
    if (n > 2) gate[2] = up[2] = 7;
    CheckGated(table_->clamped_swiglu_row, table_->clamped_swiglu_backward_row,
               reference::ClampedSwiGluRow, reference::ClampedSwiGluBackwardRow,
               gate, up, {60, 60, 60});
  }
}

struct VocabCase {
  size_t vocab;
  float softcap;
  float temperature;
};

class VocabRowTest {
 public:
  VocabRowTest(const KernelTable& table, const VocabCase& c)
      : options_{.softcap = c.softcap, .temperature = c.temperature},
        logits_(RandomValues(c.vocab, 9, 6)),
        table_(table) {
    // Only the last block has this maximum, so that earlier sums must be
    // rescaled.
    logits_[c.vocab - 1] = 40;
    targets_ = {0, static_cast<int64_t>(c.vocab - 1),
                static_cast<int64_t>(c.vocab / 2)};
  }

  void ExpectMatchesReference(bool write, bool want_entropy) {
    const reference::VocabRow expected = reference::ScoreVocabRow(
        logits_, options_.softcap, options_.temperature);
    std::vector<float> row = logits_;
    std::vector<float> logprobs(targets_.size());
    float entropy = -1;
    options_.write_softmax = write;
    const auto vocab = static_cast<int64_t>(row.size());
    table_.vocab_row(row.data(), vocab, options_, targets_.data(),
                     static_cast<int64_t>(targets_.size()), logprobs.data(),
                     want_entropy ? &entropy : nullptr);
    const double magnitude = 80 / std::min(1.0F, options_.temperature);
    for (size_t i = 0; i < targets_.size(); ++i) {
      ASSERT_NEAR(logprobs[i], expected.logprobs[targets_[i]],
                  Tolerance(kEpsilonF32, 1, magnitude));
    }
    if (want_entropy) {
      ASSERT_NEAR(entropy, expected.entropy,
                  Tolerance(kEpsilonF32, 1, magnitude));
    }
    if (!write) {
      ASSERT_EQ(row, logits_);
    } else {
      ExpectNear(row, expected.softmax, Tolerance(kEpsilonF32, 1, magnitude));
    }
  }

 private:
  VocabRowOptions options_;
  std::vector<float> logits_;
  std::vector<int64_t> targets_;
  const KernelTable& table_;
};

TEST_P(CpuKernelsTest, VocabRowMatchesTheReference) {
  for (size_t vocab : {1, 5, 16, 65, 4095, 4096, 4097, 9001, 49152}) {
    for (float softcap : {0.0F, 30.0F}) {
      for (float temperature : {1.0F, 0.7F, 2.5F}) {
        VocabRowTest test(*table_, {vocab, softcap, temperature});
        for (bool write : {false, true}) {
          test.ExpectMatchesReference(write, false);
          test.ExpectMatchesReference(write, true);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CpuKernelsTest, MaskedLogitsHaveProbabilityZero) {
  std::vector<float> row(9000, -kInf);
  row[10] = 1;
  row[8999] = 1;
  const std::vector<int64_t> targets = {10, 0};
  std::vector<float> logprobs(2);
  float entropy = 0;
  table_->vocab_row(row.data(), 9000, {.write_softmax = true}, targets.data(),
                    2, logprobs.data(), &entropy);
  EXPECT_NEAR(logprobs[0], -std::log(2.0), 1e-6);
  EXPECT_EQ(logprobs[1], -kInf);
  EXPECT_NEAR(entropy, std::log(2.0), 1e-6);
  EXPECT_EQ(row[0], 0);
  EXPECT_NEAR(row[8999], 0.5, 1e-6);
}

TEST_P(CpuKernelsTest, NanAnywhereMakesItsVocabRowNan) {
  for (size_t at : {0, 4097, 8999}) {
    std::vector<float> row = RandomValues(9000, 10);
    row[at] = kNan;
    const int64_t target = 3;
    float logprob = 0, entropy = 0;
    table_->vocab_row(row.data(), 9000, {.write_softmax = true}, &target, 1,
                      &logprob, &entropy);
    EXPECT_TRUE(std::isnan(logprob));
    EXPECT_TRUE(std::isnan(entropy));
    for (float p : row) ASSERT_TRUE(std::isnan(p));
  }
}

// Each operation on the exponent adds a rounding error relative to the
// exponent's size, and e^x is within two units in the last place.
TEST_P(CpuKernelsTest, WeightsOfABlockAreThoseOfF64) {
  constexpr float kFactor = 1.25F;
  for (const size_t n : kLengths) {
    std::vector<float> logits = RandomValues(n, 20, /*scale=*/5);
    if (n > 2) logits[1] = -kInf;
    const auto count = static_cast<int64_t>(n);
    const float max = table_->max_block(logits.data(), count);
    EXPECT_EQ(max, *std::ranges::max_element(logits));
    std::vector<float> weights(n);
    const float sum =
        table_->weigh_block(logits.data(), count, max, kFactor, weights.data());
    double exact_sum = 0;
    for (size_t i = 0; i < n; ++i) {
      const double x =
          (static_cast<double>(logits[i]) - static_cast<double>(max)) * kFactor;
      const double exact = std::exp(x);
      const double bound =
          exact == 0 ? 0 : exact * (2 * std::abs(x) + 4) * kEpsilonF32;
      ASSERT_NEAR(weights[i], exact, bound) << "logit " << i << " of " << n;
      exact_sum += weights[i];
    }
    EXPECT_NEAR(sum, exact_sum, Tolerance(kEpsilonF32, n, exact_sum));
  }
}

TEST_P(CpuKernelsTest, SoftcapsAreThoseOfF64AndOfTheScoredRows) {
  constexpr float kSoftcap = 3;
  for (const size_t n : kLengths) {
    const std::vector<float> logits = RandomValues(n, 21, /*scale=*/5);
    std::vector<float> capped = logits;
    const auto count = static_cast<int64_t>(n);
    const float max =
        table_->softcap_row(capped.data(), count, kSoftcap, capped.data());
    EXPECT_EQ(max, *std::ranges::max_element(capped));
    for (size_t i = 0; i < n; ++i) {
      EXPECT_NEAR(
          capped[i],
          kSoftcap * std::tanh(static_cast<double>(logits[i]) / kSoftcap),
          Tolerance(kEpsilonF32, 4, kSoftcap));
    }
    // A row that is capped first has the bits of one that vocab_row caps.
    std::vector<int64_t> targets(n);
    std::iota(targets.begin(), targets.end(), 0);
    std::vector<float> logprobs(n), expected(n);
    std::vector<float> row = logits;
    table_->vocab_row(row.data(), count,
                      {.softcap = kSoftcap, .temperature = 0.7F},
                      targets.data(), count, expected.data(), nullptr);
    table_->vocab_row(capped.data(), count, {.temperature = 0.7F},
                      targets.data(), count, logprobs.data(), nullptr);
    EXPECT_EQ(logprobs, expected);
  }
}

TEST_P(CpuKernelsTest, TheMaximumOfABlockIsThatOfItsNumbers) {
  const std::vector<float> logits = {kNan, -3, kNan, 2, -kInf, kNan};
  EXPECT_EQ(table_->max_block(logits.data(), 6), 2);
  EXPECT_EQ(table_->max_block(logits.data() + 4, 2),
            std::numeric_limits<float>::lowest());
}

TEST_P(CpuKernelsTest, AdamWMatchesTheReference) {
  const AdamWScalars scalars{.gradient_scale = 0.5F,
                             .beta1 = 0.9F,
                             .one_minus_beta1 = 0.1F,
                             .beta2 = 0.95F,
                             .one_minus_beta2 = 0.05F,
                             .weight_scale = 0.999F,
                             .step_size = 1e-2F,
                             .inverse_sqrt_bias2 = 2.0F,
                             .eps = 1e-8F};
  for (size_t n : kLengths) {
    const std::vector<float> w = RandomValues(n, 11), g = RandomValues(n, 12);
    std::vector<float> m = RandomValues(n, 13), v = RandomValues(n, 14);
    for (float& x : v) x = x * x;
    const reference::AdamWState expected = reference::AdamW(
        scalars,
        {{w.begin(), w.end()}, {m.begin(), m.end()}, {v.begin(), v.end()}}, g);
    std::vector<float> out(n), m_in_place = m, v_in_place = v, in_place = w;
    const auto count = static_cast<int64_t>(n);
    table_->adamw(scalars, count, w.data(), g.data(), m.data(), v.data(),
                  out.data());
    table_->adamw(scalars, count, in_place.data(), g.data(), m_in_place.data(),
                  v_in_place.data(), in_place.data());
    EXPECT_EQ(out, in_place);
    ExpectNear(out, expected.weights, Tolerance(kEpsilonF32, 1, 5));
    ExpectNear(m, expected.moment1, Tolerance(kEpsilonF32, 1, 5));
    ExpectNear(v, expected.moment2, Tolerance(kEpsilonF32, 1, 10));
  }
}

// The last elements of a range take part of a vector.
TEST_P(CpuKernelsTest, SigmoidIsThatOfF64AndTheSameInEveryPlace) {
  std::vector<float> x = RandomValues(83, 4, /*scale=*/20);
  x.insert(x.end(), {-200, -88, 0, 88, 200});
  const auto run = [&](size_t begin, size_t count) {
    std::vector<float> y(count + 1, -77.0F);
    table_->sigmoid_row(x.data() + begin, static_cast<int64_t>(count),
                        y.data());
    EXPECT_EQ(y.back(), -77) << "wrote beyond the row";
    y.pop_back();
    return y;
  };
  const std::vector<float> all = run(0, x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(all[i], 1 / (1 + std::exp(-static_cast<double>(x[i]))),
                Tolerance(kEpsilonF32, 16, 1));
  }
  for (size_t begin = 0; begin + 21 <= x.size(); begin += 5) {
    for (const size_t count : {1, 3, 8, 17, 21}) {
      const auto expected = all.begin() + static_cast<int64_t>(begin);
      EXPECT_EQ(
          run(begin, count),
          std::vector<float>(expected, expected + static_cast<int64_t>(count)));
    }
  }
}

TEST_P(CpuKernelsTest, AddsARow) {
  for (size_t n : kLengths) {
    const std::vector<float> x = RandomValues(n, 16);
    std::vector<float> y = RandomValues(n, 17), expected = y;
    for (size_t i = 0; i < n; ++i) expected[i] += x[i];
    table_->add_row(x.data(), static_cast<int64_t>(n), y.data());
    EXPECT_EQ(y, expected);
  }
}

TEST_P(CpuKernelsTest, SumOfSquaresIsExactToF64) {
  for (size_t n : kLengths) {
    const std::vector<float> x = RandomValues(n, 15);
    double expected = 0;
    for (double v : x) expected += v * v;
    EXPECT_NEAR(table_->sum_of_squares(x.data(), static_cast<int64_t>(n)),
                expected, Tolerance(kEpsilonF64, 577, 600));
  }
}

// Returns the scores, padded with NaN to whole vectors. The padding must not be
// read as scores.
std::vector<float> PaddedRow(const std::vector<float>& row) {
  std::vector<float> padded(
      (row.size() + kSoftmaxPadding - 1) / kSoftmaxPadding * kSoftmaxPadding,
      kNan);
  std::ranges::copy(row, padded.begin());
  return padded;
}

void ExpectSoftmaxRows(const KernelTable& table, size_t n, float softcap) {
  const auto size = static_cast<int64_t>(n);
  const std::vector<float> scores = RandomValues(n, 21, 3);
  const std::vector<float> upstream = RandomValues(n, 22);
  for (const SoftmaxKeys keys :
       {SoftmaxKeys{0, size, size}, SoftmaxKeys{size / 3, size, size},
        SoftmaxKeys{size / 3, (size + 1) / 2, size}}) {
    if (keys.begin >= keys.end) continue;
    const auto expected =
        reference::SoftmaxOfRow(scores, upstream, keys, softcap, 0.3);
    std::vector<float> weights = PaddedRow(scores);
    const SoftmaxSum sum = table.softmax_row(keys, softcap, weights.data());
    EXPECT_NEAR(sum.lse, expected.lse, Tolerance(kEpsilonF32, size, 10));
    weights.resize(n);
    for (float& w : weights) w *= sum.factor;
    ExpectNear(weights, expected.weights, Tolerance(kEpsilonF32, size, 10));
    std::vector<float> again = PaddedRow(scores), dscores = PaddedRow(upstream);
    table.softmax_gradient_row(keys, softcap, static_cast<float>(expected.lse),
                               0.3F, again.data(), dscores.data());
    again.resize(n);
    dscores.resize(n);
    ExpectNear(again, expected.weights, Tolerance(kEpsilonF32, size, 10));
    ExpectNear(dscores, expected.dscores, Tolerance(kEpsilonF32, size, 10));
  }
}

TEST_P(CpuKernelsTest, SoftmaxRowsMatchTheReference) {
  for (const size_t n : kLengths) {
    for (const float softcap : {0.0F, 2.0F}) {
      ExpectSoftmaxRows(*table_, n, softcap);
    }
  }
}

TEST_P(CpuKernelsTest, AQueryThatSeesNoKeyHasNoWeights) {
  std::vector<float> scores = PaddedRow(std::vector<float>(16, 5));
  const SoftmaxSum sum = table_->softmax_row({7, 7, 16}, 0, scores.data());
  EXPECT_EQ(sum.lse, -std::numeric_limits<float>::infinity());
  EXPECT_EQ(sum.factor, 0);
  EXPECT_EQ(scores, std::vector<float>(16, 0));
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, CpuKernelsTest, kEveryIsa,
                         CaseOfIsa);

TEST(KernelDispatchTest, PicksATableThisProcessorRuns) {
  EXPECT_EQ(&Kernels(), KernelsFor(Kernels().isa));
}

#if defined(__x86_64__)
// Entry kernels_test.hidden runs this test, too, with hidden instructions.
TEST(KernelDispatchTest, TakesWhatTheProcessorHasAndTheCLibraryDoesNotHide) {
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  const std::string hidden = tunables == nullptr ? "" : tunables;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") &&
                          hidden.find("-AVX512F") == std::string::npos;
  EXPECT_EQ(KernelsFor(Isa::kAvx512) != nullptr, has_avx512);
  EXPECT_EQ(Bf16Kernels() != nullptr,
            has_avx512 && __builtin_cpu_supports("avx512bf16"));
  EXPECT_EQ(KernelsFor(Isa::kAvx2) != nullptr,
            __builtin_cpu_supports("avx2") &&
                hidden.find("-AVX2") == std::string::npos);
}
#endif

}  // namespace
}  // namespace weft::kernels::cpu::cpu_kernels_test
