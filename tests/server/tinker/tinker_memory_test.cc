// Tests that no request takes more memory than its caller was charged for.
#include <zstd.h>

#include <chrono>
#include <future>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/wire.pb.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;

class TinkerMemoryTest : public TinkerFrontTest {
 protected:
  static std::string Zstd(const std::string& text) {
    std::string out(ZSTD_compressBound(text.size()), '\0');
    out.resize(
        ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
    return out;
  }

  // Returns a request of `num_data` sequences of `tokens` tokens, whose targets
  // are a sparse tensor [rows, width] without values.
  static ForwardBackwardRequest Sparse(const std::string& model, int num_data,
                                       int tokens, int64_t rows,
                                       int64_t width) {
    ForwardBackwardRequest request;
    request.set_model_id(model);
    request.set_seq_id(1);
    request.set_loss_fn("cross_entropy");
    for (int i = 0; i < num_data; ++i) {
      Datum* const datum = request.add_data();
      datum->add_model_input()->mutable_encoded_text()->set_tokens(
          std::string(static_cast<size_t>(tokens) * 4, '\0'));
      Tensor& targets = (*datum->mutable_loss_fn_inputs())["target_tokens"];
      targets.set_dtype(DTYPE_INT64);
      targets.add_shape(rows);
      targets.add_shape(width);
      targets.mutable_sparse_csr()->set_crow_indices(
          std::string(static_cast<size_t>(rows + 1) * 8, '\0'));
    }
    return request;
  }

  HttpReply SendTrain(const std::string& body) {
    return Send("forward_backward", kProtobufType, "", body);
  }
  HttpReply SendTrain(const ForwardBackwardRequest& request) {
    return SendTrain(request.SerializeAsString());
  }
  std::string StepError(const ForwardBackwardRequest& request) {
    const HttpReply reply = SendTrain(request);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return Result(Json::parse(reply.body)).value("error", "");
  }
};

TEST_F(TinkerMemoryTest, SparseTensorsShareOneBudgetOfValues) {
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  constexpr int64_t kMost = int64_t{16} << 20;
  EXPECT_EQ(SendTrain(Sparse("nobody", 40, 1, 1, kMost)).status, 404);
  EXPECT_THAT(StepError(Sparse(model, 2, 1, 1, kMost)),
              HasSubstr("more than 16777216 values together"));
  ForwardBackwardRequest request = Sparse(model, 1, 1, 1000, 1000);
  request.set_seq_id(2);
  EXPECT_THAT(StepError(request), HasSubstr("has 1000 rows, must have one for "
                                            "each of the 1 tokens"));
}

TEST_F(TinkerMemoryTest, TheFrontServesOthersWhileARequestIsTranslated) {
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  // A body of a few bytes becomes 128 MiB of targets.
  const std::future<HttpReply> promise =
      SendLater({.method = "POST",
                 .target = "/api/v1/forward_backward",
                 .api_key = key_,
                 .content_type = kProtobufType,
                 .host = "front:80"},
                Sparse(model, 1, 1, 1, int64_t{16} << 20).SerializeAsString());
  int served = 0;
  while (promise.wait_for(std::chrono::seconds(0)) !=
         std::future_status::ready) {
    EXPECT_EQ(Ask("GET", "healthz").status, 200);
    ++served;
  }
  EXPECT_GT(served, 10);
}

TEST_F(TinkerMemoryTest, AStepThatWaitsIsChargedWhatItKeeps) {
  const std::string model = Result(CreateModel(StartSession()))["model_id"];
  // A body of 200 kB becomes 4 MiB of targets. Step 2 waits for step 1.
  ForwardBackwardRequest request = Sparse(model, 512, 32, 32, 64);
  request.set_seq_id(2);
  const HttpReply waits = SendTrain(request);
  EXPECT_EQ(waits.status, 200) << waits.body;
  OnFront([](Front& front) {
    // Another owner may have seven eighths of what is left.
    FairBudget& memory = *front.port.core()->memory;
    const auto is_left = [&memory](int64_t left) {
      return memory.Reserve("other", left - left / 8).ok();
    };
    // Its plain form is charged. What was charged for reading the request and
    // for the message, which has the targets, too, is free again.
    EXPECT_FALSE(is_left(memory.most() - (4 << 20)));
    EXPECT_TRUE(is_left(memory.most() - (8 << 20)));
  });
  request.set_seq_id(1);
  EXPECT_EQ(SendTrain(request).status, 200);  // Both steps can end now.
  const HttpReply result =
      Ask("POST", "retrieve_future",
          {{"request_id", Json::parse(waits.body)["request_id"]}});
  EXPECT_THAT(result.body, HasSubstr("too many for JSON"));
}

TEST_F(TinkerMemoryTest, ABodyOfEmptyMessagesIsRefusedUnparsed) {
  Start();
  std::string body;
  for (int i = 0; i < 1 << 20; ++i) body.append("\x1a\x00", 2);
  for (const bool packed : {false, true}) {
    const HttpReply reply =
        Send("forward_backward", kProtobufType, packed ? "zstd" : "",
             packed ? Zstd(body) : body);
    EXPECT_EQ(reply.status, 413);
    EXPECT_THAT(reply.body, HasSubstr("so many small parts"));
  }
}

TEST_F(TinkerMemoryTest, ASmallRouteTakesASmallBodyAlsoInflated) {
  Start();
  const std::string text =
      absl::StrCat("{\"tags\": \"", std::string(300000, 'a'), "\"}");
  const HttpReply reply = Send("create_session", kJsonType, "zstd", Zstd(text));
  EXPECT_EQ(reply.status, 413);
  EXPECT_THAT(reply.body, HasSubstr("more than 262144 bytes"));
  // Telemetry is dropped unread.
  EXPECT_EQ(Send("telemetry", kJsonType, "zstd", "no zstd").status, 200);
}

TEST_F(TinkerMemoryTest, ASessionKeepsOnlyWhatItShows) {
  Start();
  const Json shown = {{"user_metadata", {{"k", {1, 2}}}},
                      {"display_name", "mine"}};
  Json body = shown;
  body["tags"] = {"a", "b"};
  const std::string session = Post("create_session", body)["session_id"];
  for (const bool again : {false, true}) {
    if (again) Restart();
    const HttpReply reply = Ask("GET", absl::StrCat("sessions/", session));
    Json expected = shown;
    expected["training_run_ids"] = Json::array();
    expected["sampler_ids"] = Json::array();
    EXPECT_EQ(Json::parse(reply.body), expected);
  }
  body["user_metadata"] = std::string(5000, 'a');
  const HttpReply long_text = Ask("POST", "create_session", body);
  EXPECT_EQ(long_text.status, 400);
  EXPECT_THAT(long_text.body,
              HasSubstr("user_metadata has 5002 bytes as JSON, must have at "
                        "most 4096"));
}

TEST_F(TinkerMemoryTest, WhatTheFrontKeepsIsChargedToItsOwner) {
  const std::string session = StartSession();
  OnFront([](Front& front) {
    const auto memory = front.port.core()->memory;
    auto rest = memory->Reserve("", memory->most() / 2 - 2048);
    ASSERT_TRUE(rest.ok()) << rest.status();
    EXPECT_FALSE(front.ledger.Charge("", 1024).ok());
    EXPECT_TRUE(front.ledger.Charge("other", 1024).ok());
  });
  EXPECT_EQ(Ask("POST", absl::StrCat("sessions/", session, "/finish")).status,
            200);
  // The ledger's thread may hold a copy of the session for a moment.
  EXPECT_TRUE(EventuallyInFront([](Front& front) {
    const auto memory = front.port.core()->memory;
    return memory->Reserve("", memory->most()).ok();
  }));
}

TEST_F(TinkerMemoryTest, ManySamplesAreRefusedBeforeTheyHaveIds) {
  Start();
  const HttpReply reply = Ask("POST", "asample",
                              {{"base_model", "toy"},
                               {"num_samples", 1000000000},
                               {"prompt", {{"chunks", Json::array()}}},
                               {"sampling_params", Json::object()}});
  EXPECT_EQ(reply.status, 400);
  EXPECT_THAT(reply.body, HasSubstr("num_samples is 1000000000, must be in"));
}

}  // namespace
}  // namespace weft::server::tinker
