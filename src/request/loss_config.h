// How the losses of a training request are computed (training.proto).
#ifndef WEFT_SRC_REQUEST_LOSS_CONFIG_H_
#define WEFT_SRC_REQUEST_LOSS_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

enum class LossFunction : uint8_t {
  kCrossEntropy,
  kImportanceSampling,
  kPpo,
  kCispo,
  kDro,
  kGspo,
  kStableReinforce,
  kCustom,
  kForwardKl,
  kReverseKl,
  kJs,
};

// An input of a custom loss. rank is the number of its dimensions, 0 to 2.
struct CustomLossInput {
  std::string name;
  int rank = 0;

  friend bool operator==(const CustomLossInput&,
                         const CustomLossInput&) = default;
};

// A loss that the client wrote. ReadLossGraph (loss_graph.h) accepts it.
struct CustomLoss {
  std::string graph;  // JSON.
  // In the order of the graph's placeholders, `logprobs` first.
  std::vector<CustomLossInput> inputs;
  // LossGraph::num_calls, or 0 if only the log knows the graph: a step's fields
  // (step_fields.h) are what the client sent.
  int64_t num_calls = 0;

  friend bool operator==(const CustomLoss&, const CustomLoss&) = default;
};

// Returns whether the loss compares the adapter with a teacher.
constexpr bool HasTeacher(LossFunction function) {
  return function == LossFunction::kForwardKl ||
         function == LossFunction::kReverseKl || function == LossFunction::kJs;
}

// Returns whether the loss compares the adapter with the policy that sampled,
// so that data need logprobs and advantages.
constexpr bool HasPolicy(LossFunction function) {
  return function != LossFunction::kCrossEntropy &&
         function != LossFunction::kCustom && !HasTeacher(function);
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
  CustomLoss custom = {};  // For kCustom.
  Teacher teacher = {};    // Used only if HasTeacher(function).

  friend bool operator==(const LossConfig&, const LossConfig&) = default;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_LOSS_CONFIG_H_
