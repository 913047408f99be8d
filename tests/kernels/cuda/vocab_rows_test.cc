// Compares ScoreVocabRows with the f64 loop of tests/kernels/cpu/reference.h.
#include "kernels/cuda/vocab_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/cpu/reference.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

namespace reference = weft::kernels::cpu::reference;

struct Scores {
  std::vector<float> logits;
  // The weights times the row's scale, or the softmax that replaced the logits.
  std::vector<float> softmax;
  std::vector<float> logprobs;
  std::vector<float> entropies;
};

// Four rows with one, no, three and two entries.
const std::vector<int64_t> kOffsets = {0, 1, 1, 4, 6};
constexpr int64_t kRows = 4;

struct Options {
  float softcap = 0;
  VocabSoftmax softmax = VocabSoftmax::kNone;
  bool entropy = true;
  bool clear_targets = false;
};

Scores ScoreOnDevice(const std::vector<float>& logits,
                     const std::vector<int64_t>& targets,
                     const std::vector<float>& temperatures,
                     const Options& options) {
  const DeviceBuffer<float> logits_device(logits);
  const DeviceArray weights(DType::kBf16, std::vector<float>(logits.size(), 7));
  // As in a later chunk of rows, the offsets do not begin at 0.
  std::vector<int64_t> offsets = kOffsets;
  for (int64_t& offset : offsets) offset += 1000;
  const DeviceBuffer<int64_t> offsets_device(offsets), targets_device(targets);
  const DeviceBuffer<float> temperature(temperatures);
  const DeviceBuffer<float> logprobs(std::vector<float>(targets.size(), 9));
  const DeviceBuffer<float> entropies(std::vector<float>(kRows, -1));
  const DeviceBuffer<float> scales(std::vector<float>(kRows, 1));
  const int64_t vocab = static_cast<int64_t>(logits.size()) / kRows;
  const VocabRows rows = {
      .num_rows = kRows,
      .vocab = vocab,
      .logits_RV = logits_device.data(),
      .row_offsets = offsets_device.data(),
      .targets_E = targets_device.data(),
      .temperature_R = temperature.data(),
      .softcap = options.softcap,
      .softmax = options.softmax,
      .weights_RV = weights.data(),
      .scale_R = scales.data(),
      .clear_targets = options.clear_targets,
      .logprobs_E = logprobs.data(),
      .entropy_R = options.entropy ? entropies.data() : nullptr};
  EXPECT_EQ(ScoreVocabRows(rows, nullptr), cudaSuccess);
  Scores scores = {.logits = logits_device.Read(),
                   .logprobs = logprobs.Read(),
                   .entropies = entropies.Read()};
  if (options.softmax == VocabSoftmax::kInPlace) {
    scores.softmax = scores.logits;
  } else if (options.softmax == VocabSoftmax::kWeights) {
    scores.softmax = weights.Read();
    const std::vector<float> scale = scales.Read();
    for (size_t i = 0; i < scores.softmax.size(); ++i) {
      scores.softmax[i] *= scale[i / static_cast<size_t>(vocab)];
    }
  }
  return scores;
}

class CudaVocabRowsTest : public CudaKernelTest {
 protected:
  void Check(int64_t vocab, const Options& options) {
    std::vector<float> logits = RandomFloats(kRows * vocab, 9, 6);
    // Only the thread that reads the row's last element sees the maximum.
    for (int64_t r = 0; r < kRows; ++r) logits[(r + 1) * vocab - 1] = 40;
    const std::vector<int64_t> targets = {0, vocab - 1, vocab / 2,
                                          0, vocab / 3, vocab - 1};
    const std::vector<float> temperatures = {1, 2.5F, 0.7F, 1};
    const Scores scores = ScoreOnDevice(logits, targets, temperatures, options);
    // The largest distance between two logits, divided by the lowest
    // temperature.
    constexpr double kLargestExponent = 80 / 0.7;
    const double tolerance = Tolerance(kEpsilonF32, 1, kLargestExponent);
    for (int64_t r = 0; r < kRows; ++r) {
      const reference::VocabRow expected = reference::ScoreVocabRow(
          Slice(logits, r * vocab, vocab), options.softcap, temperatures[r]);
      for (int64_t e = kOffsets[r]; e < kOffsets[r + 1]; ++e) {
        ASSERT_NEAR(scores.logprobs[e], expected.logprobs[targets[e]],
                    tolerance);
      }
      if (options.entropy) {
        ASSERT_NEAR(scores.entropies[r], expected.entropy, tolerance);
      } else {
        ASSERT_EQ(scores.entropies[r], -1);
      }
      if (options.softmax == VocabSoftmax::kNone) continue;
      std::vector<double> softmax = expected.softmax;
      for (int64_t e = kOffsets[r];
           options.clear_targets && e < kOffsets[r + 1]; ++e) {
        softmax[targets[e]] = 0;
      }
      const double stored = options.softmax == VocabSoftmax::kWeights
                                ? kEpsilonBf16
                                : kEpsilonF32;
      // An absolute error of the exponent is a relative error of the softmax.
      for (int64_t v = 0; v < vocab; ++v) {
        ASSERT_NEAR(scores.softmax[r * vocab + v], softmax[v],
                    StoredTolerance(stored, 1, kLargestExponent * softmax[v],
                                    softmax[v]))
            << "row " << r << " token " << v;
      }
    }
    if (options.softmax != VocabSoftmax::kInPlace) {
      ASSERT_EQ(scores.logits, logits);
    }
  }
};

constexpr VocabSoftmax kSoftmaxes[] = {
    VocabSoftmax::kNone, VocabSoftmax::kInPlace, VocabSoftmax::kWeights};

// Rows are read element by element or in packs, depending on the vocabulary.
TEST_F(CudaVocabRowsTest, MatchesTheReference) {
  for (const int64_t vocab : {1, 513, 5000}) {
    for (const float softcap : {0.0F, 30.0F}) {
      for (const VocabSoftmax softmax : kSoftmaxes) {
        Check(vocab,
              {.softcap = softcap, .softmax = softmax, .clear_targets = true});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaVocabRowsTest, EntropiesAndClearedTargetsMayBeLeftOut) {
  for (const VocabSoftmax softmax : kSoftmaxes) {
    Check(520, {.softmax = softmax, .entropy = false});
  }
}

// The kernel first writes the weights relative to the largest of the first
// logits. The largest logit of the row comes last. It is so far above the first
// ones that its weight could be infinite.
TEST_F(CudaVocabRowsTest, WeightsAreFiniteWhereverTheLargestLogitLies) {
  for (const float most : {50.0F, 100.0F, 1e4F}) {
    std::vector<float> logits = RandomFloats(kRows * 8000, 12);
    for (int64_t r = 0; r < kRows; ++r) logits[r * 8000 + 7999] = most;
    const Scores scores =
        ScoreOnDevice(logits, {0, 0, 0, 0, 0, 0}, {1, 1, 1, 1},
                      {.softmax = VocabSoftmax::kWeights});
    for (int64_t r = 0; r < kRows; ++r) {
      EXPECT_NEAR(scores.softmax[r * 8000 + 7999], 1, kEpsilonBf16);
      EXPECT_NEAR(scores.softmax[r * 8000], 0, 1e-12);
    }
  }
}

TEST_F(CudaVocabRowsTest, MaskedLogitsHaveProbabilityZero) {
  std::vector<float> logits(kRows * 8000, -kInf);
  for (int64_t r = 0; r < kRows; ++r) {
    logits[r * 8000 + 5010] = 1;
    logits[r * 8000 + 7999] = 1;
  }
  for (const VocabSoftmax softmax :
       {VocabSoftmax::kInPlace, VocabSoftmax::kWeights}) {
    const Scores scores = ScoreOnDevice(logits, {5010, 0, 7999, 5010, 0, 5010},
                                        {1, 1, 1, 1}, {.softmax = softmax});
    EXPECT_NEAR(scores.logprobs[0], -std::log(2.0), 1e-6);
    EXPECT_EQ(scores.logprobs[1], -kInf);
    for (int64_t r = 0; r < kRows; ++r) {
      EXPECT_NEAR(scores.entropies[r], std::log(2.0), 1e-6);
      EXPECT_EQ(scores.softmax[r * 8000], 0);
      EXPECT_NEAR(scores.softmax[r * 8000 + 7999], 0.5, 1e-6);
    }
  }
}

TEST_F(CudaVocabRowsTest, NanAnywhereMakesItsRowNanAndNoOther) {
  const std::vector<int64_t> targets = {1, 2, 3, 4, 5, 6};
  for (const VocabSoftmax softmax :
       {VocabSoftmax::kInPlace, VocabSoftmax::kWeights}) {
    for (const int64_t at : {0, 999}) {
      const std::vector<float> clean = RandomFloats(kRows * 1000, 10);
      std::vector<float> logits = clean;
      logits[2 * 1000 + at] = kNan;
      const Scores scores =
          ScoreOnDevice(logits, targets, {1, 1, 1, 1}, {.softmax = softmax});
      const Scores expected =
          ScoreOnDevice(clean, targets, {1, 1, 1, 1}, {.softmax = softmax});
      for (int64_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(std::isnan(scores.entropies[r]), r == 2);
        for (int64_t e = kOffsets[r]; e < kOffsets[r + 1]; ++e) {
          EXPECT_EQ(std::isnan(scores.logprobs[e]), r == 2);
        }
        const std::vector<float> row = Slice(scores.softmax, r * 1000, 1000);
        if (r != 2) {
          EXPECT_EQ(row, Slice(expected.softmax, r * 1000, 1000));
        } else {
          EXPECT_TRUE(
              std::ranges::all_of(row, [](float p) { return std::isnan(p); }));
        }
      }
    }
  }
}

TEST_F(CudaVocabRowsTest, NoRowsAreNoError) {
  EXPECT_EQ(ScoreVocabRows({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
