// Tests samples from checkpoints over the Tinker API, and what becomes of the
// adapters into which earlier versions loaded them.
#include <future>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "tests/server/tinker/tinker_front_fixture.h"
#include "tests/support/canned_results.h"
#include "tests/support/status_matchers.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class TinkerCheckpointSamplesTest : public TinkerFrontTest {
 protected:
  void SetUp() override {
    session_ = StartSession();
    path_ = SaveSampler(session_);
    run_ = absl::StrCat(session_, ".train.0");
  }

  // Makes a sampling session from the checkpoint; returns its id.
  std::string FromPath(int number = 0) {
    const HttpReply made = SampleFrom(session_, path_, number);
    EXPECT_EQ(made.status, 200) << made.body;
    return Json::parse(made.body)["sampling_session_id"];
  }
  Json SampleOf(const std::string& sampler, int seq = 1) {
    return Sample({{"sampling_session_id", sampler}, {"seq_id", seq}});
  }
  // Checks which checkpoint the engine was asked to sample from.
  void ExpectAsked(absl::Time created_at) {
    const SampleRequest asked = engine_->seen().last_sample;
    EXPECT_EQ(asked.adapter_id, run_);
    EXPECT_EQ(asked.checkpoint, "sampler_weights.kept");
    EXPECT_EQ(asked.checkpoint_created_at, created_at);
    EXPECT_THAT(asked.snapshot, IsEmpty());
  }

  // Makes the sampling session one of an earlier version, which had loaded the
  // checkpoint into an adapter. Then starts this version.
  void RestartFromOld(const std::string& sampler, absl::Time loaded) {
    const std::string key =
        absl::StrCat(run_, "/sampler_weights.kept@", absl::ToUnixNanos(loaded));
    const std::string adapter = absl::StrCat(
        "tinker-sampler.", absl::BytesToHexString(Sha256(key).substr(0, 16)),
        ".0123abcd");
    StopFront();
    std::promise<absl::Status> made, put;
    engine_->CreateAdapter({.adapter_id = adapter}, [&](const auto& info) {
      made.set_value(info.status());
    });
    ASSERT_THAT(made.get_future().get(), IsOk());
    ASSERT_EQ(engine_->num_adapters(), 2u);
    const Json note = {{"id", sampler},
                       {"fields",
                        {{"session", session_},
                         {"adapter", adapter},
                         {"snapshot", ""},
                         {"in_flight", false},
                         {"model_path", path_}}}};
    engine_->PutNote(absl::StrCat("tinker/sampler/", sampler),
                     absl::StrCat(note.dump(), "\n"),
                     [&](const absl::Status& done) { put.set_value(done); });
    ASSERT_THAT(put.get_future().get(), IsOk());
    StartFront();
  }

  std::string session_;
  std::string path_;
  std::string run_;  // The adapter whose checkpoint it is.
};

TEST_F(TinkerCheckpointSamplesTest, SamplingSessionsTakeNoAdapter) {
  for (int number = 0; number < 20; ++number) {
    EXPECT_EQ(Result(SampleOf(FromPath(number)))["sequences"].size(), 1u);
  }
  ExpectAsked(kCannedCreation);
  EXPECT_EQ(engine_->num_adapters(), 1u);
  EXPECT_EQ(Calls("LoadCheckpoint"), 0);
  EXPECT_EQ(Result(Sample({{"model_path", path_}}))["sequences"].size(), 1u);
  ExpectAsked(absl::InfinitePast());
  EXPECT_EQ(engine_->num_adapters(), 1u);
}

TEST_F(TinkerCheckpointSamplesTest, ASessionKeepsItsCheckpointOverARestart) {
  const std::string sampler = FromPath();
  Restart();
  EXPECT_EQ(Result(SampleOf(sampler))["sequences"].size(), 1u);
  ExpectAsked(kCannedCreation);
}

TEST_F(TinkerCheckpointSamplesTest, WhatPassesIsSentAgain) {
  const std::string sampler = FromPath();
  for (const absl::Status& failure :
       {WithReason(absl::ResourceExhaustedError("samples use all"),
                   {.name = "SAMPLER_CACHE_FULL", .values = {}}),
        absl::UnavailableError("overwritten while it was read")}) {
    engine_->FailNextRun(failure, "Sample");
    const Json promise = SampleOf(sampler);
    const Json asked = {{"request_id", promise["request_id"]}};
    EXPECT_EQ(Ask("POST", "retrieve_future", asked).status, 410);
    const Json again = SampleOf(sampler);
    EXPECT_EQ(again, promise);
    EXPECT_EQ(Result(again)["sequences"].size(), 1u);
    Restart();  // The front forgets the sample.
  }
}

TEST_F(TinkerCheckpointSamplesTest, ACheckpointThatIsGoneFailsItsSamples) {
  const std::string sampler = FromPath();
  const std::string checkpoint = absl::StrReplaceAll(
      path_,
      {{"tinker://", "training_runs/"}, {"/sampler", "/checkpoints/sampler"}});
  EXPECT_EQ(Ask("DELETE", checkpoint).status, 204);
  const Json failed = Result(SampleOf(sampler));
  EXPECT_THAT(failed.value("error", ""), StartsWith("model_path: no checkpoi"));
  EXPECT_EQ(failed.value("category", ""), "user");
  const HttpReply refused = SampleFrom(session_, path_, 1);
  EXPECT_EQ(refused.status, 404);
  EXPECT_THAT(refused.body, HasSubstr("no checkpoint"));
}

TEST_F(TinkerCheckpointSamplesTest, ASessionOfAnEarlierVersionTakesThePath) {
  const std::string sampler = FromPath();
  RestartFromOld(sampler, kCannedCreation);
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 1u);
  // The first ones come at once.
  const Json first = SampleOf(sampler, 1);
  const Json second = SampleOf(sampler, 2);
  for (const Json& promise : {first, second, SampleOf(sampler, 3)}) {
    EXPECT_EQ(Result(promise)["sequences"].size(), 1u);
    ExpectAsked(kCannedCreation);
  }
  // Only the first samples look which checkpoint it was.
  OnFront([&](Front& front) {
    EXPECT_THAT(front.samplers.Find(sampler)->adapter, IsEmpty());
  });
}

TEST_F(TinkerCheckpointSamplesTest, AnEarlierVersionsWeightsMayBeGone) {
  const std::string sampler = FromPath();
  RestartFromOld(sampler, kCannedCreation - absl::Seconds(1));
  const Json failed = Result(SampleOf(sampler));
  EXPECT_THAT(failed.value("error", ""),
              StartsWith("model_path: the checkpoint was overwritten"));
  EXPECT_EQ(failed.value("category", ""), "user");
}

}  // namespace
}  // namespace weft::server::tinker
