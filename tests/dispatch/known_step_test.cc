// Tests steps whose requests still name records of samples.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/request/step.h"
#include "tests/dispatch/fake_engine_thread.h"
#include "tests/support/status_matchers.h"

namespace weft::dispatch {
namespace {

class KnownStepTest : public testing::Test {
 protected:
  KnownStepTest() {
    engine_.Create("a", "tenant", [](const auto&) {});
    (void)engine_.Next();
    digest_ = PayloadDigest(OneDatum("a", 1));
  }

  StepDesk& desk() { return engine_.dispatcher().steps(); }
  // Returns the status of a call that still has its spans.
  absl::Status SubmitUnread() {
    TrainRequest request = OneDatum("a", 1);
    request.digest = digest_;
    request.replay.spans = {{{.sequence_id = "s:0", .length = 1}}};
    absl::Status status = absl::UnknownError("waits");
    (void)desk().Submit(
        std::move(request), TrainItem(),
        [&status](const auto& result, bool) { status = result.status(); });
    engine_.RunReplies();
    return status;
  }

  FakeEngineThread engine_{{}};
  std::string digest_;
};

TEST_F(KnownStepTest, AStepIsKnownFromItsAcceptanceOn) {
  EXPECT_FALSE(desk().Knows("a", 1, digest_));
  EXPECT_FALSE(desk().Knows("b", 1, digest_));
  engine_.Train("a", 1);
  EXPECT_TRUE(desk().Knows("a", 1, digest_));
  EXPECT_TRUE(desk().Knows("a", 1, "another payload"));
  EXPECT_FALSE(desk().Knows("a", 2, digest_));
  EXPECT_FALSE(desk().Knows("a", 0, digest_));
  const std::optional<Work> work = engine_.Next();
  desk().Complete(std::get<RunTrain>(*work).slices.front().step.id,
                  TrainResult());
  EXPECT_TRUE(desk().Knows("a", 1, digest_));
  EXPECT_THAT(SubmitUnread(), IsOk());
}

TEST_F(KnownStepTest, ANewStepNeverRunsWithoutItsRecords) {
  EXPECT_THAT(SubmitUnread(),
              IsStatus(absl::StatusCode::kUnavailable, "repeat the call"));
  EXPECT_FALSE(desk().Knows("a", 1, digest_));
}

}  // namespace
}  // namespace weft::dispatch
