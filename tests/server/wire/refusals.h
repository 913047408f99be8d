// Tables of refusals, with the cause, code and message of each.
#ifndef WEFT_TESTS_SERVER_WIRE_REFUSALS_H_
#define WEFT_TESTS_SERVER_WIRE_REFUSALS_H_

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/wire/request_validation.h"
#include "tests/server/wire/message_edit.h"

namespace weft::server {

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
// refusal's message. A change that Edit cannot make is a function with a name.
template <typename Message>
struct Row {
  Row(const std::string& edit, std::string message,
      absl::StatusCode status = absl::StatusCode::kInvalidArgument)
      : name(edit),
        spoil([edit](Message& m) { Edit(&m, edit); }),
        error(std::move(message)),
        code(status) {}
  Row(std::string what, std::function<void(Message&)> change,
      std::string message)
      : name(std::move(what)),
        spoil(std::move(change)),
        error(std::move(message)) {}

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
  return Edited(v1::ForwardBackwardRequest(),
                "adapter_id = 'a'; loss.function = LOSS_FUNCTION_PPO; "
                "data += {tokens: [1, 2, 3] targets: [1, 2, 3] "
                "weights: [1, 1, 1] logprobs: [-1, -1, -1] "
                "advantages: [1, 1, 1]}");
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

// Returns a valid request with that loss.
inline v1::ForwardBackwardRequest GoodCustom() {
  v1::ForwardBackwardRequest request =
      Edited(GoodTrain(),
             "loss.function = LOSS_FUNCTION_CUSTOM; loss.custom_loss = {"
             "inputs {name: 'logprobs' rank: 1} inputs {name: 'a' rank: 1} "
             "inputs {name: 'b' rank: 2}}; "
             "data[0] = {tokens: [1, 2, 3] targets: [1, 2, 3]}");
  request.mutable_loss()->mutable_custom_loss()->set_graph(kCustomGraph);
  auto& inputs = *request.mutable_data(0)->mutable_custom_inputs();
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
  return Edited(GoodTrain(),
                "loss.function = LOSS_FUNCTION_JS; "
                "loss.teacher.adapter_id = 'b'; clear data[0].logprobs; "
                "clear data[0].advantages; data[0].weights[0] = 0; "
                "data[0].teacher_tokens = [9, 8, 2, 3]");
}

}  // namespace weft::server

#endif  // WEFT_TESTS_SERVER_WIRE_REFUSALS_H_
