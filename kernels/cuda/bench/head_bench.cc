// The output head: scores of a chunk of logits, and the whole of it, chunk by
// chunk, over cuBLAS' products alone.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cpu/reference.h"
#include "kernels/cuda/bench/bench.h"
#include "kernels/cuda/bench/peer_passes.h"
#include "kernels/cuda/vocab_rows.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

using weft::testing::kEpsilonBf16;
using weft::testing::kEpsilonF32;

constexpr int64_t kRows = 4096;
constexpr int64_t kChunk = 1024;
constexpr int64_t kHidden = 4096;
constexpr int64_t kVocab = 131072;
// Logits with a standard deviation of 3, as tests/bench/logprobs.py has them: a
// softmax that is almost one token's has zeros for the second product. A logit
// is the sum of kHidden products of numbers whose variance is a third of their
// limit's square.
constexpr double kDeviation = 3;
const float kWeightLimit = static_cast<float>(
    3 * kDeviation / std::sqrt(static_cast<double>(kHidden)));
constexpr double kLargestLogit = 8 * kDeviation;

// U = softmax(hidden W^T) W of a chunk after the other.
class Head {
 public:
  explicit Head(const Device& device)
      : device_(device),
        hidden_(kRows * kHidden),
        weight_(kVocab * kHidden, kWeightLimit),
        logits_(kChunk * kVocab),
        softmax_(kChunk * kVocab),
        u_(kRows * kHidden),
        logprobs_(kChunk),
        entropies_(kChunk),
        temperatures_(std::vector<float>(kChunk, 1)),
        offsets_(Offsets()) {}

  void Logits(int64_t chunk) const {
    RunGemm(device_, {.m = kChunk,
                      .n = kVocab,
                      .k = kHidden,
                      .a = {hidden_.data() + chunk * kChunk * kHidden, kHidden},
                      .b = {weight_.data(), kHidden, /*transposed=*/true},
                      .c = logits_.data(),
                      .c_stride = kVocab,
                      .c_is_f32 = true});
  }
  // Row r's target is token r.
  void Score(bool softmax_in_place) const {
    Check(ScoreVocabRows({.num_rows = kChunk,
                          .vocab = kVocab,
                          .logits_RV = logits_.data(),
                          .row_offsets = offsets_.data(),
                          .targets_E = offsets_.data(),
                          .temperature_R = temperatures_.data(),
                          .softmax_in_place = softmax_in_place,
                          .logprobs_E = logprobs_.data(),
                          .entropy_R = entropies_.data()},
                         nullptr));
  }
  void Round() const {
    RoundToBf16(kChunk * kVocab, logits_.data(), softmax_.data());
  }
  void Project(int64_t chunk) const {
    RunGemm(device_, {.m = kChunk,
                      .n = kHidden,
                      .k = kVocab,
                      .a = {softmax_.data(), kVocab},
                      .b = {weight_.data(), kHidden},
                      .c = u_.data() + chunk * kChunk * kHidden,
                      .c_stride = kHidden,
                      .c_is_f32 = true});
  }
  // Runs the first chunk and compares one row with loops in f64.
  void CheckResults() const;

 private:
  static std::vector<int64_t> Offsets() {
    std::vector<int64_t> offsets(kChunk + 1);
    std::iota(offsets.begin(), offsets.end(), 0);
    return offsets;
  }
  void CheckLogits(int64_t row) const;
  void CheckProjection(int64_t row, int64_t column) const;

  const Device& device_;
  Bf16Buffer hidden_, weight_;
  FloatBuffer logits_;
  Bf16Buffer softmax_;
  FloatBuffer u_, logprobs_, entropies_, temperatures_;
  Buffer<int64_t> offsets_;
};

void Head::CheckLogits(int64_t row) const {
  const std::vector<float> hidden = hidden_.Floats(row * kHidden, kHidden);
  for (const int64_t v : {int64_t{0}, row, kVocab - 1}) {
    const std::vector<float> w = weight_.Floats(v * kHidden, kHidden);
    CheckNear(logits_.Read(row * kVocab + v, 1)[0],
              std::inner_product(hidden.begin(), hidden.end(), w.begin(), 0.0),
              kEpsilonF32, kHidden, kLargestLogit, "a logit");
  }
}

void Head::CheckProjection(int64_t row, int64_t column) const {
  const std::vector<float> p = softmax_.Floats(row * kVocab, kVocab);
  std::vector<uint16_t> w(kVocab);
  Check(cudaMemcpy2D(w.data(), sizeof(uint16_t), weight_.data() + column,
                     kHidden * sizeof(uint16_t), sizeof(uint16_t), kVocab,
                     cudaMemcpyDeviceToHost));
  double sum = 0;
  for (size_t v = 0; v < p.size(); ++v) {
    sum += static_cast<double>(p[v]) * FromBf16(w[v]);
  }
  // As if weights were below 1.
  CheckNear(u_.Read(row * kHidden + column, 1)[0] / kWeightLimit,
            sum / kWeightLimit, kEpsilonF32, kVocab, 1, "an element of U");
}

void Head::CheckResults() const {
  constexpr int64_t kRow = kChunk - 1;
  Logits(0);
  CheckLogits(kRow);
  const cpu::reference::VocabRow expected = cpu::reference::ScoreVocabRow(
      logits_.Read(kRow * kVocab, kVocab), /*softcap=*/0, /*temperature=*/1);
  for (const bool in_place : {false, true}) {
    Score(in_place);
    CheckNear(logprobs_.Read(kRow, 1)[0], expected.logprobs[kRow], kEpsilonF32,
              kVocab, kLargestLogit, "a logprob");
    CheckNear(entropies_.Read(kRow, 1)[0], expected.entropy, kEpsilonF32,
              kVocab, kLargestLogit, "an entropy");
  }
  Round();
  const std::vector<float> softmax = logits_.Read(kRow * kVocab, kVocab);
  const std::vector<float> rounded = softmax_.Floats(kRow * kVocab, kVocab);
  for (size_t v = 0; v < softmax.size(); ++v) {
    // In units of the mean one.
    const double probability = kVocab * expected.softmax[v];
    const double in_place = static_cast<double>(kVocab) * softmax[v];
    CheckNear(in_place, probability, kEpsilonF32, kVocab, probability,
              "a probability");
    CheckNear(static_cast<double>(kVocab) * rounded[v], in_place, kEpsilonBf16,
              1, 1, "a rounded one");
  }
  Project(0);
  CheckProjection(kRow, kHidden - 1);
}

// Both over the products alone.
void BenchWhole(const Device& device, const Head& head, bool with_gradient) {
  const auto run = [&](bool products_alone) {
    for (int64_t chunk = 0; chunk < kRows / kChunk; ++chunk) {
      head.Logits(chunk);
      if (!products_alone) head.Score(with_gradient);
      if (!with_gradient) continue;
      if (!products_alone) head.Round();
      head.Project(chunk);
    }
  };
  const double seconds = device.Seconds([&] { run(false); });
  const double peer_seconds = device.Seconds([&] { run(true); });
  const double flops = (with_gradient ? 4.0 : 2.0) * kRows * kHidden * kVocab;
  Line line(with_gradient ? "head forward and U" : "head forward");
  line.Add("rows", kRows)
      .Add("vocab", kVocab)
      .AddTime("time", seconds)
      .AddTime("cublas_time", peer_seconds)
      .AddRatio("of_cublas", peer_seconds / seconds)
      .AddRatio("tflops", flops / seconds / 1e12);
  if (!with_gradient) line.AddRatio("target", 0.85);
  line.Print();
}

}  // namespace

void BenchHead(const Device& device) {
  const Head head(device);
  head.CheckResults();
  for (const bool in_place : {false, true}) {
    Line(in_place ? "ScoreVocabRows, softmax in place" : "ScoreVocabRows")
        .AddBytes(device, (in_place ? 8.0 : 4.0) * kChunk * kVocab,
                  [&] { head.Score(in_place); })
        .Print();
  }
  for (const bool with_gradient : {false, true}) {
    BenchWhole(device, head, with_gradient);
  }
}

}  // namespace weft::kernels::cuda::bench
