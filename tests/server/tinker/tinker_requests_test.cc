// Tests what the Tinker front does with requests that name things: the base
// model, fields that are not offered, and keys of repeated requests.
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/request/sample_record.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kSave[] = "SaveCheckpoint";

class TinkerRequestsTest : public TinkerFrontTest {
 protected:
  Json NewModel(const std::string& base, int rank = 4) {
    return Result(Post("create_model", {{"session_id", NewSession()},
                                        {"model_seq_id", 0},
                                        {"base_model", base},
                                        {"lora_config", {{"rank", rank}}}}));
  }
  std::string Tokenizer(const std::string& model) {
    const Json info = Post("get_info", {{"model_id", model}});
    EXPECT_EQ(info["model_name"], "toy");
    EXPECT_EQ(info["model_data"]["model_name"],
              info["model_data"]["tokenizer_id"]);
    return info["model_data"]["tokenizer_id"];
  }
  // Returns the error of a step, which must have category user.
  std::string StepError(const std::string& path, Json body) {
    body["model_id"] = model_;
    body["seq_id"] = ++seq_;
    const Json result = Result(Post(path, body));
    EXPECT_EQ(result.value("category", ""), "user") << result;
    return result.value("error", "");
  }
  // Samples from the base model and returns the error.
  std::string SampleError(const Json& fields) {
    Json body = {{"base_model", "toy"}};
    body.update(fields);
    return Result(Sample(body)).value("error", "");
  }
  static Json TrainBody(const Json& input, const Json& targets,
                        const Json& config = Json::object()) {
    const Json datum = {{"model_input", input},
                        {"loss_fn_inputs", {{"target_tokens", targets}}}};
    return {{"forward_backward_input",
             {{"data", Json::array({datum})},
              {"loss_fn", config.value("loss_fn", "cross_entropy")},
              {"loss_fn_config", config.value("options", Json::object())}}}};
  }

  std::string model_;
  int seq_ = 0;
};

TEST_F(TinkerRequestsTest, AFieldThatIsNotOfferedIsRefusedAndNotIgnored) {
  Start();
  model_ = NewModel("toy")["model_id"];
  EXPECT_THAT(
      StepError("save_weights_external",
                {{"path", "x"}, {"age_encryption_recipients", {"age1"}}}),
      AllOf(StartsWith("age_encryption_recipients is not offered"),
            HasSubstr("not encrypted here: leave it out"),
            HasSubstr("weights.download")));
  EXPECT_EQ(Calls(kSave), 0);
  const Json none = Result(Post(
      "save_weights_external", {{"model_id", model_},
                                {"seq_id", ++seq_},
                                {"path", "x"},
                                {"age_encryption_recipients", Json::array()}}));
  EXPECT_TRUE(none.contains("path")) << none;
  EXPECT_EQ(Calls(kSave), 1);
  EXPECT_THAT(StepError("load_weights", {{"path", none["path"]},
                                         {"weights_access_token", "t"}}),
              HasSubstr("weights_access_token is not offered"));
  const HttpReply runs = Ask("GET", "training_runs?project_id=p");
  EXPECT_EQ(runs.status, 400);
  EXPECT_THAT(runs.body, HasSubstr("project_id is not offered"));
}

TEST_F(TinkerRequestsTest, DimuonIsMuonWithItsOwnFields) {
  const std::string session = StartSession();
  const Json body = {
      {"session_id", session},
      {"model_seq_id", 0},
      {"base_model", "toy"},
      {"lora_config", {{"rank", 4}}},
      {"optimizer_config", {{"type", "dimuon"}, {"version", 1}}}};
  model_ = Result(Post("create_model", body))["model_id"];
  EXPECT_EQ(Post("get_info", {{"model_id", model_}})["optimizer_config"],
            body["optimizer_config"]);
  const auto step = [this](const Json& params) {
    return Result(Post("optim_step", {{"model_id", model_},
                                      {"seq_id", ++seq_},
                                      {"optimizer_params", params}}));
  };
  Json params = {{"type", "dimuon"},
                 {"learning_rate", 0.25},
                 {"beta1", 0.5},
                 {"grad_clip_norm", 2}};
  EXPECT_TRUE(step(params).contains("metrics"));
  EXPECT_EQ(
      engine_->seen().last_optim.muon,
      (MuonConfig{.learning_rate = 0.25, .momentum = 0.5, .max_grad_norm = 2}));
  params["grad_clip_norm"] = -1;
  params.erase("beta1");
  EXPECT_TRUE(step(params).contains("metrics"));
  EXPECT_EQ(engine_->seen().last_optim.muon,
            (MuonConfig{.learning_rate = 0.25, .momentum = 0.9}));
  const std::string mixed = StepError("optim_step", {{"adam_params", {}}});
  EXPECT_THAT(mixed, StartsWith("adam_params: the model was made for the "
                                "optimizer dimuon, which is fixed"));
  EXPECT_THAT(StepError("optim_step", {{"adam_params", Json::object()},
                                       {"optimizer_params", params}}),
              StartsWith("optimizer_params is set beside adam_params"));
  const auto refusal = [&](const char* field, const Json& value) {
    Json bad = params;
    bad[field] = value;
    return StepError("optim_step", {{"optimizer_params", bad}});
  };
  EXPECT_THAT(refusal("beta1", 1), StartsWith("optimizer_params.beta1 is 1"));
  EXPECT_THAT(refusal("type", "sgd"), HasSubstr("use dimuon, or adam_params"));
  EXPECT_THAT(refusal("learning_rate", nullptr),
              StartsWith("optimizer_params.learning_rate is required"));
  EXPECT_THAT(refusal("nesterov", true),
              StartsWith("optimizer_params.nesterov is not a field of dimuon"));
}

TEST_F(TinkerRequestsTest, OptimizersThatAreNotOfferedAreRefused) {
  Start();
  const auto refusal = [this](const Json& config) {
    return Result(
        Post("create_model", {{"session_id", NewSession()},
                              {"model_seq_id", 0},
                              {"base_model", "toy"},
                              {"lora_config", {{"rank", 4}}},
                              {"optimizer_config", config}}))["error"];
  };
  EXPECT_EQ(refusal({{"type", "sgd"}}),
            "optimizer_config of type \"sgd\" is not offered: use adamw or "
            "dimuon");
  EXPECT_EQ(refusal({{"type", "dimuon"}, {"version", 2}}),
            "optimizer_config.version 2 is not offered: use 1");
  EXPECT_EQ(Result(Post("load_weights",
                        {{"session_id", NewSession()},
                         {"model_seq_id", 0},
                         {"path", "tinker://a/weights/b"},
                         {"optimizer", true},
                         {"optimizer_config", {{"type", "adamw"}}}}))["error"],
            "optimizer_config is set, but the checkpoint's optimizer is "
            "loaded: leave it out, or set optimizer to false");
  model_ = NewModel("toy")["model_id"];
  EXPECT_EQ(
      StepError("load_weights", {{"path", "tinker://a/weights/b"},
                                 {"optimizer_config", {{"type", "dimuon"}}}}),
      "optimizer_config is set, but the model has an optimizer: leave it "
      "out");
}

TEST_F(TinkerRequestsTest,
       StableReinforceIsRefusedIfTheOperatorDoesNotOfferIt) {
  ServerOptions options;
  options.tinker_stable_reinforce = false;
  Start(std::move(options));
  const std::string session = NewSession();
  model_ = NewModel("toy")["model_id"];
  const std::string refusal =
      "record_stability_info (loss stable_reinforce) is not offered by this "
      "server (--no-tinker-stable-reinforce): set loss_fn to "
      "importance_sampling, ppo, cispo or gspo";
  const Json record = {{"record_stability_info", true}};
  EXPECT_EQ(SampleError(record), refusal);
  EXPECT_EQ(StepError("forward_backward",
                      TrainBody(Prompt({3}), {{"data", {4}}},
                                {{"loss_fn", "stable_reinforce"}})),
            refusal);
  // SDK 0.38 sends the field with samples only.
  EXPECT_EQ(
      StepError("save_weights_for_sampler", {{"sampling_session_seq_id", 0},
                                             {"record_stability_info", true}}),
      refusal);
  const HttpReply made = Ask("POST", "create_sampling_session",
                             {{"session_id", session},
                              {"sampling_session_seq_id", 1},
                              {"base_model", "toy"},
                              {"record_stability_info", true}});
  EXPECT_EQ(made.status, 400);
  EXPECT_THAT(made.body, HasSubstr(refusal));
  EXPECT_EQ(SampleError({{"record_stability_info", false}}), "");
}

TEST_F(TinkerRequestsTest, ARecordHasTheIdOfItsFuture) {
  const std::string sampler = NewSampler(StartSession());
  const auto sample = [&](int seq, bool record) {
    const Json promise = Sample({{"sampling_session_id", sampler},
                                 {"seq_id", seq},
                                 {"num_samples", 2},
                                 {"record_stability_info", record}});
    Result(promise);
    return promise;
  };
  const Json promise = sample(1, true);
  EXPECT_EQ(engine_->seen().last_sample.record, promise["request_id"]);
  EXPECT_EQ(promise["sample_sequence_ids"][1],
            SequenceId(engine_->seen().last_sample.record, 1));
  sample(2, false);
  EXPECT_EQ(engine_->seen().last_sample.record, "");
  engine_->mutable_info()->keeps_sample_records = false;
  sample(3, true);
  EXPECT_EQ(engine_->seen().last_sample.record, "");
}

TEST_F(TinkerRequestsTest, ErrorsHaveTheNamesOfTheClientsFields) {
  Start();
  EXPECT_EQ(NewModel("toy", 65)["error"],
            "lora_config.rank is 65, must be in [1, 64] (the server's "
            "--max-rank)");
  model_ = NewModel("toy")["model_id"];
  EXPECT_EQ(StepError("save_weights", {{"path", "a/b c"}}),
            "name is \"a/b c\", must match [A-Za-z0-9][A-Za-z0-9._-]{0,127} "
            "and not end in a dot");
  EXPECT_THAT(StepError("load_weights", {{"path", "tinker://a b/weights/x"}}),
              StartsWith("path is \"a b\""));
  EXPECT_THAT(
      StepError("optim_step", {{"adam_params", {{"grad_clip_norm", -1}}}}),
      StartsWith("adam_params.grad_clip_norm is -1"));
  EXPECT_THAT(StepError("optim_step", {{"adam_params", {{"beta1", 1}}}}),
              StartsWith("adam_params.beta1 is 1"));
  const Json target = {{"data", {4}}, {"dtype", "int64"}};
  EXPECT_EQ(StepError("forward_backward", TrainBody(Prompt({}), target)),
            "data[0].model_input is empty");
  EXPECT_THAT(StepError("forward_backward", TrainBody(Prompt({3, 4}), target)),
              StartsWith("data[0].loss_fn_inputs.target_tokens has 1 values"));
  EXPECT_THAT(StepError("forward_backward",
                        TrainBody(Prompt({3}), target,
                                  {{"loss_fn", "ppo"},
                                   {"options", {{"clip_low_threshold", 2}}}})),
              AllOf(StartsWith("loss_fn_config.clip_low_threshold is 2"),
                    HasSubstr("at most loss_fn_config.clip_high_threshold")));
  EXPECT_EQ(SampleError({{"prompt", Prompt({})}}),
            "prompt is empty, must have at least one token");
  EXPECT_THAT(SampleError({{"topk_sample_logprobs", 1025}}),
              StartsWith("topk_sample_logprobs is 1025"));
  EXPECT_THAT(SampleError({{"prompt_alt_tokens_k", 65}}),
              StartsWith("prompt_alt_tokens_k is 65"));
  EXPECT_THAT(SampleError({{"prompt_logprobs_last_n", 0}}),
              StartsWith("prompt_logprobs_last_n is 0"));
  EXPECT_THAT(SampleError({{"sampling_params", {{"top_p", 2}}}}),
              StartsWith("sampling_params.top_p is 2"));
  EXPECT_THAT(SampleError({{"sampling_params",
                            {{"max_tokens", 1}, {"stop", {1000000}}}}}),
              StartsWith("sampling_params.stop[0] is 1000000"));
}

TEST_F(TinkerRequestsTest, BadTargetsOfAPromptAreRefused) {
  Start();
  const auto error = [this](const Json& targets) {
    return SampleError({{"target_prompt_logprobs", targets}});
  };
  const Json shape = {1, 2};
  EXPECT_THAT(error({{"data", {1, 2}}, {"shape", shape}}),
              StartsWith("target_prompt_logprobs.dtype must be int64"));
  for (const Json& bad : {Json{2, 1}, Json{2}, Json{1000000000, 0}}) {
    EXPECT_THAT(error({{"data", {1, 2}}, {"dtype", "int64"}, {"shape", bad}}),
                StartsWith("target_prompt_logprobs.shape must be [1, K]"))
        << bad;
  }
  EXPECT_THAT(error({{"data", {1}}, {"dtype", "int64"}, {"shape", shape}}),
              StartsWith("target_prompt_logprobs must have a shape"));
  EXPECT_THAT(error({{"data", {1, -2}}, {"dtype", "int64"}, {"shape", shape}}),
              StartsWith("target_prompt_logprobs.tokens[1] is 4294967294"));
  EXPECT_THAT(error({{"data", {1, int64_t{1} << 40}},
                     {"dtype", "int64"},
                     {"shape", shape}}),
              StartsWith("target_prompt_logprobs has 1099511627776"));
  const auto sparse = [&](const Json& rows, const Json& columns) {
    return error({{"data", {1, 2}},
                  {"dtype", "int64"},
                  {"shape", shape},
                  {"sparse_crow_indices", rows},
                  {"sparse_col_indices", columns}});
  };
  EXPECT_EQ(sparse({0, 2}, {0, 1}), "");
  EXPECT_THAT(sparse({0, 1}, {0, 1}), HasSubstr("do not fit"));
  EXPECT_THAT(sparse({0, 2}, {0, 2}), HasSubstr("out of its shape"));
}

TEST_F(TinkerRequestsTest, TheTokenizerHasTheNameThatTheClientSent) {
  Start();
  const std::string plain = NewModel("TOY")["model_id"];
  const std::string named = NewModel("Hub/Toy")["model_id"];
  const auto save = [this](const std::string& path, int seq,
                           const std::string& model) {
    return Result(
        Post(path,
             {{"model_id", model}, {"seq_id", seq}, {"path", "kept"}}))["path"];
  };
  const std::string trained = save("save_weights", 1, named);
  const std::string sampled = save("save_weights_for_sampler", 2, named);
  for (const bool restarted : {false, true}) {
    if (restarted) Restart();
    EXPECT_EQ(Tokenizer(plain), "toy");
    EXPECT_EQ(Tokenizer(named), "Hub/Toy");
    // Whoever goes on from a checkpoint need not name the base model.
    const std::string session = NewSession();
    const Json loaded = Result(Post("load_weights", {{"session_id", session},
                                                     {"model_seq_id", 0},
                                                     {"path", trained},
                                                     {"optimizer", true}}));
    ASSERT_TRUE(loaded.contains("model_id")) << loaded;
    EXPECT_EQ(Tokenizer(loaded["model_id"]), "Hub/Toy");
    const HttpReply made = SampleFrom(session, sampled);
    ASSERT_EQ(made.status, 200) << made.body;
    const std::string id = Json::parse(made.body)["sampling_session_id"];
    EXPECT_EQ(Json::parse(Ask("GET", "samplers/" + id).body)["base_model"],
              "Hub/Toy");
    EXPECT_EQ(Post("weights_info", {{"tinker_path", trained}})["base_model"],
              "Hub/Toy");
    Finish(session);
    EXPECT_TRUE(Eventually([this] { return engine_->num_adapters() == 2; }));
  }
}

TEST_F(TinkerRequestsTest, TheBaseModelHasFurtherNamesWithoutCase) {
  ServerOptions options;
  options.model_aliases = {"Qwen/Qwen3-8B", "other"};
  Start(std::move(options));
  for (const char* base :
       {"toy", "TOY", "hub/Toy", "qwen/qwen3-8b", "Other", "a/b/other"}) {
    const Json made = NewModel(base);
    ASSERT_TRUE(made.contains("model_id")) << base << made;
    Result(Post("unload_model", {{"model_id", made["model_id"]}}));
  }
  EXPECT_THAT(std::string(NewModel("Qwen/Qwen3-8")["error"]),
              AllOf(HasSubstr("use toy"), HasSubstr("--model-alias")));
  std::vector<std::string> names;
  const Json reply = Json::parse(Ask("GET", "get_server_capabilities").body);
  for (const Json& model : reply["supported_models"]) {
    names.push_back(model["model_name"]);
  }
  EXPECT_THAT(names, ::testing::ElementsAre("toy", "Qwen/Qwen3-8B", "other"));
}

// Tinker's names of variants say for how many tokens they are.
TEST_F(TinkerRequestsTest, AVariantOfTheBaseModelHasItsName) {
  Start();
  for (const char* base : {"toy:peft:32", "hub/Toy:peft:1"}) {
    const Json made = NewModel(base);
    ASSERT_TRUE(made.contains("model_id")) << made;
    const Json info = Post("get_info", {{"model_id", made["model_id"]}});
    EXPECT_EQ(info["model_data"]["model_name"], base);
    EXPECT_EQ(info["model_data"]["tokenizer_id"],
              std::string(base).substr(0, std::string(base).find(':')));
  }
  for (const char* base :
       {"toy:peft:33", "toy:peft:0", "toy:peft:x", "toy:peft:"}) {
    EXPECT_EQ(NewModel(base)["error"],
              absl::StrCat("base_model is \"", base,
                           "\", the number must be in [1, 32]: use \"toy\", or "
                           "a server with a larger --max-context"));
  }
}

TEST_F(TinkerRequestsTest, ARepeatedKeyGetsTheSameSession) {
  const std::string other = AddKey("b", {Scope::kTrain}, "birch");
  const std::string own = key_ = AddKey("a", {Scope::kTrain});
  const std::string unkeyed = StartSession();
  EXPECT_NE(NewSession(), unkeyed);
  idempotency_key_ = "k";
  // The front takes both requests before the ledger has written the session.
  std::vector<std::future<HttpReply>> replies;
  OnFront([&](Front&) {
    for (int i = 0; i < 2; ++i) {
      replies.push_back(AskLater("POST", "create_session"));
    }
  });
  const std::string first = replies[0].get().body;
  EXPECT_EQ(replies[1].get().body, first);
  const std::string session = Json::parse(first)["session_id"];
  EXPECT_EQ(NewSession(), session);
  Restart();
  EXPECT_EQ(NewSession(), session);
  key_ = other;
  EXPECT_NE(NewSession(), session);
  key_ = own;
  Finish(session);
  EXPECT_NE(NewSession(), session);
}

TEST_F(TinkerRequestsTest, TrainAttnMeansAllProjectionsOutsideTheMlp) {
  using enum TargetModule;
  Start();
  engine_->mutable_info()->projections = {kQProj, kGateProj, kDownProj,
                                          kInProjQkv, kOutProj};
  const Json lora = {
      {"rank", 4}, {"train_mlp", false}, {"train_unembed", false}};
  Result(Post("create_model", {{"session_id", NewSession()},
                               {"model_seq_id", 0},
                               {"base_model", "toy"},
                               {"lora_config", lora}}));
  std::promise<AdapterPage> page;
  engine_->ListAdapters({}, [&page](absl::StatusOr<AdapterPage> adapters) {
    page.set_value(*std::move(adapters));
  });
  const AdapterPage adapters = page.get_future().get();
  ASSERT_EQ(adapters.adapters.size(), 1u);
  EXPECT_THAT(adapters.adapters[0].config.target_modules,
              ElementsAre(kQProj, kInProjQkv, kOutProj));
}

}  // namespace
}  // namespace weft::server::tinker
