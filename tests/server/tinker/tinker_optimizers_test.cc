// Tests that a Tinker model keeps its optimizer over saves and loads of
// checkpoints, also before its first step.
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::StartsWith;

class TinkerOptimizersTest : public TinkerFrontTest {
 protected:
  // Makes a model of session_ and returns its id.
  std::string Make(const std::string& type) {
    if (session_.empty()) session_ = NewSession();
    return Result(Post("create_model",
                       {{"session_id", session_},
                        {"model_seq_id", next_++},
                        {"base_model", "toy"},
                        {"lora_config", {{"rank", 4}}},
                        {"optimizer_config", {{"type", type}}}}))["model_id"];
  }
  // Sends the model's step `seq` and returns its promise.
  Json Step(const std::string& path, const std::string& model, int seq,
            Json body) {
    body["model_id"] = model;
    body["seq_id"] = seq;
    return Post(path, body);
  }
  Json Load(const std::string& model, int seq, const std::string& path,
            bool optimizer) {
    return Step("load_weights", model, seq,
                {{"path", path}, {"optimizer", optimizer}});
  }
  Json Dimuon(const std::string& model, int seq) {
    return Step(
        "optim_step", model, seq,
        {{"optimizer_params", {{"type", "dimuon"}, {"learning_rate", 0.25}}}});
  }
  std::string Save(const std::string& model, int seq) {
    return Result(Step("save_weights", model, seq,
                       {{"path", absl::StrCat("s", seq)}}))["path"];
  }
  std::string TypeOfModel(const std::string& model) {
    return Post("get_info", {{"model_id", model}})["optimizer_config"]["type"];
  }
  std::string TypeOfWeights(const std::string& path) {
    return Post("weights_info",
                {{"tinker_path", path}})["optimizer_config"]["type"];
  }
  // Expects that the model is one of Dimuon and refuses the other parameters.
  void ExpectFixed(const std::string& model, int seq) {
    EXPECT_EQ(TypeOfModel(model), "dimuon");
    const Json result = Result(
        Step("optim_step", model, seq, {{"adam_params", Json::object()}}));
    EXPECT_EQ(result.value("category", ""), "user");
    EXPECT_THAT(result.value("error", ""),
                StartsWith("adam_params: the model was made for the optimizer "
                           "dimuon"));
  }

  std::string session_;
  int next_ = 0;
};

TEST_F(TinkerOptimizersTest, ALoadWithTheOptimizerAndThenOneWithoutKeepIt) {
  Start();
  const std::string model = Make("dimuon");
  EXPECT_TRUE(Result(Dimuon(model, 1)).contains("metrics"));
  const std::string path = Save(model, 2);
  EXPECT_TRUE(Result(Load(model, 3, path, true)).contains("path"));
  EXPECT_TRUE(Result(Load(model, 4, path, false)).contains("path"));
  ExpectFixed(model, 5);
  Restart();
  ExpectFixed(model, 6);
}

TEST_F(TinkerOptimizersTest, ALoadThatFailsKeepsItAlsoAfterARefusal) {
  Start();
  const std::string model = Make("dimuon");
  const std::string none = absl::StrCat("tinker://", model, "/weights/none");
  EXPECT_TRUE(Result(Load(model, 1, none, true)).contains("error"));
  ExpectFixed(model, 2);
  // The client asks again, and then there is no checkpoint.
  engine_->FailNext(absl::UnavailableError("later"), "LoadCheckpoint");
  const HttpReply later = Ask("POST", "load_weights",
                              {{"model_id", model},
                               {"seq_id", 3},
                               {"path", none},
                               {"optimizer", true}});
  EXPECT_EQ(later.status, 503) << later.body;
  EXPECT_TRUE(Result(Load(model, 3, none, true)).contains("error"));
  ExpectFixed(model, 4);
  // A refusal for good.
  engine_->FailNext(absl::InternalError("no"), "LoadCheckpoint");
  EXPECT_TRUE(Result(Load(model, 5, none, true)).contains("error"));
  ExpectFixed(model, 6);
  // Two loads that the engine has at once.
  engine_->Hold();
  const Json first = Load(model, 7, none, true);
  const Json second = Load(model, 8, none, true);
  engine_->Release();
  EXPECT_TRUE(Result(first).contains("error"));
  EXPECT_TRUE(Result(second).contains("error"));
  ExpectFixed(model, 9);
}

TEST_F(TinkerOptimizersTest, StepsBehindALoadHaveTheOptimizerOfTheCheckpoint) {
  Start();
  const std::string muon = Make("dimuon");
  EXPECT_TRUE(Result(Dimuon(muon, 1)).contains("metrics"));
  const std::string path = Save(muon, 2);
  const std::string model = Make("adamw");
  engine_->Hold();
  const Json load = Load(model, 1, path, true);
  const Json step = Dimuon(model, 2);
  engine_->Release();
  EXPECT_TRUE(Result(load).contains("path"));
  EXPECT_TRUE(Result(step).contains("metrics"));
  ExpectFixed(model, 3);
}

TEST_F(TinkerOptimizersTest, ACheckpointBeforeTheFirstStepHasIt) {
  Start();
  const std::string model = Make("dimuon");
  const std::string path = Save(model, 1);
  EXPECT_EQ(TypeOfWeights(path), "dimuon");
  Restart();
  EXPECT_EQ(TypeOfWeights(path), "dimuon");
  const std::string copy =
      Post("copy_weights", {{"source_path", path}})["tinker_path"];
  EXPECT_EQ(TypeOfWeights(copy), "dimuon");
  const auto load_new = [&](const std::string& from) -> std::string {
    return Result(Post("load_weights", {{"session_id", session_},
                                        {"model_seq_id", next_++},
                                        {"path", from},
                                        {"optimizer", true}}))["model_id"];
  };
  ExpectFixed(load_new(copy), 1);
  const std::string other = Make("adamw");
  const std::string plain = Save(other, 1);
  EXPECT_EQ(TypeOfWeights(plain), "adamw");
  EXPECT_TRUE(Result(Load(other, 2, path, true)).contains("path"));
  ExpectFixed(other, 3);
  // A new model from a checkpoint of AdamW without a step refuses Dimuon.
  EXPECT_TRUE(Result(Dimuon(load_new(plain), 1)).contains("error"));
}

TEST_F(TinkerOptimizersTest, AModelHasThatOfTheLoadBeforeIt) {
  Start();
  const std::string path = Save(Make("dimuon"), 1);
  const std::string plain = Save(Make("adamw"), 1);
  // A save behind the load, while the model's optimizer is not known yet.
  const std::string behind = Make("adamw");
  engine_->Hold();
  const Json load = Load(behind, 1, path, true);
  const Json save = Step("save_weights", behind, 2, {{"path", "behind"}});
  engine_->Release();
  EXPECT_TRUE(Result(load).contains("path"));
  EXPECT_EQ(TypeOfWeights(Result(save)["path"]), "dimuon");
  // A new model from weights alone has the optimizer that the client names.
  const Json made =
      Post("load_weights", {{"session_id", session_},
                            {"model_seq_id", next_++},
                            {"path", plain},
                            {"optimizer_config", {{"type", "dimuon"}}}});
  EXPECT_EQ(TypeOfWeights(Save(Result(made)["model_id"], 1)), "dimuon");
}

}  // namespace
}  // namespace weft::server::tinker
