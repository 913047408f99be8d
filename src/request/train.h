// Training requests and results. Proto-free, validated.
#ifndef WEFT_SRC_REQUEST_TRAIN_H_
#define WEFT_SRC_REQUEST_TRAIN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace weft {

enum class LossFunction : uint8_t {
  kCrossEntropy,
  kImportanceSampling,
  kPpo,
  kCispo,
  kDro,
  kGspo,
};

struct LossConfig {
  LossFunction function = LossFunction::kCrossEntropy;
  double clip_low = 0.8;
  double clip_high = 1.2;
  double beta = 0.05;
  double temperature = 1.0;
  bool return_entropy = false;

  friend bool operator==(const LossConfig&, const LossConfig&) = default;
};

// One sequence of N tokens with K targets per token (K = 1 but for soft
// targets). Shapes: tokens [N]; targets, weights [N, K]; logprobs, advantages
// [N], empty for cross_entropy. weights is empty when all are 1.
struct Datum {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  std::vector<float> weights;
  std::vector<float> logprobs;
  std::vector<float> advantages;
  int targets_per_token = 1;

  [[nodiscard]] int64_t num_tokens() const {
    return static_cast<int64_t>(tokens.size());
  }
  friend bool operator==(const Datum&, const Datum&) = default;
};

// ForwardBackward, or Forward when `backward` is false.
struct TrainRequest {
  std::string adapter_id;  // Empty: base model, only without backward.
  uint64_t step = 0;       // 0: next free number.
  bool backward = true;
  LossConfig loss;
  std::vector<Datum> data;
  absl::Time deadline = absl::InfiniteFuture();

  [[nodiscard]] int64_t num_tokens() const {
    int64_t total = 0;
    for (const Datum& datum : data) total += datum.num_tokens();
    return total;
  }
};

// Shapes as the datum's targets; entropies [N] or empty.
struct DatumResult {
  std::vector<float> logprobs;
  std::vector<float> losses;
  std::vector<float> entropies;
};

struct TrainResult {
  std::vector<DatumResult> data;
  std::map<std::string, double> metrics;  // Named `name:reduction`.
  uint64_t step = 0;
};

struct AdamWConfig {
  double learning_rate = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-12;
  double weight_decay = 0.0;
  double max_grad_norm = 0.0;  // 0: no clipping.

  friend bool operator==(const AdamWConfig&, const AdamWConfig&) = default;
};

struct OptimStepRequest {
  std::string adapter_id;
  uint64_t step = 0;
  AdamWConfig adamw;
  absl::Time deadline = absl::InfiniteFuture();
};

struct OptimStepResult {
  double grad_norm = 0;
  uint64_t version = 0;
  uint64_t step = 0;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_TRAIN_H_
