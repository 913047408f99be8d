// Tests what the dispatcher keeps of an adapter's last steps.
#include "src/dispatch/train_history.h"

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TrainResult ResultOf(uint64_t step, double loss_sum) {
  return {.metrics = {{"loss:sum", loss_sum}}, .step = step};
}

auto Step(uint64_t step) { return Field(&TrainPoint::step, step); }

TEST(TrainHistoryTest, ALossIsDividedByTheMagnitudesOfTheWeights) {
  TrainHistory history;
  TrainRequest request;
  request.data = {
      Datum{.tokens = {1, 2}, .targets = {2, 3}},
      Datum{.tokens = {1, 2}, .targets = {2, 3}, .weights = {0.0F, -2.0F}}};
  history.Add(request, ResultOf(1, 8), 5, absl::UnixEpoch());
  const AdapterActivity activity = history.Latest(5);
  ASSERT_THAT(activity.points, SizeIs(1));
  EXPECT_EQ(activity.points[0].loss, 2);
  EXPECT_EQ(activity.points[0].num_tokens, 4U);
  EXPECT_EQ(activity.points[0].optim_steps, 5U);
  EXPECT_EQ(activity.points[0].ended_at, absl::UnixEpoch());
}

TEST(TrainHistoryTest, WithoutAnyWeightTheSumIsThePoint) {
  TrainHistory history;
  TrainRequest request;
  request.data = {Datum{.tokens = {1}, .targets = {2}, .weights = {0.0F}}};
  history.Add(request, ResultOf(1, 0), 0, absl::UnixEpoch());
  EXPECT_EQ(history.Latest(1).points[0].loss, 0);
}

TEST(TrainHistoryTest, ACustomLossIsAMeanOverTheData) {
  TrainHistory history;
  TrainRequest request;
  request.loss.function = LossFunction::kCustom;
  request.data = {Datum{.tokens = {1, 2}, .targets = {2, 3}},
                  Datum{.tokens = {1, 2}, .targets = {2, 3}}};
  history.Add(request, ResultOf(1, 8), 0, absl::UnixEpoch());
  EXPECT_EQ(history.Latest(1).points[0].loss, 4);
}

// The value of such a loss says nothing, and is never shown as the loss.
TEST(TrainHistoryTest, PoliciesAndWeightsOfBothSignsAreSurrogates) {
  const auto is_surrogate = [](LossFunction function, float weight) {
    TrainHistory history;
    TrainRequest request;
    request.loss.function = function;
    request.data = {
        Datum{.tokens = {1}, .targets = {2}, .weights = {1.0F, weight}}};
    history.Add(request, ResultOf(1, 8), 0, absl::UnixEpoch());
    return history.Latest(1).points[0].surrogate;
  };
  EXPECT_FALSE(is_surrogate(LossFunction::kCrossEntropy, 0));
  EXPECT_TRUE(is_surrogate(LossFunction::kCrossEntropy, -0.5F));
  for (const LossFunction function :
       {LossFunction::kImportanceSampling, LossFunction::kPpo,
        LossFunction::kCispo, LossFunction::kDro, LossFunction::kGspo,
        LossFunction::kStableReinforce}) {
    EXPECT_TRUE(is_surrogate(function, 1));
  }
  for (const LossFunction function :
       {LossFunction::kCustom, LossFunction::kForwardKl,
        LossFunction::kReverseKl, LossFunction::kJs}) {
    EXPECT_FALSE(is_surrogate(function, 1));
  }
}

TEST(TrainHistoryTest, ReportsMakeCurvesByName) {
  TrainHistory history;
  history.Add({.metrics = {{"loss", 0.5}, {"reward", 2}}}, 3);
  history.Add({.optim_steps = 9, .metrics = {{"loss", 0.25}}}, 4);
  const AdapterActivity activity = history.Latest(5);
  ASSERT_THAT(activity.curves, SizeIs(2));
  EXPECT_EQ(activity.curves[0].name, "loss");
  ASSERT_THAT(activity.curves[0].points, SizeIs(2));
  EXPECT_EQ(activity.curves[0].points[0].optim_steps, 3U);
  EXPECT_EQ(activity.curves[0].points[1].optim_steps, 9U);
  EXPECT_EQ(activity.curves[0].points[1].value, 0.25F);
  EXPECT_EQ(activity.curves[1].name, "reward");
  EXPECT_THAT(history.Latest(1).curves[0].points, SizeIs(1));
  EXPECT_THAT(history.Latest(0).curves, IsEmpty());
}

TEST(TrainHistoryTest, TheNameReportedLongestAgoGivesWay) {
  TrainHistory history;
  for (size_t i = 0; i < kMaxMetricCurves; ++i) {
    history.Add({.metrics = {{absl::StrCat("m", i), 1}}}, 0);
  }
  history.Add({.metrics = {{"m0", 2}}}, 1);
  history.Add({.metrics = {{"new", 3}}}, 2);
  std::vector<std::string> names;
  for (const MetricCurve& curve : history.Latest(1).curves) {
    names.push_back(curve.name);
  }
  EXPECT_THAT(names,
              ElementsAre("m0", "m2", "m3", "m4", "m5", "m6", "m7", "new"));
}

TEST(TrainHistoryTest, TheOldestPointGoesWhenTheRingIsFull) {
  TrainHistory history;
  const TrainRequest request = OneDatum("a", 1);
  const uint64_t last = TrainHistory::kMaxPoints + 3;
  for (uint64_t step = 1; step <= last; ++step) {
    history.Add(request, ResultOf(step, 1), 0, absl::UnixEpoch());
  }
  const AdapterActivity all = history.Latest(SIZE_MAX);
  EXPECT_THAT(all.points, SizeIs(TrainHistory::kMaxPoints));
  EXPECT_EQ(all.points.front().step, 4U);
  EXPECT_EQ(all.points.back().step, last);
  EXPECT_THAT(history.Latest(2).points,
              ElementsAre(Step(last - 1), Step(last)));
  EXPECT_THAT(history.Latest(0).points, IsEmpty());
}

class WatchTest : public ::testing::Test {
 protected:
  WatchTest() {
    engine_.Create("a", "tenant", [](const absl::StatusOr<AdapterKey>& key) {
      EXPECT_TRUE(key.ok()) << key.status();
    });
    (void)engine_.Next();
  }

  void Submit(TrainRequest request) {
    WorkItem item = TrainItem();
    item.backward = request.backward;
    (void)engine_.dispatcher().steps().Submit(
        std::move(request), std::move(item),
        [](const absl::StatusOr<StepResultPtr>&, bool) {});
  }
  // Runs the step that is next, which must be a training step.
  void Run(double loss_sum) {
    const std::optional<Work> work = engine_.Next();
    ASSERT_TRUE(work && std::holds_alternative<RunTrain>(*work));
    const auto& train = std::get<RunTrain>(*work);
    engine_.dispatcher().steps().CountTokens(train);
    const StepTask& step = train.slices.front().step;
    engine_.dispatcher().steps().Complete(step.id,
                                          ResultOf(step.step, loss_sum));
    engine_.RunReplies();
  }
  Activity Watch() {
    return engine_.dispatcher().adapters().Watch({.adapter_ids = {"a", "none"},
                                                  .tenants = {"tenant", "x"},
                                                  .max_points = 9});
  }

  FakeEngineThread engine_{{.residency = {.max_resident = 4},
                            .max_adapters = 4,
                            .max_adapters_per_tenant = 4}};
};

TEST_F(WatchTest, EachStepGivesOnePointHoweverOftenItIsSent) {
  Submit(OneDatum("a", 1));
  Submit(OneDatum("a", 1));
  Run(3);
  Submit(OneDatum("a", 1));
  const Activity activity = Watch();
  EXPECT_THAT(activity.adapters[0].points, ElementsAre(Step(1)));
  EXPECT_EQ(activity.adapters[0].points[0].loss, 3);
  EXPECT_EQ(activity.adapters[0].train_tokens, 1U);
  EXPECT_THAT(activity.adapters[1].points, IsEmpty());
}

TEST_F(WatchTest, AForwardCountsTokensAndGivesNoPoint) {
  TrainRequest forward = OneDatum("a", 1);
  forward.backward = false;
  Submit(std::move(forward));
  Run(3);
  EXPECT_THAT(Watch().adapters[0].points, IsEmpty());
  EXPECT_EQ(Watch().adapters[0].train_tokens, 1U);
}

TEST_F(WatchTest, AReportStandsAtThePresentUpdate) {
  AdapterDesk& desk = engine_.dispatcher().adapters();
  EXPECT_TRUE(
      desk.Report({.adapter_id = "a", .metrics = {{"reward", 2}}}).ok());
  EXPECT_EQ(Watch().adapters[0].curves.at(0).name, "reward");
  EXPECT_TRUE(absl::IsNotFound(
      desk.Report({.adapter_id = "none", .metrics = {{"reward", 2}}})));
}

TEST_F(WatchTest, AGradientCountsItsTokensUntilItIsUsed) {
  AdapterDesk& desk = engine_.dispatcher().adapters();
  const auto accumulated = [&desk] {
    return desk.Info("a")->accumulated_tokens;
  };
  Submit(OneDatum("a", 1));
  Run(3);
  Submit(OneDatum("a", 2));
  Run(3);
  EXPECT_EQ(accumulated(), 2U);
  TrainRequest forward = OneDatum("a", 3);
  forward.backward = false;
  Submit(std::move(forward));
  Run(3);
  EXPECT_EQ(accumulated(), 2U);
}

TEST_F(WatchTest, ADeletedAdapterTakesItsPointsWithIt) {
  Submit(OneDatum("a", 1));
  Run(3);
  AdapterDesk& desk = engine_.dispatcher().adapters();
  (void)desk.Remove(*desk.KeyOf("a"));
  EXPECT_THAT(Watch().adapters[0].points, IsEmpty());
}

TEST_F(WatchTest, ATenantHasItsAdaptersAndWhatWaits) {
  Submit(OneDatum("a", 1));
  Submit(OneDatum("a", 2));
  const Activity activity = Watch();
  EXPECT_EQ(activity.tenants[0].num_adapters, 1);
  EXPECT_EQ(activity.tenants[0].adapter_bytes, 10U);
  EXPECT_EQ(activity.tenants[0].queued_requests, 2);
  EXPECT_EQ(activity.tenants[1].num_adapters, 0);
  EXPECT_EQ(activity.tenants[1].queued_requests, 0);
}

TEST_F(WatchTest, DrawnTokensCountForTheirAdapter) {
  SampleDesk& desk = engine_.dispatcher().samples();
  (void)desk.Submit({.adapter_id = "a", .prompt = {1, 2, 3}}, nullptr,
                    [](const absl::StatusOr<SampleResult>&) {});
  (void)engine_.Next();
  const std::optional<SampleTask> task = desk.Take();
  ASSERT_TRUE(task);
  desk.Start(*task);
  desk.Finish(task->id, SampleResult{.samples = {{.tokens = {7, 8}}}});
  EXPECT_EQ(Watch().adapters[0].sampled_tokens, 2U);
  EXPECT_EQ(Watch().adapters[0].train_tokens, 0U);
}

TEST(TrainHistoryTest, UpdatesHaveARingOfTheirOwn) {
  TrainHistory history;
  for (uint64_t step = 1; step <= TrainHistory::kMaxPoints + 2; ++step) {
    history.Add({.grad_norm = 0.5 * static_cast<double>(step), .step = step});
  }
  const AdapterActivity last = history.Latest(1);
  EXPECT_THAT(last.points, IsEmpty());
  ASSERT_THAT(last.updates, SizeIs(1));
  EXPECT_EQ(last.updates[0].step, TrainHistory::kMaxPoints + 2);
  EXPECT_EQ(last.updates[0].grad_norm, 129);
  EXPECT_EQ(history.Latest(SIZE_MAX).updates.front().step, 3U);
}

}  // namespace
}  // namespace weft::dispatch
