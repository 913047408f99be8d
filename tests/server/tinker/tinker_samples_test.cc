// Tests what the Tinker front does with samples whose clients are gone.
#include <future>
#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/tinker/sessions.h"
#include "src/base/clock.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

class TinkerGoneTest : public TinkerFrontTest {
 protected:
  Json OfSession(const std::string& session) {
    return Sample(
        {{"sampling_session_id", NewSampler(session)}, {"seq_id", 1}});
  }
  Json Alone() { return Sample({{"base_model", "toy"}}); }
  std::future<HttpReply> AskFor(const Json& sample) {
    return AskLater("POST", "retrieve_future",
                    {{"request_id", sample["request_id"]}});
  }
  // Sweeps as if nothing had happened for so long.
  void SweepAfter(absl::Duration silence) {
    OnFront([silence](Front& front) {
      SweepSamples(front, SteadyNow() + silence);
    });
  }
  // Does the work that was held, and waits until the samples have ended.
  void Release() {
    engine_->Release();
    EXPECT_TRUE(EventuallyInFront(
        [](Front& front) { return front.running.size() == 0; }));
  }
};

TEST_F(TinkerGoneTest, ASampleIsCancelledIfNobodyAsksForIt) {
  const std::string session = StartSession();
  engine_->Hold();
  const Json of_session = OfSession(session), alone = Alone();
  SweepAfter(absl::Seconds(115));
  EXPECT_EQ(engine_->seen().num_waiting, 2u);
  SweepAfter(absl::Seconds(125));
  SweepAfter(absl::Seconds(185));
  Release();
  EXPECT_EQ(engine_->seen().num_cancelled, 2u);
  // The client that comes back sends the sample again, and gets it.
  EXPECT_EQ(AskFor(alone).get().status, 410);
  EXPECT_EQ(AskFor(of_session).get().status, 410);
  const Json again = OfSession(session);
  EXPECT_EQ(again, of_session);
  EXPECT_EQ(Result(again)["sequences"].size(), 1u);
}

TEST_F(TinkerGoneTest, AClientThatAsksBeforeTheSampleHasEndedSendsItAgain) {
  Start();
  engine_->Hold();
  const Json sample = Alone();
  SweepAfter(absl::Seconds(125));
  std::future<HttpReply> late = AskFor(sample);
  Release();
  EXPECT_EQ(late.get().status, 410);
}

TEST_F(TinkerGoneTest, ASampleRunsOnWhileItsClientWaitsOrItsSessionLives) {
  const std::string session = StartSession();
  engine_->Hold();
  const Json of_session = OfSession(session), alone = Alone();
  std::future<HttpReply> waiting = AskFor(alone);
  OnFront([&session](Front& front) {
    front.sessions.Find(session)->last_beat = SteadyNow() + absl::Minutes(9);
  });
  SweepAfter(absl::Minutes(10));
  Release();
  EXPECT_EQ(waiting.get().status, 200);
  EXPECT_EQ(Result(of_session)["sequences"].size(), 1u);
  EXPECT_EQ(engine_->seen().num_cancelled, 0u);
}

TEST_F(TinkerGoneTest, OnlyItsOwnerCancelsASample) {
  const std::string other = AddKey("b", {Scope::kSample}, "birch");
  const std::string own = key_ = AddKey("a", {Scope::kSample});
  Start();
  engine_->Hold();
  const Json kept = Alone(), cancelled = Alone();
  key_ = other;
  Post("cancel_future", {{"request_id", kept["request_id"]}});
  key_ = own;
  Post("cancel_future", {{"request_id", cancelled["request_id"]}});
  Release();
  EXPECT_EQ(engine_->seen().num_cancelled, 1u);
  EXPECT_EQ(Result(kept)["sequences"].size(), 1u);
  EXPECT_TRUE(Result(cancelled).contains("error"));
}

}  // namespace
}  // namespace weft::server::tinker
