// Tests every refusal of TrainingService: its cause, its code and its message.
#include <cmath>
#include <cstdint>
#include <string>

#include "tests/server/refusals.h"

namespace weft {
namespace {

using Train = v1::ForwardBackwardRequest;

TEST(RefusalTest, ForwardBackwardData) {
  const auto datum = [](Train& r) { return r.mutable_data(0); };
  ExpectRefusals<Train>(
      GoodTrain(),
      {{"no adapter", [](Train& r) { r.clear_adapter_id(); },
        "adapter_id is required"},
       {"no data", [](Train& r) { r.clear_data(); },
        "data has 0 sequences, must be in [1, 3]"},
       {"much data",
        [](Train& r) {
          for (int i = 0; i < 3; ++i) *r.add_data() = GoodTrain().data(0);
        },
        "data has 4 sequences, must be in [1, 3]"},
       {"empty sequence", [=](Train& r) { datum(r)->Clear(); },
        "data[0].tokens is empty"},
       {"second sequence", [](Train& r) { r.add_data(); },
        "data[1].tokens is empty"},
       {"too long",
        [=](Train& r) {
          for (int i = 0; i < 30; ++i) datum(r)->add_tokens(1);
        },
        "data[0].tokens has 33 values, must be in [1, context length 32]"},
       {"too many tokens",
        [](Train& r) {
          r.mutable_data(0)->mutable_tokens()->Resize(20, 1);
          r.mutable_data(0)->mutable_targets()->Resize(20, 1);
          r.mutable_data(0)->mutable_weights()->Resize(20, 1);
          r.mutable_data(0)->mutable_logprobs()->Resize(20, 0);
          r.mutable_data(0)->mutable_advantages()->Resize(20, 0);
          *r.add_data() = r.data(0);
          *r.add_data() = GoodTrain().data(0);
        },
        "data has more than 40 tokens at data[2]"},
       {"token = vocabulary", [=](Train& r) { datum(r)->set_tokens(2, 100); },
        "data[0].tokens[2] is 100, must be in [0, 100)"},
       {"token 2^31", [=](Train& r) { datum(r)->set_tokens(1, 1u << 31); },
        "data[0].tokens[1] is 2147483648, must be in [0, 100)"},
       {"token -1", [=](Train& r) { datum(r)->set_tokens(0, UINT32_MAX); },
        "data[0].tokens[0] is 4294967295"},
       {"both forms",
        [=](Train& r) { datum(r)->set_tokens_le(std::string(12, '\0')); },
        "data[0].tokens and data[0].tokens_le are both set"},
       {"ragged raw",
        [=](Train& r) {
          datum(r)->clear_tokens();
          datum(r)->set_tokens_le("abcde");
        },
        "data[0].tokens_le has 5 bytes, must be a multiple of 4"},
       {"raw token out of range",
        [=](Train& r) {
          datum(r)->clear_tokens();
          datum(r)->set_tokens_le(
              std::string("\0\0\0\0\0\0\0\0\x64\0\0\0", 12));
        },
        "data[0].tokens[2] is 100"},
       {"few targets",
        [=](Train& r) { datum(r)->mutable_targets()->RemoveLast(); },
        "data[0].targets has 2 values, must have 3"},
       {"no targets", [=](Train& r) { datum(r)->clear_targets(); },
        "data[0].targets has 0 values, must have 3"},
       {"many targets", [=](Train& r) { datum(r)->add_targets(1); },
        "data[0].targets has 4 values, must have 3"},
       {"target out of range", [=](Train& r) { datum(r)->set_targets(1, 100); },
        "data[0].targets[1] is 100, must be in [0, 100)"},
       {"targets both forms",
        [=](Train& r) { datum(r)->set_targets_le(std::string(12, '\0')); },
        "data[0].targets and data[0].targets_le are both set"},
       {"targets ragged raw", [=](Train& r) { datum(r)->set_targets_le("x"); },
        "data[0].targets and"},
       {"soft targets in ppo",
        [=](Train& r) { datum(r)->set_targets_per_token(2); },
        "data[0].targets_per_token is 2, must be 0 or 1"},
       {"weights length", [=](Train& r) { datum(r)->add_weights(1); },
        "data[0].weights has 4 values, must have 3"},
       {"weight nan", [=](Train& r) { datum(r)->set_weights(2, NAN); },
        "data[0].weights[2] is nan, must be finite"},
       {"weight inf", [=](Train& r) { datum(r)->set_weights(0, INFINITY); },
        "data[0].weights[0] is inf, must be finite"},
       {"weights both forms",
        [=](Train& r) { datum(r)->set_weights_le(std::string(12, '\0')); },
        "data[0].weights and data[0].weights_le are both set"},
       {"weights raw ragged",
        [=](Train& r) {
          datum(r)->clear_weights();
          datum(r)->set_weights_le("abc");
        },
        "data[0].weights_le has 3 bytes"},
       {"no logprobs", [=](Train& r) { datum(r)->clear_logprobs(); },
        "data[0].logprobs has 0 values, must have 3"},
       {"logprob > 0", [=](Train& r) { datum(r)->set_logprobs(1, 0.5F); },
        "data[0].logprobs[1] is 0.5, must be at most 0"},
       {"logprob -inf", [=](Train& r) { datum(r)->set_logprobs(1, -INFINITY); },
        "data[0].logprobs[1] is -inf, must be finite"},
       {"logprob nan", [=](Train& r) { datum(r)->set_logprobs(0, NAN); },
        "data[0].logprobs[0] is nan"},
       {"no advantages", [=](Train& r) { datum(r)->clear_advantages(); },
        "data[0].advantages has 0 values, must have 3"},
       {"advantage inf",
        [=](Train& r) { datum(r)->set_advantages(2, INFINITY); },
        "data[0].advantages[2] is inf, must be finite"},
       {"advantages both forms",
        [=](Train& r) { datum(r)->set_advantages_le(std::string(12, '\0')); },
        "data[0].advantages and data[0].advantages_le are both set"}});
}

// Routes three tokens in two layers, to two experts each.
std::string GoodRouting() {
  const std::vector<uint16_t> experts = {0, 1, 2, 3, 5, 4, 1, 0, 0, 5, 4, 3};
  return {reinterpret_cast<const char*>(experts.data()), 2 * experts.size()};
}

TEST(RefusalTest, SampledSpans) {
  Train good = GoodTrain();
  v1::Datum* const datum = good.mutable_data(0);
  datum->clear_logprobs();
  good.mutable_loss()->set_replay_logprobs(true);
  good.mutable_loss()->set_replay_routing(true);
  good.mutable_loss()->set_replay_support(true);
  for (const uint32_t start : {0, 2}) {
    v1::SampledSpan* const span = datum->add_sampled_spans();
    span->set_sequence_id("record:1");
    span->set_offset(7);
    span->set_start(start);
    span->set_length(1);
  }
  const auto span = [](Train& r, int i) {
    return r.mutable_data(0)->mutable_sampled_spans(i);
  };
  const auto read = Validate(good, Limits());
  ASSERT_TRUE(read.ok()) << read.status();
  const SampledSpan second{
      .sequence_id = "record:1", .offset = 7, .start = 2, .length = 1};
  ASSERT_EQ(read->replay.spans.size(), 1);
  EXPECT_EQ(read->replay.spans[0][1], second);
  EXPECT_TRUE(read->replay.routing && read->replay.support &&
              read->replay.logprobs);
  EXPECT_FALSE(read->replay.optional);
  ExpectRefusals<Train>(
      good,
      {{"no id", [=](Train& r) { span(r, 0)->clear_sequence_id(); },
        "data[0].sampled_spans[0].sequence_id is \"\", must be a "
        "Sample.sequence_id"},
       {"an id with a space",
        [=](Train& r) { span(r, 1)->set_sequence_id("a b:1"); },
        "data[0].sampled_spans[1].sequence_id is \"a b:1\""},
       {"a long id",
        [=](Train& r) { span(r, 0)->set_sequence_id(std::string(513, 'x')); },
        "data[0].sampled_spans[0].sequence_id is"},
       {"overlap", [=](Train& r) { span(r, 0)->set_length(3); },
        "data[0].sampled_spans[1].start is 2, must be at least 3"},
       {"one span in two",
        [=](Train& r) {
          span(r, 1)->set_start(1);
          span(r, 1)->set_offset(8);
        },
        "data[0].sampled_spans[1] continues the span before"},
       {"too many",
        [=](Train& r) {
          auto& spans = *r.mutable_data(0)->mutable_sampled_spans();
          while (spans.size() < 1025) *spans.Add() = spans[0];
        },
        "data[0].sampled_spans has 1025 values, must be at most 1024"},
       {"empty", [=](Train& r) { span(r, 1)->set_length(0); },
        "data[0].sampled_spans[1].length is 0"},
       {"behind the end", [=](Train& r) { span(r, 1)->set_length(2); },
        "data[0].sampled_spans[1].length is 2 at start 2, must be at least 1 "
        "and end within the 3 targets"},
       {"start 2^32 - 1", [=](Train& r) { span(r, 1)->set_start(UINT32_MAX); },
        "data[0].sampled_spans[1].length is 1 at start 4294967295"},
       {"no switch",
        [=](Train& r) {
          r.mutable_loss()->clear_replay_logprobs();
          r.mutable_loss()->clear_replay_routing();
          r.mutable_loss()->clear_replay_support();
        },
        "data[0].sampled_spans is set, but no switch of loss uses it"},
       {"no spans", [=](Train& r) { *r.mutable_data(0) = GoodTrain().data(0); },
        "loss.replay_routing is set, but no datum has sampled_spans"},
       {"no logprobs",
        [=](Train& r) { r.mutable_loss()->clear_replay_logprobs(); },
        "data[0].logprobs is empty: send it, or set loss.replay_logprobs"},
       {"few logprobs", [=](Train& r) { r.mutable_data(0)->add_logprobs(-1); },
        "data[0].logprobs has 1 values, must have 3"},
       {"soft targets",
        [=](Train& r) {
          r.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
          r.mutable_data(0)->set_targets_per_token(2);
          for (int i = 0; i < 3; ++i) {
            r.mutable_data(0)->add_targets(1);
            r.mutable_data(0)->add_weights(1);
          }
        },
        "data[0].sampled_spans is set, but tokens have several targets"},
       {"routing twice",
        [=](Train& r) { r.mutable_data(0)->set_routing_le(GoodRouting()); },
        "data[0].routing_le is set, but loss.replay_routing replaces it"},
       {"support twice",
        [=](Train& r) {
          r.mutable_data(0)->set_support_offsets_le(std::string(16, '\0'));
        },
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
  v1::SampleRequest sample;
  sample.add_prompt(1);
  sample.set_return_routing(true);
  EXPECT_TRUE(Validate(sample, Limits())->return_routing);
  EXPECT_EQ(Validate(sample, dense).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RefusalTest, Loss) {
  const auto loss = [](Train& r) { return r.mutable_loss(); };
  ExpectRefusals<Train>(
      GoodTrain(),
      {{"no loss", [](Train& r) { r.clear_loss(); }, "loss is required"},
       {"no function", [=](Train& r) { loss(r)->clear_function(); },
        "loss.function is required"},
       {"unknown function",
        [=](Train& r) {
          loss(r)->set_function(static_cast<v1::LossFunction>(99));
        },
        "loss.function is 99, must be a known LossFunction"},
       {"clip_low < 0", [=](Train& r) { loss(r)->set_clip_low(-0.1); },
        "loss.clip_low is -0.1, must be in [0, 1e+30]"},
       {"clip_low nan", [=](Train& r) { loss(r)->set_clip_low(kNan); },
        "loss.clip_low is nan"},
       {"clip_high inf", [=](Train& r) { loss(r)->set_clip_high(kInf); },
        "loss.clip_high is inf"},
       {"clip order", [=](Train& r) { loss(r)->set_clip_low(1.5); },
        "loss.clip_low is 1.5, must be at most loss.clip_high 1.2"},
       {"clip_high below the default low",
        [=](Train& r) { loss(r)->set_clip_high(0.5); },
        "loss.clip_low is 0.8, must be at most loss.clip_high 0.5"},
       {"clip bounds reversed",
        [=](Train& r) {
          loss(r)->set_clip_low(3);
          loss(r)->set_clip_high(2);
        },
        "loss.clip_low is 3, must be at most loss.clip_high 2"},
       {"beta < 0", [=](Train& r) { loss(r)->set_beta(-1); },
        "loss.beta is -1"},
       {"beta nan", [=](Train& r) { loss(r)->set_beta(kNan); },
        "loss.beta is nan"},
       {"gradient_filter 1", [=](Train& r) { loss(r)->set_gradient_filter(1); },
        "loss.gradient_filter is 1, must be in [0, 1)"},
       {"gradient_filter nan",
        [=](Train& r) { loss(r)->set_gradient_filter(kNan); },
        "loss.gradient_filter is nan"},
       {"temperature 0", [=](Train& r) { loss(r)->set_temperature(0); },
        "loss.temperature is 0, must be in [1e-08, 1e+08]"},
       {"temperature < 0", [=](Train& r) { loss(r)->set_temperature(-1); },
        "loss.temperature is -1"},
       {"temperature inf", [=](Train& r) { loss(r)->set_temperature(kInf); },
        "loss.temperature is inf"},
       {"temperature nan", [=](Train& r) { loss(r)->set_temperature(kNan); },
        "loss.temperature is nan"},
       {"temperature tiny", [=](Train& r) { loss(r)->set_temperature(1e-30); },
        "loss.temperature is 1e-30"},
       {"temperature huge", [=](Train& r) { loss(r)->set_temperature(1e30); },
        "loss.temperature is 1e+30"}});
}

TEST(RefusalTest, Teacher) {
  const auto loss = [](Train& r) { return r.mutable_loss(); };
  const auto teacher = [](Train& r) {
    return r.mutable_loss()->mutable_teacher();
  };
  ExpectRefusals<Train>(
      GoodDistillation(),
      {{"no teacher", [=](Train& r) { loss(r)->clear_teacher(); },
        "loss.teacher must have base_model or adapter_id, and not both"},
       {"two teachers", [=](Train& r) { teacher(r)->set_base_model(true); },
        "loss.teacher must have base_model or adapter_id, and not both"},
       {"bad adapter", [=](Train& r) { teacher(r)->set_adapter_id("a/b"); },
        "loss.teacher.adapter_id is \"a/b\", must match"},
       {"bad snapshot", [=](Train& r) { teacher(r)->set_snapshot("a/b"); },
        "loss.teacher.snapshot is \"a/b\", must match"},
       {"snapshot of the base",
        [=](Train& r) {
          teacher(r)->clear_adapter_id();
          teacher(r)->set_base_model(true);
          teacher(r)->set_snapshot("s");
        },
        "loss.teacher.snapshot is set, but the base model has no snapshots"},
       {"another loss",
        [=](Train& r) {
          loss(r)->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
        },
        "loss.teacher is set, must be absent for every loss but forward_kl, "
        "reverse_kl and js"},
       {"gradient_filter", [=](Train& r) { loss(r)->set_gradient_filter(0.1); },
        "loss.gradient_filter is 0.1, must be 0 for a loss with a teacher"},
       {"score_all", [=](Train& r) { loss(r)->set_score_all(true); },
        "loss.score_all is set, must be false for a loss with a teacher"},
       {"beta 0", [=](Train& r) { loss(r)->set_beta(0); },
        "loss.beta is 0, must be in (0, 1)"},
       {"beta 1", [=](Train& r) { loss(r)->set_beta(1); },
        "loss.beta is 1, must be in (0, 1)"}});
  Train good = GoodDistillation();
  EXPECT_EQ(Validate(good, Limits())->loss.beta, 0.5);
  good.mutable_loss()->set_function(v1::LOSS_FUNCTION_REVERSE_KL);
  EXPECT_EQ(Validate(good, Limits())->loss.teacher.adapter_id, "b");
}

TEST(RefusalTest, TeacherTokens) {
  const auto datum = [](Train& r) { return r.mutable_data(0); };
  ExpectRefusals<Train>(
      GoodDistillation(),
      {{"id", [=](Train& r) { datum(r)->set_teacher_tokens(1, 100); },
        "data[0].teacher_tokens[1] is 100, must be in [0, 100)"},
       {"both forms",
        [=](Train& r) { datum(r)->set_teacher_tokens_le(std::string(4, 0)); },
        "data[0].teacher_tokens and data[0].teacher_tokens_le are both set"},
       {"half a token",
        [=](Train& r) {
          datum(r)->clear_teacher_tokens();
          datum(r)->set_teacher_tokens_le("abc");
        },
        "data[0].teacher_tokens_le has 3 bytes, must be a multiple of 4"},
       {"too long",
        [=](Train& r) { datum(r)->mutable_teacher_tokens()->Resize(33, 1); },
        "data[0].teacher_tokens has 33 values, must be in [1, context length "
        "32]"},
       {"too many in all",
        [=](Train& r) {
          r.mutable_loss()->set_function(v1::LOSS_FUNCTION_FORWARD_KL);
          datum(r)->clear_teacher_tokens();
          datum(r)->mutable_tokens()->Resize(21, 1);
          datum(r)->mutable_targets()->Resize(21, 1);
          datum(r)->clear_weights();
        },
        "data has more than 40 tokens at data[0]"},
       {"no teacher",
        [=](Train& r) {
          r.mutable_loss()->clear_teacher();
          r.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
        },
        "data[0].teacher_tokens has 4 values, must be empty for every loss but "
        "forward_kl, reverse_kl and js"},
       {"offset alone",
        [=](Train& r) {
          datum(r)->clear_teacher_tokens();
          datum(r)->set_teacher_offset(1);
        },
        "data[0].teacher_offset is 1, must be absent without teacher_tokens"},
       {"beyond the end", [=](Train& r) { datum(r)->set_teacher_offset(2); },
        "data[0].teacher_offset is 2, which pairs tokens[2] with "
        "teacher_tokens[4], must be in [-2, 1], or the token have weight 0"},
       {"before the start", [=](Train& r) { datum(r)->set_teacher_offset(-2); },
        "data[0].teacher_offset is -2, which pairs tokens[1] with "
        "teacher_tokens[-1], must be in [-1, 2]"},
       {"far away", [=](Train& r) { datum(r)->set_teacher_offset(2147483647); },
        "data[0].teacher_offset is 2147483647, which pairs tokens[1]"},
       {"other tokens", [=](Train& r) { datum(r)->set_teacher_offset(0); },
        "data[0].teacher_offset is 0, which pairs tokens[2] with "
        "teacher_tokens[2], which are 3 and 2, must pair equal tokens"},
       {"two targets a token",
        [=](Train& r) {
          datum(r)->set_targets_per_token(2);
          datum(r)->mutable_targets()->Resize(6, 1);
          datum(r)->mutable_weights()->Resize(6, 1);
        },
        "data[0].targets_per_token is 2, must be 0 or 1 for every loss but "
        "cross_entropy and custom"},
       {"support",
        [=](Train& r) {
          datum(r)->set_support_offsets_le(std::string(16, '\0'));
        },
        "data[0].support_offsets_le is set, but losses with a teacher"},
       {"replay of supports",
        [](Train& r) { r.mutable_loss()->set_replay_support(true); },
        "loss.replay_support is set, but losses with a teacher"}});
  EXPECT_EQ(Validate(GoodDistillation(), Limits())->data[0].teacher_offset, 1);
  // The first token that is compared may differ: it ends a prompt.
  Train ends_prompt = GoodDistillation();
  ends_prompt.mutable_data(0)->set_teacher_tokens(2, 7);
  EXPECT_TRUE(Validate(ends_prompt, Limits()).ok());
}

TEST(RefusalTest, Forward) {
  v1::ForwardRequest good;
  *good.mutable_data() = GoodTrain().data();
  *good.mutable_loss() = GoodTrain().loss();
  ExpectRefusals<v1::ForwardRequest>(
      good,
      {{"step without adapter", [](auto& r) { r.set_step(3); },
        "step is 3, must be 0 for the base model"},
       {"bad adapter", [](auto& r) { r.set_adapter_id("a/b"); },
        "adapter_id is \"a/b\", must match"},
       {"no data", [](auto& r) { r.clear_data(); }, "data has 0 sequences"}});
}

TEST(RefusalTest, OptimStep) {
  using Optim = v1::OptimStepRequest;
  Optim good;
  good.set_adapter_id("a");
  const auto adamw = [](Optim& r) { return r.mutable_adamw(); };
  ExpectRefusals<Optim>(
      good, {{"no adapter", [](Optim& r) { r.clear_adapter_id(); },
              "adapter_id is required"},
             {"lr < 0", [=](Optim& r) { adamw(r)->set_learning_rate(-1e-4); },
              "adamw.learning_rate is -0.0001, must be in [0, 1000]"},
             {"lr nan", [=](Optim& r) { adamw(r)->set_learning_rate(kNan); },
              "adamw.learning_rate is nan"},
             {"lr 1e30", [=](Optim& r) { adamw(r)->set_learning_rate(1e30); },
              "adamw.learning_rate is 1e+30"},
             {"beta1 = 1", [=](Optim& r) { adamw(r)->set_beta1(1); },
              "adamw.beta1 is 1, must be in [0, 1)"},
             {"beta1 < 0", [=](Optim& r) { adamw(r)->set_beta1(-0.1); },
              "adamw.beta1 is -0.1"},
             {"beta2 = 1", [=](Optim& r) { adamw(r)->set_beta2(1); },
              "adamw.beta2 is 1, must be in [0, 1)"},
             {"beta2 nan", [=](Optim& r) { adamw(r)->set_beta2(kNan); },
              "adamw.beta2 is nan"},
             {"eps 0", [=](Optim& r) { adamw(r)->set_eps(0); },
              "adamw.eps is 0, must be in [1e-37, 1e+06]"},
             {"eps denormal", [=](Optim& r) { adamw(r)->set_eps(1e-300); },
              "adamw.eps is 1e-300"},
             {"eps inf", [=](Optim& r) { adamw(r)->set_eps(kInf); },
              "adamw.eps is inf"},
             {"decay < 0", [=](Optim& r) { adamw(r)->set_weight_decay(-1); },
              "adamw.weight_decay is -1"},
             {"decay inf", [=](Optim& r) { adamw(r)->set_weight_decay(kInf); },
              "adamw.weight_decay is inf"},
             {"clip -1", [=](Optim& r) { adamw(r)->set_max_grad_norm(-1); },
              "adamw.max_grad_norm is -1, must be in [0, 1e+30]"},
             {"clip nan", [=](Optim& r) { adamw(r)->set_max_grad_norm(kNan); },
              "adamw.max_grad_norm is nan"}});
  const auto muon = [](Optim& r) { return r.mutable_muon(); };
  ExpectRefusals<Optim>(
      good, {{"both",
              [=](Optim& r) {
                muon(r);
                adamw(r);
              },
              "muon is set beside adamw: leave one of them out"},
             {"lr < 0", [=](Optim& r) { muon(r)->set_learning_rate(-1e-4); },
              "muon.learning_rate is -0.0001, must be in [0, 1000]"},
             {"momentum 1", [=](Optim& r) { muon(r)->set_momentum(1); },
              "muon.momentum is 1, must be in [0, 1)"},
             {"momentum nan", [=](Optim& r) { muon(r)->set_momentum(kNan); },
              "muon.momentum is nan"},
             {"decay inf", [=](Optim& r) { muon(r)->set_weight_decay(kInf); },
              "muon.weight_decay is inf"},
             {"no steps", [=](Optim& r) { muon(r)->set_ns_steps(0); },
              "muon.ns_steps is 0, must be in [1, 10]"},
             {"11 steps", [=](Optim& r) { muon(r)->set_ns_steps(11); },
              "muon.ns_steps is 11, must be in [1, 10]"},
             {"clip -1", [=](Optim& r) { muon(r)->set_max_grad_norm(-1); },
              "muon.max_grad_norm is -1, must be in [0, 1e+30]"}});
}

}  // namespace
}  // namespace weft
