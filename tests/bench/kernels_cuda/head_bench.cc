// Times the scores of one chunk (some rows of logits), and the whole output
// head, chunk by chunk. Compares the whole head with its cuBLAS products alone.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/vocab_rows.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t kRows = 4096;
// Numbers of rows in a chunk of logits.
constexpr int64_t kChunks[] = {1024, 2048, 4096};
constexpr int64_t kHidden = 4096;
constexpr int64_t kVocab = 131072;
// The standard deviation of the logits, as in tests/bench/logprobs.py. If it
// were larger, almost all probability would fall on one token, and the product
// of the softmax and W would multiply zeros. kWeightLimit follows from
// kDeviation: a logit sums kHidden products of uniform numbers, and a uniform
// number in [-L, L] has the variance L^2 / 3.
constexpr double kDeviation = 3;
const float kWeightLimit = static_cast<float>(
    3 * kDeviation / std::sqrt(static_cast<double>(kHidden)));
constexpr double kLargestLogit = 8 * kDeviation;

// Computes logits = hidden W^T, their softmax, and U = weights_ W, one chunk
// after another. Row r of the softmax is scales_[r] * weights_[r].
class Head {
 public:
  Head(const Device& device, int64_t chunk_rows)
      : device_(device),
        chunk_(chunk_rows),
        hidden_(kRows * kHidden),
        weight_(kVocab * kHidden, kWeightLimit),
        logits_(chunk_ * kVocab),
        weights_(chunk_ * kVocab),
        u_(kRows * kHidden),
        scales_(chunk_),
        logprobs_(chunk_),
        entropies_(chunk_),
        temperatures_(std::vector<float>(static_cast<size_t>(chunk_), 1)),
        offsets_(Offsets(chunk_)) {}

  void Logits(int64_t chunk) const {
    RunGemm(device_, {.m = chunk_,
                      .n = kVocab,
                      .k = kHidden,
                      .a = {hidden_.data() + chunk * chunk_ * kHidden, kHidden},
                      .b = {weight_.data(), kHidden, /*transposed=*/true},
                      .c = logits_.data(),
                      .c_stride = kVocab,
                      .c_is_f32 = true});
  }
  // Computes the scores of the logits. The target of row r is token r.
  void Score(VocabSoftmax softmax) const {
    Check(ScoreVocabRows({.num_rows = chunk_,
                          .vocab = kVocab,
                          .logits_RV = logits_.data(),
                          .row_offsets = offsets_.data(),
                          .targets_E = offsets_.data(),
                          .temperature_R = temperatures_.data(),
                          .softmax = softmax,
                          .weights_RV = weights_.data(),
                          .scale_R = scales_.data(),
                          .logprobs_E = logprobs_.data(),
                          .entropy_R = entropies_.data()},
                         nullptr));
  }
  void Project(int64_t chunk) const {
    RunGemm(device_, {.m = chunk_,
                      .n = kHidden,
                      .k = kVocab,
                      .a = {weights_.data(), kVocab},
                      .b = {weight_.data(), kHidden},
                      .c = u_.data() + chunk * chunk_ * kHidden,
                      .c_stride = kHidden,
                      .c_is_f32 = true});
  }
  int64_t chunk() const { return chunk_; }
  // Runs the first chunk and compares one row with loops in f64.
  void CheckResults() const;

 private:
  static std::vector<int64_t> Offsets(int64_t count) {
    std::vector<int64_t> offsets(static_cast<size_t>(count + 1));
    std::iota(offsets.begin(), offsets.end(), 0);
    return offsets;
  }
  void CheckLogits(int64_t row) const;
  void CheckProjection(int64_t row, int64_t column) const;

  const Device& device_;
  const int64_t chunk_;
  Bf16Buffer hidden_, weight_;
  FloatBuffer logits_;
  Bf16Buffer weights_;
  FloatBuffer u_, scales_, logprobs_, entropies_, temperatures_;
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
  const std::vector<float> p = weights_.Floats(row * kVocab, kVocab);
  std::vector<uint16_t> w(kVocab);
  Check(cudaMemcpy2D(w.data(), sizeof(uint16_t), weight_.data() + column,
                     kHidden * sizeof(uint16_t), sizeof(uint16_t), kVocab,
                     cudaMemcpyDeviceToHost));
  double sum = 0;
  double total = 0;
  for (size_t v = 0; v < p.size(); ++v) {
    total += p[v];
    sum += static_cast<double>(p[v]) * FromBf16(w[v]);
  }
  // Divides both values by `scale`, so that no partial sum exceeds 1 in
  // magnitude: the row's weights add up to `total`, and the elements of W are
  // at most kWeightLimit in magnitude.
  const double scale = kWeightLimit * total;
  CheckNear(u_.Read(row * kHidden + column, 1)[0] / scale, sum / scale,
            kEpsilonF32, kVocab, 1, "an element of U");
}

void Head::CheckResults() const {
  const int64_t row = chunk_ - 1;
  Logits(0);
  CheckLogits(row);
  const cpu::reference::VocabRow expected = cpu::reference::ScoreVocabRow(
      logits_.Read(row * kVocab, kVocab), /*softcap=*/0, /*temperature=*/1);
  for (const VocabSoftmax softmax :
       {VocabSoftmax::kNone, VocabSoftmax::kWeights, VocabSoftmax::kInPlace}) {
    Score(softmax);
    CheckNear(logprobs_.Read(row, 1)[0], expected.logprobs[row], kEpsilonF32,
              kVocab, kLargestLogit, "a logprob");
    CheckNear(entropies_.Read(row, 1)[0], expected.entropy, kEpsilonF32, kVocab,
              kLargestLogit, "an entropy");
  }
  const std::vector<float> in_place = logits_.Read(row * kVocab, kVocab);
  const std::vector<float> weights = weights_.Floats(row * kVocab, kVocab);
  const double scale = scales_.Read(row, 1)[0];
  for (size_t v = 0; v < weights.size(); ++v) {
    // Measures probabilities in units of the mean probability.
    const double probability = kVocab * expected.softmax[v];
    CheckNear(static_cast<double>(kVocab) * in_place[v], probability,
              kEpsilonF32, kVocab, probability, "a probability");
    CheckNear(kVocab * scale * weights[v], probability, kEpsilonBf16, kVocab,
              probability, "a weight");
  }
  Project(0);
  CheckProjection(row, kHidden - 1);
}

// Times the head, and its cuBLAS products alone. If with_gradient, both include
// U.
void BenchWhole(const Device& device, const Head& head, bool with_gradient) {
  const auto run = [&](bool products_alone) {
    for (int64_t chunk = 0; chunk < kRows / head.chunk(); ++chunk) {
      head.Logits(chunk);
      if (!products_alone) {
        head.Score(with_gradient ? VocabSoftmax::kWeights
                                 : VocabSoftmax::kNone);
      }
      if (with_gradient) head.Project(chunk);
    }
  };
  const double seconds = device.Seconds([&] { run(false); });
  const double peer_seconds = device.Seconds([&] { run(true); });
  const double flops = (with_gradient ? 4.0 : 2.0) * kRows * kHidden * kVocab;
  Line line(with_gradient ? "head forward and U" : "head forward");
  line.Add("rows", kRows)
      .Add("vocab", kVocab)
      .Add("chunk", head.chunk())
      .AddTime("time", seconds)
      .AddTime("cublas_time", peer_seconds)
      .AddRatio("of_cublas", peer_seconds / seconds)
      .AddRatio("tflops", flops / seconds / 1e12);
  if (!with_gradient) line.AddRatio("target", 0.85);
  line.Print();
}

void BenchScores(const Device& device, const Head& head) {
  const auto score = [&](const char* name, VocabSoftmax softmax,
                         double bytes_per_logit) {
    Line(name)
        .AddBytes(device,
                  bytes_per_logit * static_cast<double>(head.chunk() * kVocab),
                  [&] { head.Score(softmax); })
        .Print();
  };
  score("ScoreVocabRows", VocabSoftmax::kNone, 4);
  score("ScoreVocabRows, bf16 weights", VocabSoftmax::kWeights, 6);
  score("ScoreVocabRows, softmax in place", VocabSoftmax::kInPlace, 8);
}

}  // namespace

void BenchHead(const Device& device) {
  for (const int64_t chunk : kChunks) {
    const Head head(device, chunk);
    head.CheckResults();
    if (chunk == kChunks[0]) BenchScores(device, head);
    for (const bool with_gradient : {false, true}) {
      BenchWhole(device, head, with_gradient);
    }
  }
}

}  // namespace weft::kernels::cuda::bench
