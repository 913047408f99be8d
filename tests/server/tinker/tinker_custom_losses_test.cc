// Tests create_custom_loss, and steps with the losses that it has made.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/handlers.h"
#include "server/tinker/training.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Returns (logprobs * a).sum(), with this operation in place of the product.
Json GraphOf(const std::string& operation) {
  return {{"format", 1},
          {"nodes",
           {{{"op", "placeholder"}, {"name", "lp"}, {"target", "logprobs"}},
            {{"op", "placeholder"}, {"name", "a"}, {"target", "a"}},
            {{"op", "call_function"},
             {"name", "mul"},
             {"target", operation},
             {"args", {{{"ref", "lp"}}, {{"ref", "a"}}}}},
            {{"op", "call_method"},
             {"name", "total"},
             {"target", "sum"},
             {"args", Json::array({{{"ref", "mul"}}})}},
            {{"op", "output"},
             {"name", "output"},
             {"target", "output"},
             {"args", Json::array({{{"tuple",
                                     {{{"ref", "total"}},
                                      {{"dict", Json::object()}}}}}})}}}}};
}

class TinkerCustomLossesTest : public TinkerFrontTest {
 protected:
  static Json Upload(const std::string& session, int number,
                     const std::string& operation = "operator.mul",
                     int rank = 1) {
    return {{"session_id", session},
            {"custom_loss_seq_id", number},
            {"name", "mine"},
            {"inputs",
             {{{"name", "logprobs"}, {"rank", 1}},
              {{"name", "a"}, {"rank", rank}}}},
            {"graph", GraphOf(operation)}};
  }
  Json Create(const std::string& session, int number,
              const std::string& operation = "operator.mul", int rank = 1) {
    return Result(
        Post("create_custom_loss", Upload(session, number, operation, rank)));
  }
  // Runs forward_backward with a custom loss; `a` is an input of two values,
  // `logprobs` and `unread` are such that no loss reads.
  Json Step(const std::string& model, int seq, const Json& config,
            const std::string& input = "a") {
    const Json two = {{"data", {4, 5}}, {"dtype", "int64"}};
    const Json datum = {{"model_input", Prompt({3, 4})},
                        {"loss_fn_inputs",
                         {{"target_tokens", two},
                          {input, two},
                          {"logprobs", two},
                          {"unread", two}}}};
    return Result(Post("forward_backward", {{"model_id", model},
                                            {"seq_id", seq},
                                            {"forward_backward_input",
                                             {{"data", Json::array({datum})},
                                              {"loss_fn", "custom"},
                                              {"loss_fn_config", config}}}}));
  }
};

TEST_F(TinkerCustomLossesTest, AStepNamesALossOfItsSession) {
  Start();
  EXPECT_EQ(Post("client/config")["custom_loss_server_side"], true);
  const std::string session = NewSession();
  const std::string model = Result(CreateModel(session))["model_id"];
  const std::string id = Create(session, 0)["loss_id"];
  EXPECT_EQ(id, session + ":loss-0");
  EXPECT_TRUE(Step(model, 1, {{"loss_id", id}}).contains("metrics"));
  const TrainRequest step = engine_->seen().last_train;
  EXPECT_EQ(step.loss.function, LossFunction::kCustom);
  EXPECT_EQ(Json::parse(step.loss.custom.graph), GraphOf("operator.mul"));
  ASSERT_EQ(step.data[0].custom_inputs.size(), 1u);
  const CustomInput& read = step.data[0].custom_inputs.at("a");
  EXPECT_EQ(read.shape, std::vector<int64_t>{2});
  EXPECT_EQ(read.ints, (std::vector<int64_t>{4, 5}));
  const auto error = [&](int seq, const Json& config,
                         const std::string& input = "a") {
    const Json failed = Step(model, seq, config, input);
    EXPECT_EQ(failed.value("category", ""), "user") << failed;
    return failed.value("error", "");
  };
  EXPECT_THAT(error(2, {{"loss_id", "other"}}), HasSubstr("no custom loss"));
  EXPECT_THAT(error(3, Json::object()), HasSubstr("must have loss_id alone"));
  EXPECT_THAT(error(4, {{"loss_id", id}, {"beta", 0.1}}),
              HasSubstr("must have loss_id alone"));
  EXPECT_THAT(error(5, {{"loss_id", id}}, "b"),
              HasSubstr("loss_fn_inputs[a] is required"));
  // The refused steps have left no gap.
  EXPECT_TRUE(Step(model, 6, {{"loss_id", id}}).contains("metrics"));
}

TEST_F(TinkerCustomLossesTest, ABadGraphIsRefusedByItsNode) {
  const std::string session = StartSession();
  const Json bad = Create(session, 0, "os.system");
  EXPECT_EQ(bad["category"], "user");
  EXPECT_THAT(std::string(bad["error"]),
              StartsWith("create_custom_loss.graph.nodes[2] (mul) has the "
                         "target os.system, which is not offered"));
  EXPECT_THAT(std::string(Create(session, 1, "operator.mul", 3)["error"]),
              StartsWith("inputs.rank is 3"));
  EXPECT_EQ(Ask("POST", "create_custom_loss",
                {{"session_id", "none"}, {"custom_loss_seq_id", 0}})
                .status,
            404);
}

TEST_F(TinkerCustomLossesTest, ARepeatedUploadHasTheSameId) {
  const std::string session = StartSession();
  const std::string id = Create(session, 3)["loss_id"];
  EXPECT_EQ(Create(session, 3)["loss_id"], id);
  Restart();
  EXPECT_EQ(Create(session, 3)["loss_id"], id);
  Restart();
  EXPECT_THAT(std::string(Create(session, 3, "operator.add")["error"]),
              HasSubstr("has another loss"));
}

TEST_F(TinkerCustomLossesTest, ARepeatedUploadHasTheOutcomeOfTheFirstWrite) {
  Start();
  const auto call = std::make_shared<Call>();
  call->body = Upload(NewSession(), 0);
  engine_->FailNext(absl::InternalError("no disk"), "PutNote");
  Json promise;
  OnFront([&](Front& front) {
    const Respond respond = [&promise](const HttpReply& reply) {
      promise = Json::parse(reply.body);
    };
    ASSERT_TRUE(CreateCustomLoss(front, call, respond).ok());
    // The request comes again before the write has ended.
    front.futures.Drop(promise["request_id"]);
    ASSERT_TRUE(CreateCustomLoss(front, call, respond).ok());
  });
  EXPECT_EQ(Result(promise).value("error", ""), "no disk");
  OnFront([](Front& front) { EXPECT_EQ(front.losses.size(), 0u); });
}

TEST_F(TinkerCustomLossesTest, LossesStayUntilTheirSessionEnds) {
  const std::string session = StartSession();
  const std::string model = Result(CreateModel(session))["model_id"];
  const std::string id = Create(session, 0)["loss_id"];
  Restart();
  EXPECT_TRUE(Step(model, 1, {{"loss_id", id}}).contains("metrics"));
  EXPECT_EQ(engine_->NotesWith("tinker/loss/").size(), 1u);
  Finish(session);
  EXPECT_TRUE(engine_->NotesWith("tinker/loss/").empty());
  OnFront([](Front& front) { EXPECT_EQ(front.losses.size(), 0u); });
}

TEST_F(TinkerCustomLossesTest, ASessionHasAtMost64Losses) {
  const std::string session = StartSession();
  for (int number = 0; number < static_cast<int>(kMaxLosses); ++number) {
    EXPECT_TRUE(Create(session, number).contains("loss_id")) << number;
  }
  EXPECT_THAT(std::string(Create(session, 64)["error"]),
              StartsWith("the session has 64 custom losses"));
  EXPECT_TRUE(Create(NewSession(), 0).contains("loss_id"));
}

}  // namespace
}  // namespace weft::server::tinker
