// Every refusal: what makes it, its code and its message.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/request_validation.h"

namespace weft {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

RequestLimits Limits() {
  return {.vocab_size = 100,
          .context_length = 32,
          .max_rank = 64,
          .has_byte_decoder = false,
          .max_data = 3,
          .max_tokens = 40,
          .max_samples = 8};
}

// A valid message, what spoils it, and how the refusal begins.
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

v1::ForwardBackwardRequest GoodTrain() {
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

TEST(RefusalTest, SoftTargets) {
  Train good = GoodTrain();
  good.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
  good.mutable_data(0)->clear_weights();
  good.mutable_data(0)->set_targets_per_token(2);
  for (int i = 0; i < 3; ++i) good.mutable_data(0)->add_targets(5);
  ExpectRefusals<Train>(
      good,
      {{"one short",
        [](Train& r) { r.mutable_data(0)->mutable_targets()->RemoveLast(); },
        "data[0].targets has 5 values, must have 6 (3 tokens, 2 targets"},
       {"weights [N]",
        [](Train& r) { r.mutable_data(0)->mutable_weights()->Resize(3, 1); },
        "data[0].weights has 3 values, must have 6"},
       {"more than the vocabulary",
        [](Train& r) { r.mutable_data(0)->set_targets_per_token(101); },
        "data[0].targets_per_token is 101, must be in [0, 100]"},
       {"4 billion",
        [](Train& r) { r.mutable_data(0)->set_targets_per_token(UINT32_MAX); },
        "data[0].targets_per_token is 4294967295"}});
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
       {"beta < 0", [=](Train& r) { loss(r)->set_beta(-1); },
        "loss.beta is -1"},
       {"beta nan", [=](Train& r) { loss(r)->set_beta(kNan); },
        "loss.beta is nan"},
       {"temperature 0", [=](Train& r) { loss(r)->set_temperature(0); },
        "loss.temperature is 0, must be in [1e-08, 1e+08]"},
       {"temperature < 0", [=](Train& r) { loss(r)->set_temperature(-1); },
        "loss.temperature is -1"},
       {"temperature nan", [=](Train& r) { loss(r)->set_temperature(kNan); },
        "loss.temperature is nan"},
       {"temperature tiny", [=](Train& r) { loss(r)->set_temperature(1e-30); },
        "loss.temperature is 1e-30"},
       {"temperature huge", [=](Train& r) { loss(r)->set_temperature(1e30); },
        "loss.temperature is 1e+30"}});
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
}

v1::SampleRequest GoodSample() {
  v1::SampleRequest request;
  request.set_adapter_id("a");
  request.set_snapshot("best");
  for (const uint32_t token : {1, 2, 3}) request.add_prompt(token);
  return request;
}

using Ask = v1::SampleRequest;

TEST(RefusalTest, Sample) {
  const auto config = [](Ask& r) { return r.mutable_config(); };
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"bad adapter", [](Ask& r) { r.set_adapter_id(".."); },
        "adapter_id is \"..\""},
       {"snapshot of base", [](Ask& r) { r.clear_adapter_id(); },
        "adapter_id is required with a snapshot"},
       {"bad snapshot", [](Ask& r) { r.set_snapshot("x."); },
        "snapshot is \"x.\""},
       {"no prompt", [](Ask& r) { r.clear_prompt(); },
        "prompt has 0 values, must be in [1, context length 32)"},
       {"prompt = context", [](Ask& r) { r.mutable_prompt()->Resize(32, 1); },
        "prompt has 32 values"},
       {"prompt id", [](Ask& r) { r.set_prompt(1, 100); },
        "prompt[1] is 100, must be in [0, 100)"},
       {"many samples", [](Ask& r) { r.set_num_samples(9); },
        "num_samples is 9, must be in [1, 8]"},
       {"10^6 samples", [](Ask& r) { r.set_num_samples(1000000); },
        "num_samples is 1000000"},
       {"top_logprobs 21", [](Ask& r) { r.set_top_logprobs(21); },
        "top_logprobs is 21, must be in [0, 20]"},
       {"max_tokens > room", [=](Ask& r) { config(r)->set_max_tokens(30); },
        "config.max_tokens is 30, must be in [1, 29]"},
       {"max_tokens -1", [=](Ask& r) { config(r)->set_max_tokens(UINT32_MAX); },
        "config.max_tokens is 4294967295"},
       {"temperature -1", [=](Ask& r) { config(r)->set_temperature(-1); },
        "config.temperature is -1, must be in [1e-08, 1e+08]"},
       {"temperature 1e-30", [=](Ask& r) { config(r)->set_temperature(1e-30); },
        "config.temperature is 1e-30"},
       {"temperature 1e30", [=](Ask& r) { config(r)->set_temperature(1e30); },
        "config.temperature is 1e+30"},
       {"temperature nan", [=](Ask& r) { config(r)->set_temperature(kNan); },
        "config.temperature is nan"},
       {"top_p 0", [=](Ask& r) { config(r)->set_top_p(0); },
        "config.top_p is 0, must be in (0, 1]"},
       {"top_p 1.1", [=](Ask& r) { config(r)->set_top_p(1.1); },
        "config.top_p is 1.1"},
       {"top_p nan", [=](Ask& r) { config(r)->set_top_p(kNan); },
        "config.top_p is nan"}});
}

TEST(RefusalTest, StopRules) {
  const auto stop = [](Ask& r) { return r.mutable_config()->mutable_stop(); };
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"10^4 entries",
        [=](Ask& r) { stop(r)->mutable_token_ids()->Resize(10000, 1); },
        "config.stop has 10000 entries, must be at most 64"},
       {"65 entries of all kinds",
        [=](Ask& r) {
          stop(r)->mutable_token_ids()->Resize(64, 1);
          stop(r)->add_byte_strings("x");
        },
        "config.stop has 65 entries"},
       {"id", [=](Ask& r) { stop(r)->add_token_ids(100); },
        "config.stop.token_ids[0] is 100"},
       {"empty sequence", [=](Ask& r) { stop(r)->add_token_sequences(); },
        "config.stop.token_sequences[0].tokens has 0 values, must be in [1"},
       {"long sequence",
        [=](Ask& r) {
          stop(r)->add_token_sequences()->mutable_tokens()->Resize(65, 1);
        },
        "config.stop.token_sequences[0].tokens has 65 values"},
       {"sequence id",
        [=](Ask& r) { stop(r)->add_token_sequences()->add_tokens(100); },
        "config.stop.token_sequences[0].tokens[0] is 100"},
       {"empty string", [=](Ask& r) { stop(r)->add_byte_strings(""); },
        "config.stop.byte_strings[0] has 0 bytes, must be in [1, 256]"},
       {"long string",
        [=](Ask& r) { stop(r)->add_byte_strings(std::string(257, 'x')); },
        "config.stop.byte_strings[0] has 257 bytes"},
       {"no tokenizer", [=](Ask& r) { stop(r)->add_byte_strings("x"); },
        "config.stop.byte_strings needs a byte-level tokenizer.json",
        absl::StatusCode::kFailedPrecondition}});
}

TEST(RefusalTest, CreateAdapter) {
  using Create = v1::CreateAdapterRequest;
  Create good;
  good.set_adapter_id("a");
  const auto config = [](Create& r) { return r.mutable_config(); };
  ExpectRefusals<Create>(
      good,
      {{"rank 65", [=](Create& r) { config(r)->set_rank(65); },
        "config.rank is 65, must be in [1, 64]"},
       {"rank -1", [=](Create& r) { config(r)->set_rank(UINT32_MAX); },
        "config.rank is 4294967295"},
       {"alpha 0", [=](Create& r) { config(r)->set_alpha(0); },
        "config.alpha is 0, must be in (0, 1e+06]"},
       {"alpha < 0", [=](Create& r) { config(r)->set_alpha(-1); },
        "config.alpha is -1"},
       {"alpha nan", [=](Create& r) { config(r)->set_alpha(kNan); },
        "config.alpha is nan"},
       {"alpha inf", [=](Create& r) { config(r)->set_alpha(kInf); },
        "config.alpha is inf"},
       {"unspecified target",
        [=](Create& r) {
          config(r)->add_target_modules(v1::TARGET_MODULE_UNSPECIFIED);
        },
        "config.target_modules[0] is 0, must be a known TargetModule"},
       {"unknown target",
        [=](Create& r) {
          config(r)->add_target_modules(static_cast<v1::TargetModule>(77));
        },
        "config.target_modules[0] is 77"},
       {"target twice",
        [=](Create& r) {
          config(r)->add_target_modules(v1::TARGET_MODULE_Q_PROJ);
          config(r)->add_target_modules(v1::TARGET_MODULE_Q_PROJ);
        },
        "config.target_modules[1] is q_proj again"}});
}

// Names that have broken other servers.
TEST(RefusalTest, BadNames) {
  const std::vector<std::string> names = {"",
                                          "..",
                                          ".",
                                          "../etc",
                                          "a/../b",
                                          " ..",
                                          ".. ",
                                          "/etc/passwd",
                                          "a/b",
                                          "a\\b",
                                          std::string("a\0b", 3),
                                          "a\tb",
                                          "a\nb",
                                          "a b",
                                          std::string(129, 'x'),
                                          "-rf",
                                          "_x",
                                          "\xF0\x9F\x98\x80",
                                          "\xE2\x80\xAEx",
                                          "%2e%2e",
                                          "a.",
                                          "a:b",
                                          "caf\xC3\xA9"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    v1::GetAdapterRequest request;
    request.set_adapter_id(name);
    const absl::Status status = Validate(request, Limits()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    // Control characters and foreign bytes come back escaped.
    for (const char c : status.message()) {
      EXPECT_GE(c, ' ');
      EXPECT_LE(c, '~');
    }
  }
  for (const std::string& name :
       {std::string("a"), std::string("CON"), std::string("0"),
        std::string("a.b-c_D"), std::string(128, 'x')}) {
    v1::GetAdapterRequest request;
    request.set_adapter_id(name);
    EXPECT_TRUE(Validate(request, Limits()).ok()) << name;
  }
}

TEST(RefusalTest, NamesOfEveryOtherMessage) {
  v1::SaveCheckpointRequest save;
  save.set_adapter_id("a");
  save.set_name("n");
  ExpectRefusals<v1::SaveCheckpointRequest>(
      save, {{"adapter", [](auto& r) { r.set_adapter_id("/"); }, "adapter_id"},
             {"name", [](auto& r) { r.set_name("../x"); }, "name is"}});
  v1::LoadCheckpointRequest load;
  load.set_adapter_id("a");
  load.set_name("n");
  ExpectRefusals<v1::LoadCheckpointRequest>(
      load,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"source", [](auto& r) { r.set_source_adapter_id("../b"); },
        "source_adapter_id is \"../b\""},
       {"name", [](auto& r) { r.clear_name(); }, "name is required"}});
  v1::DeleteCheckpointRequest erase;
  erase.set_adapter_id("a");
  erase.set_name("n");
  ExpectRefusals<v1::DeleteCheckpointRequest>(
      erase, {{"adapter", [](auto& r) { r.set_adapter_id(" "); }, "adapter_id"},
              {"name", [](auto& r) { r.set_name("."); }, "name is \".\""}});
  v1::PublishSnapshotRequest publish;
  publish.set_adapter_id("a");
  publish.set_name("n");
  ExpectRefusals<v1::PublishSnapshotRequest>(
      publish,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"name", [](auto& r) { r.clear_name(); }, "name is required"}});
  v1::ReleaseSnapshotRequest release;
  release.set_adapter_id("a");
  release.set_name("n");
  ExpectRefusals<v1::ReleaseSnapshotRequest>(
      release,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"name", [](auto& r) { r.set_name("a/b"); }, "name is \"a/b\""}});
  v1::ExportAdapterRequest exported;
  exported.set_adapter_id("a");
  ExpectRefusals<v1::ExportAdapterRequest>(
      exported,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"snapshot", [](auto& r) { r.set_snapshot("a/b"); }, "snapshot is"}});
  v1::DeleteAdapterRequest remove;
  remove.set_adapter_id("a");
  ExpectRefusals<v1::DeleteAdapterRequest>(
      remove, {{"adapter", [](auto& r) { r.set_adapter_id(".."); },
                "adapter_id is \"..\""}});
  ExpectRefusals<v1::ListCheckpointsRequest>(
      {}, {{"adapter", [](auto& r) { r.set_adapter_id("a/b"); },
            "adapter_id is \"a/b\""}});
  ExpectRefusals<v1::ListAdaptersRequest>(
      {}, {{"page size", [](auto& r) { r.set_page_size(1001); },
            "page_size is 1001, must be in [1, 1000]"},
           {"page token", [](auto& r) { r.set_page_token("../x"); },
            "page_token is \"../x\""}});
}

}  // namespace
}  // namespace weft
