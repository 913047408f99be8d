// Tests every refusal of TrainingService: its cause, its code and its message.
#include <cstdint>
#include <string>

#include "tests/server/wire/refusals.h"

namespace weft::server {
namespace {

using Train = v1::ForwardBackwardRequest;

TEST(RefusalTest, ForwardBackwardData) {
  ExpectRefusals<Train>(
      GoodTrain(),
      {{"clear adapter_id", "adapter_id is required"},
       {"clear data", "data has 0 sequences, must be in [1, 3]"},
       {"data += {} * 3", "data has 4 sequences, must be in [1, 3]"},
       {"data[0] = {}", "data[0].tokens is empty"},
       {"data += {}", "data[1].tokens is empty"},
       {"data[0].tokens = 1 * 33",
        "data[0].tokens has 33 values, must be in [1, context length 32]"},
       {"too many tokens",
        [](Train& r) {
          Edit(&r,
               "data[0].tokens = 1 * 20; data[0].targets = 1 * 20; "
               "data[0].weights = 1 * 20; data[0].logprobs = 0 * 20; "
               "data[0].advantages = 0 * 20");
          *r.add_data() = r.data(0);
          *r.add_data() = GoodTrain().data(0);
        },
        "data has more than 40 tokens at data[2]"},
       {"data[0].tokens[2] = 100",
        "data[0].tokens[2] is 100, must be in [0, 100)"},
       {"data[0].tokens[1] = 2147483648",
        "data[0].tokens[1] is 2147483648, must be in [0, 100)"},
       {"data[0].tokens_le = '\\0' * 12",
        "data[0].tokens and data[0].tokens_le are both set"},
       {"clear data[0].tokens; data[0].tokens_le = 'abcde'",
        "data[0].tokens_le has 5 bytes, must be a multiple of 4"},
       {"clear data[0].tokens; data[0].tokens_le = "
        "'\\0\\0\\0\\0\\0\\0\\0\\0\\x64\\0\\0\\0'",
        "data[0].tokens[2] is 100"},
       {"pop data[0].targets", "data[0].targets has 2 values, must have 3"},
       {"data[0].targets += 1", "data[0].targets has 4 values, must have 3"},
       {"data[0].targets[1] = 100",
        "data[0].targets[1] is 100, must be in [0, 100)"},
       {"data[0].targets_le = '\\0' * 12",
        "data[0].targets and data[0].targets_le are both set"},
       {"data[0].targets_per_token = 2",
        "data[0].targets_per_token is 2, must be 0 or 1"},
       {"data[0].weights += 1", "data[0].weights has 4 values, must have 3"},
       {"data[0].weights[2] = nan",
        "data[0].weights[2] is nan, must be finite"},
       {"data[0].weights_le = '\\0' * 12",
        "data[0].weights and data[0].weights_le are both set"},
       {"clear data[0].weights; data[0].weights_le = 'abc'",
        "data[0].weights_le has 3 bytes"},
       {"clear data[0].logprobs", "data[0].logprobs has 0 values, must have 3"},
       {"data[0].logprobs[1] = 0.5",
        "data[0].logprobs[1] is 0.5, must be at most 0"},
       {"data[0].logprobs[0] = -inf",
        "data[0].logprobs[0] is -inf, must be finite"},
       {"clear data[0].advantages",
        "data[0].advantages has 0 values, must have 3"},
       {"data[0].advantages[2] = inf",
        "data[0].advantages[2] is inf, must be finite"},
       {"data[0].advantages_le = '\\0' * 12",
        "data[0].advantages and data[0].advantages_le are both set"}});
}

// Routes three tokens in two layers, to two experts each.
std::string GoodRouting() {
  const std::vector<uint16_t> experts = {0, 1, 2, 3, 5, 4, 1, 0, 0, 5, 4, 3};
  return {reinterpret_cast<const char*>(experts.data()), 2 * experts.size()};
}

TEST(RefusalTest, SampledSpans) {
  const Train good =
      Edited(GoodTrain(),
             "clear data[0].logprobs; loss.replay_logprobs = true; "
             "loss.replay_routing = true; loss.replay_support = true; "
             "data[0].sampled_spans = {sequence_id: 'record:1' offset: 7 "
             "length: 1} * 2; data[0].sampled_spans[1].start = 2");
  const auto read = Validate(good, Limits()).value();
  const SampledSpan second{
      .sequence_id = "record:1", .offset = 7, .start = 2, .length = 1};
  ASSERT_EQ(read.replay.spans.size(), 1);
  EXPECT_EQ(read.replay.spans[0][1], second);
  EXPECT_TRUE(read.replay.routing && read.replay.support &&
              read.replay.logprobs);
  EXPECT_FALSE(read.replay.optional);
  ExpectRefusals<Train>(
      good,
      {{"clear data[0].sampled_spans[0].sequence_id",
        "data[0].sampled_spans[0].sequence_id is \"\", must be a "
        "Sample.sequence_id"},
       {"data[0].sampled_spans[1].sequence_id = 'a b:1'",
        "data[0].sampled_spans[1].sequence_id is \"a b:1\""},
       {"data[0].sampled_spans[0].sequence_id = 'x' * 513",
        "data[0].sampled_spans[0].sequence_id is"},
       {"data[0].sampled_spans[0].length = 3",
        "data[0].sampled_spans[1].start is 2, must be at least 3"},
       {"data[0].sampled_spans[1].start = 1; "
        "data[0].sampled_spans[1].offset = 8",
        "data[0].sampled_spans[1] continues the span before"},
       {"data[0].sampled_spans += {} * 1023",
        "data[0].sampled_spans has 1025 values, must be at most 1024"},
       {"data[0].sampled_spans[1].length = 0",
        "data[0].sampled_spans[1].length is 0"},
       {"data[0].sampled_spans[1].length = 2",
        "data[0].sampled_spans[1].length is 2 at start 2, must be at least 1 "
        "and end within the 3 targets"},
       {"data[0].sampled_spans[1].start = 4294967295",
        "data[0].sampled_spans[1].length is 1 at start 4294967295"},
       {"clear loss.replay_logprobs; clear loss.replay_routing; clear "
        "loss.replay_support",
        "data[0].sampled_spans is set, but no switch of loss uses it"},
       {"no spans", [](Train& r) { *r.mutable_data(0) = GoodTrain().data(0); },
        "loss.replay_routing is set, but no datum has sampled_spans"},
       {"clear loss.replay_logprobs",
        "data[0].logprobs is empty: send it, or set loss.replay_logprobs"},
       {"data[0].logprobs += -1", "data[0].logprobs has 1 values, must have 3"},
       {"loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
        "data[0].targets_per_token = 2; data[0].targets = 1 * 6; "
        "data[0].weights = 1 * 6",
        "data[0].sampled_spans is set, but tokens have several targets"},
       {"routing twice",
        [](Train& r) { r.mutable_data(0)->set_routing_le(GoodRouting()); },
        "data[0].routing_le is set, but loss.replay_routing replaces it"},
       {"data[0].support_offsets_le = '\\0' * 16",
        "data[0].support_offsets_le is set, but loss.replay_support"}});
  RequestLimits dense = Limits();
  dense.expert_layers = 0;
  const absl::Status routed = Validate(good, dense).status();
  EXPECT_EQ(routed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(routed.message()),
              ::testing::StartsWith("loss.replay_routing is set, but the model "
                                    "has no experts"));
}

TEST(RefusalTest, Routing) {
  Train good = GoodTrain();
  good.mutable_data(0)->set_routing_le(GoodRouting());
  good.mutable_loss()->set_return_routing(true);
  const auto routing = [](Train& r) {
    return r.mutable_data(0)->mutable_routing_le();
  };
  ExpectRefusals<Train>(
      good,
      {{"short", [=](Train& r) { routing(r)->resize(22); },
        "data[0].routing_le has 22 bytes, must have 24 (3 tokens, 2 layers, 2 "
        "experts of 2 bytes)"},
       {"long", [=](Train& r) { routing(r)->append(4, '\0'); },
        "data[0].routing_le has 28 bytes"},
       {"expert 6", [=](Train& r) { (*routing(r))[2 * 7] = 6; },
        "data[0].routing_le[1][1][1] is 6, must be in [0, 6)"},
       {"expert 65535",
        [=](Train& r) { routing(r)->replace(0, 2, "\xff\xff"); },
        "data[0].routing_le[0][0][0] is 65535"},
       {"twice", [=](Train& r) { (*routing(r))[2 * 11] = 4; },
        "data[0].routing_le[2][1][1] is 4 again, must be another expert in "
        "[0, 6)"}});
  EXPECT_EQ(Validate(good, Limits())->data[0].routing.size(), 12);
  RequestLimits dense = Limits();
  dense.num_experts = dense.experts_per_token = dense.expert_layers = 0;
  EXPECT_THAT(std::string(Validate(good, dense).status().message()),
              ::testing::StartsWith("loss.return_routing is set, but the model "
                                    "has no experts"));
  good.mutable_loss()->clear_return_routing();
  EXPECT_THAT(std::string(Validate(good, dense).status().message()),
              ::testing::StartsWith("data[0].routing_le is set, but the model "
                                    "has no experts"));
  const auto sample =
      Make<v1::SampleRequest>("prompt += 1; return_routing = true");
  EXPECT_TRUE(Validate(sample, Limits())->return_routing);
  EXPECT_EQ(Validate(sample, dense).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RefusalTest, Loss) {
  ExpectRefusals<Train>(
      GoodTrain(),
      {{"clear loss", "loss is required"},
       {"clear loss.function", "loss.function is required"},
       {"loss.function = 99",
        "loss.function is 99, must be a known LossFunction"},
       {"loss.clip_low = -0.1", "loss.clip_low is -0.1, must be in [0, 1e+30]"},
       {"loss.clip_high = inf", "loss.clip_high is inf"},
       {"loss.clip_low = 1.5",
        "loss.clip_low is 1.5, must be at most loss.clip_high 1.2"},
       {"loss.clip_high = 0.5",
        "loss.clip_low is 0.8, must be at most loss.clip_high 0.5"},
       {"loss.beta = -1", "loss.beta is -1"},
       {"loss.gradient_filter = 1",
        "loss.gradient_filter is 1, must be in [0, 1)"},
       {"loss.temperature = 0",
        "loss.temperature is 0, must be in [1e-08, 1e+08]"}});
}

TEST(RefusalTest, Teacher) {
  ExpectRefusals<Train>(
      GoodDistillation(),
      {{"clear loss.teacher",
        "loss.teacher must have base_model or adapter_id, and not both"},
       {"loss.teacher.base_model = true",
        "loss.teacher must have base_model or adapter_id, and not both"},
       {"loss.teacher.adapter_id = 'a/b'",
        "loss.teacher.adapter_id is \"a/b\", must match"},
       {"loss.teacher.snapshot = 'a/b'",
        "loss.teacher.snapshot is \"a/b\", must match"},
       {"clear loss.teacher.adapter_id; loss.teacher.base_model = true; "
        "loss.teacher.snapshot = 's'",
        "loss.teacher.snapshot is set, but the base model has no snapshots"},
       {"loss.function = LOSS_FUNCTION_CROSS_ENTROPY",
        "loss.teacher is set, must be absent for every loss but forward_kl, "
        "reverse_kl and js"},
       {"loss.gradient_filter = 0.1",
        "loss.gradient_filter is 0.1, must be 0 for a loss with a teacher"},
       {"loss.score_all = true",
        "loss.score_all is set, must be false for a loss with a teacher"},
       {"loss.beta = 0", "loss.beta is 0, must be in (0, 1)"},
       {"loss.beta = 1", "loss.beta is 1, must be in (0, 1)"}});
  const Train reverse =
      Edited(GoodDistillation(), "loss.function = LOSS_FUNCTION_REVERSE_KL");
  EXPECT_EQ(Validate(GoodDistillation(), Limits())->loss.beta, 0.5);
  EXPECT_EQ(Validate(reverse, Limits())->loss.teacher.adapter_id, "b");
}

TEST(RefusalTest, TeacherTokens) {
  ExpectRefusals<Train>(
      GoodDistillation(),
      {{"data[0].teacher_tokens[1] = 100",
        "data[0].teacher_tokens[1] is 100, must be in [0, 100)"},
       {"data[0].teacher_tokens_le = '\\0' * 4",
        "data[0].teacher_tokens and data[0].teacher_tokens_le are both set"},
       {"clear data[0].teacher_tokens; data[0].teacher_tokens_le = 'abc'",
        "data[0].teacher_tokens_le has 3 bytes, must be a multiple of 4"},
       {"data[0].teacher_tokens = 1 * 33",
        "data[0].teacher_tokens has 33 values, must be in [1, context length "
        "32]"},
       {"loss.function = LOSS_FUNCTION_FORWARD_KL; "
        "clear data[0].teacher_tokens; data[0].tokens = 1 * 21; "
        "data[0].targets = 1 * 21; clear data[0].weights",
        "data has more than 40 tokens at data[0]"},
       {"clear loss.teacher; loss.function = LOSS_FUNCTION_CROSS_ENTROPY",
        "data[0].teacher_tokens has 4 values, must be empty for every loss but "
        "forward_kl, reverse_kl and js"},
       {"clear data[0].teacher_tokens; data[0].teacher_offset = 1",
        "data[0].teacher_offset is 1, must be absent without teacher_tokens"},
       {"data[0].teacher_offset = 2",
        "data[0].teacher_offset is 2, which pairs tokens[2] with "
        "teacher_tokens[4], must be in [-2, 1], or the token have weight 0"},
       {"data[0].teacher_offset = -2",
        "data[0].teacher_offset is -2, which pairs tokens[1] with "
        "teacher_tokens[-1], must be in [-1, 2]"},
       {"data[0].teacher_offset = 2147483647",
        "data[0].teacher_offset is 2147483647, which pairs tokens[1]"},
       {"data[0].teacher_offset = 0",
        "data[0].teacher_offset is 0, which pairs tokens[2] with "
        "teacher_tokens[2], which are 3 and 2, must pair equal tokens"},
       {"data[0].targets_per_token = 2; data[0].targets = 1 * 6; "
        "data[0].weights = 1 * 6",
        "data[0].targets_per_token is 2, must be 0 or 1 for every loss but "
        "cross_entropy and custom"},
       {"data[0].support_offsets_le = '\\0' * 16",
        "data[0].support_offsets_le is set, but losses with a teacher"},
       {"loss.replay_support = true",
        "loss.replay_support is set, but losses with a teacher"}});
  EXPECT_EQ(Validate(GoodDistillation(), Limits())->data[0].teacher_offset, 1);
  // The first token that is compared may differ: it ends a prompt.
  const Train ends_prompt =
      Edited(GoodDistillation(), "data[0].teacher_tokens[2] = 7");
  EXPECT_TRUE(Validate(ends_prompt, Limits()).ok());
}

TEST(RefusalTest, Forward) {
  v1::ForwardRequest good;
  *good.mutable_data() = GoodTrain().data();
  *good.mutable_loss() = GoodTrain().loss();
  ExpectRefusals<v1::ForwardRequest>(
      good, {{"step = 3", "step is 3, must be 0 for the base model"},
             {"adapter_id = 'a/b'", "adapter_id is \"a/b\", must match"},
             {"clear data", "data has 0 sequences"}});
}

TEST(RefusalTest, OptimStep) {
  using Optim = v1::OptimStepRequest;
  const Optim good = Edited(Optim(), "adapter_id = 'a'");
  ExpectRefusals<Optim>(
      good, {{"clear adapter_id", "adapter_id is required"},
             {"adamw.learning_rate = -1e-4",
              "adamw.learning_rate is -0.0001, must be in [0, 1000]"},
             {"adamw.beta1 = 1", "adamw.beta1 is 1, must be in [0, 1)"},
             {"adamw.beta2 = 1", "adamw.beta2 is 1, must be in [0, 1)"},
             {"adamw.eps = 0", "adamw.eps is 0, must be in [1e-37, 1e+06]"},
             {"adamw.weight_decay = -1", "adamw.weight_decay is -1"},
             {"adamw.max_grad_norm = -1",
              "adamw.max_grad_norm is -1, must be in [0, 1e+30]"}});
  ExpectRefusals<Optim>(
      good, {{"muon = {}; adamw = {}",
              "muon is set beside adamw: leave one of them out"},
             {"discard = true; muon = {}",
              "discard is set beside muon: leave one of them out"},
             {"discard = true; adamw = {}", "discard is set beside adamw"},
             {"muon.learning_rate = -1e-4",
              "muon.learning_rate is -0.0001, must be in [0, 1000]"},
             {"muon.momentum = 1", "muon.momentum is 1, must be in [0, 1)"},
             {"muon.weight_decay = inf", "muon.weight_decay is inf"},
             {"muon.ns_steps = 0", "muon.ns_steps is 0, must be in [1, 10]"},
             {"muon.max_grad_norm = -1",
              "muon.max_grad_norm is -1, must be in [0, 1e+30]"}});
}

TEST(RefusalTest, ReportMetrics) {
  ExpectRefusals<v1::ReportMetricsRequest>(
      Edited(v1::ReportMetricsRequest(),
             "adapter_id = 'a'; metrics += {key: 'loss', value: nan}"),
      {{"clear adapter_id", "adapter_id is required"},
       {"clear metrics", "the number of metrics is 0, must be in [1, 8]"},
       {"metrics += {key: 'a b', value: 1}", "metrics is \"a b\", must match"},
       {"names",
        [](auto& r) {
          for (int i = 0; i < 8; ++i) {
            (*r.mutable_metrics())[std::to_string(i)] = 1;
          }
        },
        "the number of metrics is 9, must be in [1, 8]"}});
}

}  // namespace
}  // namespace weft::server
