// ScoreVocabRows against the f64 loop of kernels/cpu/reference.h.
#include "kernels/cuda/vocab_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/reference.h"
#include "tests/kernels_cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::kEpsilonF32;
using weft::testing::Tolerance;
namespace reference = weft::kernels::cpu::reference;

struct Scores {
  std::vector<float> logits;
  std::vector<float> logprobs;
  std::vector<float> entropies;
};

// Four rows: of one, no, three and two entries.
const std::vector<int64_t> kOffsets = {0, 1, 1, 4, 6};
constexpr int64_t kRows = 4;

Scores ScoreOnDevice(const std::vector<float>& logits,
                     const std::vector<int64_t>& targets,
                     const std::vector<float>& temperatures, float softcap,
                     bool softmax, bool entropy) {
  const DeviceBuffer<float> logits_device(logits);
  const DeviceBuffer<int64_t> offsets(kOffsets), targets_device(targets);
  const DeviceBuffer<float> temperature(temperatures);
  const DeviceBuffer<float> logprobs(std::vector<float>(targets.size(), 9));
  const DeviceBuffer<float> entropies(std::vector<float>(kRows, -1));
  const VocabRows rows = {.num_rows = kRows,
                          .vocab = static_cast<int64_t>(logits.size()) / kRows,
                          .logits_RV = logits_device.data(),
                          .row_offsets = offsets.data(),
                          .targets_E = targets_device.data(),
                          .temperature_R = temperature.data(),
                          .softcap = softcap,
                          .softmax_in_place = softmax,
                          .logprobs_E = logprobs.data(),
                          .entropy_R = entropy ? entropies.data() : nullptr};
  EXPECT_EQ(ScoreVocabRows(rows, nullptr), cudaSuccess);
  return {logits_device.Read(), logprobs.Read(), entropies.Read()};
}

class CudaVocabRowsTest : public CudaKernelTest {
 protected:
  void Check(int64_t vocab, float softcap, bool softmax, bool entropy) {
    std::vector<float> logits = RandomFloats(kRows * vocab, 9, 6);
    // Maxima that only the last thread of the row sees.
    for (int64_t r = 0; r < kRows; ++r) logits[(r + 1) * vocab - 1] = 40;
    const std::vector<int64_t> targets = {0, vocab - 1, vocab / 2,
                                          0, vocab / 3, vocab - 1};
    const std::vector<float> temperatures = {1, 2.5F, 0.7F, 1};
    const Scores scores =
        ScoreOnDevice(logits, targets, temperatures, softcap, softmax, entropy);
    const double tolerance = Tolerance(kEpsilonF32, 1, 80 / 0.7);
    for (int64_t r = 0; r < kRows; ++r) {
      const reference::VocabRow expected = reference::ScoreVocabRow(
          Slice(logits, r * vocab, vocab), softcap, temperatures[r]);
      for (int64_t e = kOffsets[r]; e < kOffsets[r + 1]; ++e) {
        ASSERT_NEAR(scores.logprobs[e], expected.logprobs[targets[e]],
                    tolerance);
      }
      if (entropy) {
        ASSERT_NEAR(scores.entropies[r], expected.entropy, tolerance);
      } else {
        ASSERT_EQ(scores.entropies[r], -1);
      }
      for (int64_t v = 0; softmax && v < vocab; ++v) {
        ASSERT_NEAR(scores.logits[r * vocab + v], expected.softmax[v],
                    tolerance);
      }
    }
    if (!softmax) {
      ASSERT_EQ(scores.logits, logits);
    }
  }
};

TEST_F(CudaVocabRowsTest, MatchesTheReference) {
  for (const int64_t vocab : {1, 31, 512, 513, 5001}) {
    for (const float softcap : {0.0F, 30.0F}) {
      for (const bool softmax : {false, true}) {
        Check(vocab, softcap, softmax, false);
        Check(vocab, softcap, softmax, true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaVocabRowsTest, MaskedLogitsHaveProbabilityZero) {
  std::vector<float> logits(kRows * 1000, -kInf);
  for (int64_t r = 0; r < kRows; ++r) {
    logits[r * 1000 + 10] = 1;
    logits[r * 1000 + 999] = 1;
  }
  const Scores scores = ScoreOnDevice(logits, {10, 0, 999, 10, 0, 10},
                                      {1, 1, 1, 1}, 0, true, true);
  EXPECT_NEAR(scores.logprobs[0], -std::log(2.0), 1e-6);
  EXPECT_EQ(scores.logprobs[1], -kInf);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_NEAR(scores.entropies[r], std::log(2.0), 1e-6);
    EXPECT_EQ(scores.logits[r * 1000], 0);
    EXPECT_NEAR(scores.logits[r * 1000 + 999], 0.5, 1e-6);
  }
}

TEST_F(CudaVocabRowsTest, NanAnywhereMakesItsRowNanAndNoOther) {
  for (const int64_t at : {0, 700, 999}) {
    const std::vector<float> clean = RandomFloats(kRows * 1000, 10);
    std::vector<float> logits = clean;
    logits[2 * 1000 + at] = kNan;
    const std::vector<int64_t> targets = {1, 2, 3, 4, 5, 6};
    const Scores scores =
        ScoreOnDevice(logits, targets, {1, 1, 1, 1}, 0, true, true);
    const Scores expected =
        ScoreOnDevice(clean, targets, {1, 1, 1, 1}, 0, true, true);
    for (int64_t r = 0; r < kRows; ++r) {
      EXPECT_EQ(std::isnan(scores.entropies[r]), r == 2);
      for (int64_t e = kOffsets[r]; e < kOffsets[r + 1]; ++e) {
        EXPECT_EQ(std::isnan(scores.logprobs[e]), r == 2);
      }
      const std::vector<float> row = Slice(scores.logits, r * 1000, 1000);
      if (r != 2) {
        EXPECT_EQ(row, Slice(expected.logits, r * 1000, 1000));
      } else {
        EXPECT_TRUE(
            std::ranges::all_of(row, [](float p) { return std::isnan(p); }));
      }
    }
  }
}

TEST_F(CudaVocabRowsTest, NoRowsAreNoError) {
  EXPECT_EQ(ScoreVocabRows({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
