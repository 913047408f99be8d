// Training requests and results. The server has validated the requests.
#ifndef WEFT_SRC_REQUEST_TRAIN_H_
#define WEFT_SRC_REQUEST_TRAIN_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/request/adapter.h"
#include "src/request/loss_config.h"
#include "src/request/token_support.h"

namespace weft {

// The targets of one token: [begin, end) in Datum::targets.
struct TargetSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// In Datum::routing, in place of an expert that is not given.
inline constexpr uint16_t kRouterChooses = 0xFFFF;

// A datum's value of an input of a custom loss, row by row: floats or ints.
struct CustomInput {
  std::vector<int64_t> shape;
  std::vector<float> floats;
  std::vector<int64_t> ints;
  bool is_int = false;

  friend bool operator==(const CustomInput&, const CustomInput&) = default;
};

// One sequence of N tokens. `targets` and `weights` have one value for each
// target of each token, in order (targets_of). If `weights` is empty, every
// weight is 1. logprobs and advantages are [N], or empty for losses without a
// policy. custom_inputs has a value for each input of a custom loss except
// logprobs. routing is [N, L, K] for L layers with experts and K experts per
// token. If routing is empty, or has kRouterChooses, the router chooses the
// experts. The output at token i is compared with a teacher's output at
// position i + teacher_offset of teacher_input().
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
  // Row i is the support of token i's target: the target's distribution has no
  // other tokens. Only with one target per token.
  TokenSupport support = {};
  std::map<std::string, CustomInput> custom_inputs = {};
  std::vector<int32_t> teacher_tokens = {};
  int64_t teacher_offset = 0;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  const std::vector<int32_t>& teacher_input() const {
    return teacher_tokens.empty() ? tokens : teacher_tokens;
  }
  // Returns the targets of token i; a token may have none. REQUIRES: i is in
  // [0, num_tokens()).
  TargetSpan targets_of(int64_t i) const {
    if (target_offsets.empty()) {
      const int64_t count = std::max(targets_per_token, 1);
      return {i * count, (i + 1) * count};
    }
    return {target_offsets[i], target_offsets[i + 1]};
  }
  friend bool operator==(const Datum&, const Datum&) = default;
};

// Targets that a recorded sample has drawn: [start, start + length) of a datum
// are the drawn tokens [offset, offset + length) of the sample.
struct SampledSpan {
  std::string sequence_id;
  uint32_t offset = 0;
  uint32_t start = 0;
  uint32_t length = 0;

  friend bool operator==(const SampledSpan&, const SampledSpan&) = default;
};

// What a request takes from the records of samples when it is accepted
// (sample_record.h).
struct Replay {
  bool routing = false;
  bool support = false;
  bool logprobs = false;
  // Targets whose record is gone keep the values of the request. Otherwise the
  // request fails.
  bool optional = false;
  // The spans of each datum: ascending, not empty, one target per token. Empty
  // if no datum has any.
  std::vector<std::vector<SampledSpan>> spans;
};

// What a request has taken from records, for its metrics.
struct Replayed {
  int64_t tokens = 0;   // Targets that a record has drawn.
  int64_t missing = 0;  // Spans whose record was gone.
  // The targets that the request's own adapter has drawn, and the sum of the
  // versions that drew them.
  int64_t own_tokens = 0;
  uint64_t versions = 0;

  friend bool operator==(const Replayed&, const Replayed&) = default;
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
  Replay replay;
  Replayed replayed;
  // The digest of the client's request (step.h), if the data have changed
  // since.
  std::string digest;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.
  // An earlier process has run it, whose limits may have been others.
  bool again = false;

  // Returns the tokens of the datum that a teacher reads.
  int64_t teacher_tokens_of(const Datum& datum) const {
    return HasTeacher(loss.function)
               ? static_cast<int64_t>(datum.teacher_input().size())
               : 0;
  }
  // Returns the tokens that the model reads, those of a teacher too.
  int64_t num_tokens() const {
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

struct MuonConfig {
  double learning_rate = 1e-4;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.0;
  int ns_steps = 5;            // Steps of the Newton-Schulz iteration.
  double max_grad_norm = 0.0;  // 0: no clipping.

  friend bool operator==(const MuonConfig&, const MuonConfig&) = default;
};

struct OptimStepRequest {
  std::string adapter_id;
  uint64_t step = 0;
  uint64_t epoch = 0;
  AdamWConfig adamw;               // Without a meaning beside `muon`.
  std::optional<MuonConfig> muon;  // Set: the step is one of Muon.
  bool discard = false;            // Set: the step only clears the gradient.
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.

  Optimizer optimizer() const {
    return muon ? Optimizer::kMuon : Optimizer::kAdamW;
  }
  double max_grad_norm() const {
    return muon ? muon->max_grad_norm : adamw.max_grad_norm;
  }
};

struct OptimStepResult {
  double grad_norm = 0;
  uint64_t version = 0;
  uint64_t step = 0;
  uint64_t accumulated_tokens = 0;  // Of the gradient.
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_TRAIN_H_
