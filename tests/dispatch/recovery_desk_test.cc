// Tests that clients can use the adapters that are ready while the log is still
// being replayed.
#include "src/dispatch/recovery_desk.h"

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "src/base/reason.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

class RecoveryDeskTest : public ::testing::Test {
 protected:
  Dispatcher& dispatcher() { return engine_.dispatcher(); }
  RecoveryDesk& desk() { return engine_.dispatcher().recovery(); }
  AdapterDesk& adapters() { return engine_.dispatcher().adapters(); }

  void Create(const std::string& id, const std::string& tenant = "tenant") {
    engine_.Create(id, tenant, [](const absl::StatusOr<AdapterKey>& key) {
      EXPECT_TRUE(key.ok()) << key.status();
    });
    (void)engine_.Next();
  }

  void Submit(const std::string& id, uint64_t step) {
    (void)dispatcher().steps().Submit(
        OptimStepRequest{.adapter_id = id, .step = step},
        {.kind = WorkKind::kOptim, .tokens = 1},
        [](const absl::StatusOr<StepResultPtr>&, bool) {});
  }

  // Replays `count` records, one after another.
  void Replay(int count) {
    desk().Post([this, count](const absl::Status& open) {
      end_of_replay_ = open;
      if (!open.ok()) return;
      ++replayed_;
      if (count > 1) Replay(count - 1);
    });
  }

  // Runs the next work if it is a step. Returns the step's adapter id, or "".
  std::string Run() {
    const std::optional<Work> work = engine_.Next();
    const auto* run = work ? std::get_if<RunStep>(&*work) : nullptr;
    if (run == nullptr) return "";
    const std::string id = AdapterIdOf(*run->step.request);
    dispatcher().steps().Complete(run->step.id, OptimStepResult{});
    return id;
  }

  FakeEngineThread engine_{{.residency = {.max_resident = 4},
                            .max_adapters = 3,
                            .max_adapters_per_tenant = 2,
                            .records_steps = true}};
  int replayed_ = 0;
  absl::Status end_of_replay_;
};

TEST_F(RecoveryDeskTest, TheReplayAndOtherWorkTakeTurns) {
  Create("a");
  for (const uint64_t step : {1, 2, 3}) Submit("a", step);
  Replay(5);
  for (int turn = 1; turn <= 3; ++turn) {
    EXPECT_EQ(Run(), "a");
    EXPECT_EQ(replayed_, turn);
  }
  EXPECT_EQ(Run(), "");
  EXPECT_EQ(replayed_, 5);
}

// The batch of `a` waits for `b`, because both trained together before.
TEST_F(RecoveryDeskTest, ABatchThatWaitsBrieflyKeepsItsTurn) {
  Create("a");
  Create("b");
  engine_.TrainTogether({"a", "b"});
  engine_.Train("a", 2);
  Replay(5);
  EXPECT_TRUE(std::holds_alternative<Idle>(*engine_.Next()));
  EXPECT_EQ(replayed_, 1);
  engine_.clock().Advance(absl::Seconds(1));
  const std::optional<Work> work = engine_.Next();
  ASSERT_TRUE(work.has_value() && std::holds_alternative<RunTrain>(*work));
  EXPECT_EQ(replayed_, 1);
  const uint64_t id = std::get<RunTrain>(*work).slices.front().step.id;
  dispatcher().steps().Complete(id, TrainResult());
  EXPECT_EQ(Run(), "");
  EXPECT_EQ(replayed_, 5);
}

TEST_F(RecoveryDeskTest, StepsGoOnAfterTheRestoredOnes) {
  Create("a");
  desk().AddReply(*adapters().KeyOf("a"),
                  {.step = 40,
                   .digest = "d",
                   .result = std::make_shared<StepResult>(OptimStepResult())});
  EXPECT_EQ(adapters().Info("a")->next_step, 41);
  Submit("a", 41);
  EXPECT_EQ(Run(), "a");
}

TEST_F(RecoveryDeskTest, AKeptStepOfAnEarlierProcessRunsOnce) {
  Create("a");
  desk().Reserve(1, 0, /*next_work=*/8);
  const OptimStepRequest request{.adapter_id = "a", .step = 1};
  desk().Resume(*adapters().KeyOf("a"), /*id=*/7, PayloadDigest(request),
                request, "note", {.kind = WorkKind::kOptim, .tokens = 1});
  ASSERT_EQ(desk().Kept().size(), 1);
  EXPECT_EQ(desk().Kept()[0].work, 7);
  int results = 0;
  // Its caller asks for the result, or sends it again.
  dispatcher().steps().Retrieve(
      "a", 1, [&results](const absl::StatusOr<StepResultPtr>& result) {
        results += result.ok() ? 1 : 0;
      });
  Submit("a", 1);
  EXPECT_EQ(Run(), "a");
  engine_.RunReplies();
  EXPECT_EQ(results, 1);
  EXPECT_EQ(Run(), "");
  EXPECT_TRUE(desk().Kept().empty());
}

TEST_F(RecoveryDeskTest, AnAdapterIsRefusedUntilItIsReady) {
  desk().SetRecovering({{"a", "tenant"}, {"b", "tenant"}});
  const absl::Status refused = adapters().CheckReady("a");
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  const std::optional<Reason> reason = FindReason(refused);
  ASSERT_TRUE(reason.has_value());
  EXPECT_EQ(*reason, (Reason{.name = "ADAPTER_RECOVERING",
                             .values = {{"adapter", "a"}}}));
  EXPECT_TRUE(adapters().CheckReady("c").ok());
  EXPECT_TRUE(adapters().CheckReady("").ok());
  // Its name is in use.
  EXPECT_EQ(adapters().CheckNew("a", "other"), refused);
  EXPECT_TRUE(adapters().CheckNew("c", "other").ok());

  desk().SetReady("a");
  EXPECT_TRUE(adapters().CheckReady("a").ok());
  EXPECT_FALSE(adapters().CheckReady("b").ok());
}

TEST_F(RecoveryDeskTest, AHeldAdapterTakesNoNewWorkAndEndsWhatItHas) {
  Create("a");
  Create("b", "other");
  std::vector<absl::Status> ends(4);
  const auto submit = [&](uint64_t step) {
    (void)dispatcher().steps().Submit(
        OptimStepRequest{.adapter_id = "a", .step = step},
        {.kind = WorkKind::kOptim, .tokens = 1},
        [&ends, step](const absl::StatusOr<StepResultPtr>& result, bool) {
          ends[step] = result.status();
        });
  };
  submit(1);
  submit(3);  // Step 2 cannot come any more.
  EXPECT_FALSE(desk().IsQuiet("a"));
  ASSERT_TRUE(desk().Hold("a", {{"a", "tenant"}}).ok());
  // What has asked CheckReady before is refused, too.
  submit(2);
  engine_.RunReplies();
  // It is not held for long.
  for (const int step : {2, 3}) {
    EXPECT_EQ(*FindReason(ends[step]),
              (Reason{.name = "ADAPTER_RECOVERING",
                      .values = {{"adapter", "a"}, {"retry_ms", "100"}}}))
        << step;
  }
  EXPECT_FALSE(desk().IsQuiet("a"));
  EXPECT_EQ(Run(), "a");
  EXPECT_TRUE(desk().IsQuiet("a"));
  Submit("b", 1);
  EXPECT_EQ(Run(), "b");
  desk().Release("a");
  Submit("a", 2);
  EXPECT_EQ(Run(), "a");
}

TEST_F(RecoveryDeskTest, AHeldAdapterTeachesNoNewStep) {
  Create("a");
  Create("b", "other");
  TrainRequest taught = OneDatum("b", 1);
  taught.loss.function = LossFunction::kForwardKl;
  taught.loss.teacher.adapter_id = "a";
  absl::Status end;
  const auto submit = [&] {
    (void)dispatcher().steps().Submit(
        taught, TrainItem(),
        [&end](const absl::StatusOr<StepResultPtr>& result, bool) {
          end = result.status();
        });
  };
  submit();
  taught.step = 3;  // Step 2 cannot come any more.
  submit();
  ASSERT_TRUE(desk().Hold("a", {{"a", "tenant"}}).ok());
  engine_.RunReplies();
  EXPECT_EQ(FindReason(std::exchange(end, {}))->name, "ADAPTER_RECOVERING");
  EXPECT_FALSE(desk().IsQuiet("a"));
  taught.step = 2;
  submit();
  EXPECT_EQ(FindReason(end)->name, "ADAPTER_RECOVERING");
  const std::optional<Work> work = engine_.Next();
  const uint64_t id = std::get<RunTrain>(*work).slices.front().step.id;
  EXPECT_FALSE(desk().IsQuiet("a"));
  dispatcher().steps().Complete(id, TrainResult());
  EXPECT_TRUE(desk().IsQuiet("a"));
}

TEST_F(RecoveryDeskTest, ASessionIsHeldAsAWhole) {
  const std::string session(32, 's');
  const std::string first = session + ".train.0";
  const std::string second = "t~" + session + ".train.1";
  Create(first);
  Create(second);
  // Adapters that come together need room for all. There is room for three.
  EXPECT_TRUE(adapters().CheckNew({{"x", "u"}}).ok());
  EXPECT_EQ(adapters().CheckNew({{"x", "u"}, {"y", "u"}}).code(),
            absl::StatusCode::kResourceExhausted);
  Create("other", "u");
  EXPECT_EQ(desk().AdaptersOf(session).size(), 2u);
  Submit(second, 1);
  EXPECT_FALSE(desk().IsQuiet(session));
  EXPECT_TRUE(desk().IsQuiet("other"));
  ASSERT_TRUE(desk().Hold(session, {}).ok());
  for (const std::string& id : {first, second, session, session + ".train.9"}) {
    EXPECT_FALSE(adapters().CheckReady(id).ok()) << id;
  }
  EXPECT_TRUE(adapters().CheckReady("other").ok());
  EXPECT_EQ(Run(), second);
  EXPECT_TRUE(desk().IsQuiet(session));
  desk().Release(session);
  EXPECT_TRUE(adapters().CheckReady(first).ok());
}

TEST_F(RecoveryDeskTest, AKeptStepThatWaitsForOthersKeepsItsAdapter) {
  Create("a");
  (void)dispatcher().steps().Submit(
      OptimStepRequest{.adapter_id = "a", .step = 2},
      {.kind = WorkKind::kOptim, .tokens = 1},
      [](const absl::StatusOr<StepResultPtr>&, bool) {},
      {.step = {.kept = [] {}}, .record = [](uint64_t, AdapterKey) {}});
  EXPECT_TRUE(absl::IsUnavailable(desk().Hold("a", {})));
  EXPECT_TRUE(adapters().CheckReady("a").ok());
  Submit("a", 1);
  EXPECT_TRUE(desk().Hold("a", {}).ok());
}

TEST_F(RecoveryDeskTest, SamplesOfAHeldAdapterEnd) {
  Create("a");
  Create("b", "other");
  std::vector<absl::Status> ends;
  const auto sample = [&](const std::string& id) {
    (void)dispatcher().samples().Submit(
        {.adapter_id = id, .prompt = {1}, .config = {.max_tokens = 1}}, {},
        [&ends](const absl::StatusOr<SampleResult>& result) {
          ends.push_back(result.status());
        });
  };
  sample("a");
  const std::optional<SampleTask> running = dispatcher().samples().Take();
  dispatcher().samples().Start(*running);
  sample("a");
  sample("b");
  ASSERT_TRUE(desk().Hold("a", {{"a", "tenant"}}).ok());
  sample("a");
  EXPECT_EQ(ends.size(), 1);
  EXPECT_EQ(desk().DropSamples("a"), std::vector<uint64_t>{running->id});
  engine_.RunReplies();
  ASSERT_EQ(ends.size(), 2);
  for (const absl::Status& end : ends) {
    EXPECT_EQ(FindReason(end)->name, "ADAPTER_RECOVERING");
  }
  EXPECT_FALSE(desk().IsQuiet("a"));
  dispatcher().samples().Finish(running->id, ends[0]);
  EXPECT_TRUE(desk().IsQuiet("a"));
  EXPECT_TRUE(dispatcher().samples().Take().has_value());  // That of b.
}

TEST_F(RecoveryDeskTest, APageHasTheAdaptersThatAreRestoredToo) {
  Create("t/a", "t");
  Create("t/c", "t");
  Create("u/a", "u");
  desk().SetRecovering({{"t/b", "t"}, {"t/c", "t"}, {"u/b", "u"}});
  EXPECT_EQ(adapters().Count(), 5);
  const auto list = [this](const ListAdaptersRequest& request) {
    const AdapterPage page = *adapters().List(request);
    std::string text;
    for (const AdapterInfo& info : page.adapters) {
      text += info.adapter_id + (info.restoring ? "* " : " ");
      EXPECT_EQ(info.tenant, info.adapter_id.substr(0, 1));
    }
    return text + (page.more ? "..." : "");
  };
  EXPECT_EQ(list({}), "t/a t/b* t/c* u/a u/b* ");
  EXPECT_EQ(list({.size = 1}), "t/a ...");
  EXPECT_EQ(list({.size = 1, .after = "t/a"}), "t/b* ...");
  EXPECT_EQ(list({.size = 2, .after = "t/a"}), "t/b* t/c* ...");
  EXPECT_EQ(list({.after = "t/", .prefix = "t/"}), "t/a t/b* t/c* ");
  EXPECT_EQ(list({.after = "u/", .prefix = "u/"}), "u/a u/b* ");
  desk().SetReady("t/b");
  desk().SetReady("t/c");
  EXPECT_EQ(list({.after = "t/", .prefix = "t/"}), "t/a t/c ");
}

TEST_F(RecoveryDeskTest, TheMetricTellsTheTimeLeft) {
  const prometheus::Gauge& left =
      AddGauge(&engine_.registry(), "weft_recovery_seconds_left", "");
  desk().SetTimeLeft(absl::Seconds(80));
  EXPECT_EQ(left.Value(), 80);
}

// The limits are three adapters in all, and two for each tenant.
TEST_F(RecoveryDeskTest, AdaptersThatAreNotSettledMayTakeTheLastSlots) {
  Create("a");
  const auto code = [this](const std::string& tenant) {
    return adapters().CheckNew("new", tenant).code();
  };
  desk().SetRecovering({{"b", "tenant"}});
  EXPECT_EQ(code("tenant"), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code("other"), absl::StatusCode::kOk);
  desk().SetRecovering({{"b", "tenant"}, {"c", "other"}});
  EXPECT_EQ(code("third"), absl::StatusCode::kUnavailable);
  // The replay may still remove `b`, so the refusal is not final.
  desk().SetRecovering({});
  Create("b");
  desk().SetRecovering({{"b", "tenant"}});
  EXPECT_EQ(code("tenant"), absl::StatusCode::kUnavailable);
  desk().SetReady("b");
  EXPECT_EQ(code("tenant"), absl::StatusCode::kResourceExhausted);
}

TEST_F(RecoveryDeskTest, ARefusalTellsATenantOfItsOwnAdapters) {
  Create("a");
  Create("b", "other");
  Create("c", "other");
  const auto refusal = [this](const std::string& tenant) {
    return std::string(adapters().CheckNew("new", tenant).message());
  };
  EXPECT_EQ(refusal("tenant"),
            "no adapter slot is left (--max-adapters); tenant 'tenant' has 1 "
            "of them; delete one");
  EXPECT_EQ(refusal("new"),
            "all 3 adapter slots are in use (--max-adapters); delete one");
}

TEST_F(RecoveryDeskTest, TheReplayGoesOnInADrainOfAClient) {
  Create("a");
  Replay(10);
  bool drained = false;
  dispatcher().Drain(
      [&](const absl::StatusOr<bool>& done) { drained = done.ok(); });
  EXPECT_EQ(Run(), "");
  engine_.RunReplies();
  EXPECT_TRUE(drained);
  EXPECT_EQ(replayed_, 10);
}

TEST_F(RecoveryDeskTest, AReplayedStepIsDurableBeforeTheReplaysEnd) {
  Create("a");
  const StepTask task =
      desk().BeginStep(*adapters().KeyOf("a"), 1, "digest", OneDatum("a", 1));
  dispatcher().steps().Complete(task.id, TrainResult());
  EXPECT_EQ(adapters().Info("a")->durable_step, 1);
}

TEST_F(RecoveryDeskTest, TheEndOfTheProcessDoesNotWaitForTheReplay) {
  Create("a");
  Create("b");
  (void)desk().BeginStep(*adapters().KeyOf("b"), 1, "digest", OneDatum("b", 1));
  Submit("a", 1);
  Replay(1000);
  bool drained = false;
  dispatcher().Finish(
      [&](const absl::StatusOr<bool>& done) { drained = done.ok(); });
  EXPECT_EQ(Run(), "a");
  EXPECT_EQ(Run(), "");
  engine_.RunReplies();
  EXPECT_TRUE(drained);
  EXPECT_LT(replayed_, 5);
  dispatcher().Stop();
  dispatcher().Close(absl::UnavailableError("stopped"));
  EXPECT_TRUE(absl::IsUnavailable(end_of_replay_));
}

}  // namespace
}  // namespace weft::dispatch
