// Training requests and results. The server has validated the requests.
#ifndef WEFT_SRC_REQUEST_TRAIN_H_
#define WEFT_SRC_REQUEST_TRAIN_H_

#include <algorithm>
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
  kStableReinforce,
  kForwardKl = 8,
  kReverseKl = 9,
  kJs = 10,
};

// Returns whether the loss compares the adapter with a teacher.
[[nodiscard]] constexpr bool HasTeacher(LossFunction function) {
  return function == LossFunction::kForwardKl ||
         function == LossFunction::kReverseKl || function == LossFunction::kJs;
}

// The model whose distribution the adapter learns: the base model, or an
// adapter, which may be the one that learns.
struct Teacher {
  bool base_model = false;
  std::string adapter_id;  // Empty: the base model.
  std::string snapshot;    // Empty: the latest version.

  friend bool operator==(const Teacher&, const Teacher&) = default;
};

struct LossConfig {
  LossFunction function = LossFunction::kCrossEntropy;
  double clip_low = 0.8;
  double clip_high = 1.2;
  double beta = 0.05;
  double temperature = 1.0;
  bool return_entropy = false;
  double gradient_filter = 0;  // 0 gives the exact gradient.
  bool score_all = false;      // Scores targets of weight 0 too.
  bool return_routing = false;
  Teacher teacher = {};  // Used only if HasTeacher(function).

  friend bool operator==(const LossConfig&, const LossConfig&) = default;
};

// The targets of one token: [begin, end) in Datum::targets.
struct TargetSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// One sequence of N tokens. `targets` and `weights` have one value for each
// target of each token, in order (targets_of). If `weights` is empty, every
// weight is 1. logprobs and advantages are [N], or empty for losses without a
// policy. routing is [N, L, K] for L layers with experts and K experts per
// token. If routing is empty, the router chooses the experts. The output at
// token i is compared with a teacher's output at position i + teacher_offset of
// teacher_input().
struct Datum {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  std::vector<float> weights;
  std::vector<float> logprobs;
  std::vector<float> advantages;
  // The index of each token's first target, [N + 1]. If empty, every token has
  // targets_per_token targets.
  std::vector<uint32_t> target_offsets = {};
  int targets_per_token = 0;  // 0: 1, for targets of one dimension.
  std::vector<uint16_t> routing = {};
  std::vector<int32_t> teacher_tokens = {};
  int64_t teacher_offset = 0;

  [[nodiscard]] int64_t num_tokens() const {
    return static_cast<int64_t>(tokens.size());
  }
  [[nodiscard]] const std::vector<int32_t>& teacher_input() const {
    return teacher_tokens.empty() ? tokens : teacher_tokens;
  }
  // Returns the targets of token i; a token may have none. REQUIRES: i is in
  // [0, num_tokens()).
  [[nodiscard]] TargetSpan targets_of(int64_t i) const {
    if (target_offsets.empty()) {
      const int64_t count = std::max(targets_per_token, 1);
      return {i * count, (i + 1) * count};
    }
    return {target_offsets[i], target_offsets[i + 1]};
  }
  friend bool operator==(const Datum&, const Datum&) = default;
};

// A ForwardBackward request, or a Forward request if `backward` is false.
struct TrainRequest {
  std::string adapter_id;  // Empty: the base model (Forward only).
  std::string tenant;      // Whose call it is; counts for the base model only.
  uint64_t step = 0;       // 0: the number after the highest accepted one.
  uint64_t epoch = 0;      // The adapter's epoch; 0: the present one.
  bool backward = true;
  // True for a Forward without a step number. It may run before or after any
  // other step of the adapter.
  bool unnumbered = false;
  std::string snapshot;  // Set only if unnumbered. Empty: the latest version.
  LossConfig loss;
  std::vector<Datum> data;
  absl::Time deadline = absl::InfiniteFuture();
  bool promised = false;  // See step.h.

  // Returns the tokens of the datum that a teacher reads.
  [[nodiscard]] int64_t teacher_tokens_of(const Datum& datum) const {
    return HasTeacher(loss.function)
               ? static_cast<int64_t>(datum.teacher_input().size())
               : 0;
  }
  // Returns the tokens that the model reads, those of a teacher too.
  [[nodiscard]] int64_t num_tokens() const {
    int64_t total = 0;
    for (const Datum& datum : data) {
      total += datum.num_tokens() + teacher_tokens_of(datum);
    }
    return total;
  }
};

// logprobs and losses have one value for each target of the datum. entropies is
// [N] or empty, and routing is [N, L, K] or empty (N, L, K as for Datum).
struct DatumResult {
  int targets_per_token = 0;  // The datum's.
  std::vector<float> logprobs;
  std::vector<float> losses;
  std::vector<float> entropies;
  std::vector<uint16_t> routing;
};

struct TrainResult {
  std::vector<DatumResult> data;
  std::map<std::string, double> metrics;  // By name, such as `loss:sum`.
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
  uint64_t epoch = 0;
  AdamWConfig adamw;
  absl::Time deadline = absl::InfiniteFuture();
  bool promised = false;  // See step.h.
};

struct OptimStepResult {
  double grad_norm = 0;
  uint64_t version = 0;
  uint64_t step = 0;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_TRAIN_H_
