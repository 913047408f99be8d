// Tables of refusals, with the cause, code and message of each.
#ifndef WEFT_TESTS_SERVER_REFUSALS_H_
#define WEFT_TESTS_SERVER_REFUSALS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/request_validation.h"

namespace weft {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

inline RequestLimits Limits() {
  return {.vocab_size = 100,
          .context_length = 32,
          .max_rank = 64,
          .num_experts = 6,
          .experts_per_token = 2,
          .expert_layers = 2,
          .has_byte_decoder = false,
          .max_data = 3,
          .max_tokens = 40,
          .max_samples = 8};
}

// A change that makes a valid message invalid, and the beginning of the
// refusal's message.
template <typename Message>
struct Row {
  std::string name;
  std::function<void(Message&)> spoil;
  std::string error;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

template <typename Message>
void ExpectRefusals(const Message& good,
                    const std::vector<Row<Message>>& rows) {
  EXPECT_TRUE(Validate(good, Limits()).ok())
      << Validate(good, Limits()).status();
  for (const Row<Message>& row : rows) {
    SCOPED_TRACE(row.name);
    Message message = good;
    row.spoil(message);
    const absl::Status status = Validate(message, Limits()).status();
    EXPECT_EQ(status.code(), row.code) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::StartsWith(row.error));
  }
}

// Returns a request with one sequence of three tokens and everything that a
// policy loss needs.
inline v1::ForwardBackwardRequest GoodTrain() {
  v1::ForwardBackwardRequest request;
  request.set_adapter_id("a");
  request.mutable_loss()->set_function(v1::LOSS_FUNCTION_PPO);
  v1::Datum* const datum = request.add_data();
  for (const uint32_t token : {1, 2, 3}) {
    datum->add_tokens(token);
    datum->add_targets(token);
    datum->add_weights(1);
    datum->add_logprobs(-1);
    datum->add_advantages(1);
  }
  return request;
}

// (logprobs * a).sum(). b, an input of integers, has no use.
inline constexpr char kCustomGraph[] = R"({"format": 1, "nodes": [
  {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
  {"op": "placeholder", "name": "a", "target": "a"},
  {"op": "placeholder", "name": "b", "target": "b"},
  {"op": "call_function", "name": "mul", "target": "operator.mul",
   "args": [{"ref": "logprobs"}, {"ref": "a"}]},
  {"op": "call_method", "name": "total", "target": "sum",
   "args": [{"ref": "mul"}]},
  {"op": "output", "name": "output", "target": "output",
   "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]}]})";

inline void AddCustomInput(v1::CustomLoss* loss, const std::string& name,
                           uint32_t rank) {
  v1::CustomLossInput* const input = loss->add_inputs();
  input->set_name(name);
  input->set_rank(rank);
}

// Returns a valid request with that loss.
inline v1::ForwardBackwardRequest GoodCustom() {
  v1::ForwardBackwardRequest request = GoodTrain();
  request.mutable_loss()->set_function(v1::LOSS_FUNCTION_CUSTOM);
  v1::CustomLoss* const loss = request.mutable_loss()->mutable_custom_loss();
  loss->set_graph(kCustomGraph);
  AddCustomInput(loss, "logprobs", 1);
  AddCustomInput(loss, "a", 1);
  AddCustomInput(loss, "b", 2);
  v1::Datum* const datum = request.mutable_data(0);
  datum->clear_weights();
  datum->clear_logprobs();
  datum->clear_advantages();
  auto& inputs = *datum->mutable_custom_inputs();
  inputs["a"].add_shape(3);
  inputs["a"].set_floats_le(std::string(12, '\0'));
  inputs["b"].add_shape(1);
  inputs["b"].add_shape(2);
  inputs["b"].set_ints_le(std::string(16, '\0'));
  return request;
}

// Returns a request whose teacher reads another prompt of two tokens before the
// same two tokens.
inline v1::ForwardBackwardRequest GoodDistillation() {
  v1::ForwardBackwardRequest request = GoodTrain();
  request.mutable_loss()->set_function(v1::LOSS_FUNCTION_JS);
  request.mutable_loss()->mutable_teacher()->set_adapter_id("b");
  v1::Datum* const datum = request.mutable_data(0);
  datum->clear_logprobs();
  datum->clear_advantages();
  datum->set_weights(0, 0);
  for (const uint32_t token : {9, 8, 2, 3}) datum->add_teacher_tokens(token);
  return request;
}

}  // namespace weft

#endif  // WEFT_TESTS_SERVER_REFUSALS_H_
