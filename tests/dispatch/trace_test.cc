// Tests that a request's trace id reaches the engine thread with its work.
#include <memory>
#include <string>
#include <variant>

#include "gtest/gtest.h"
#include "src/base/trace_id.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

TraceId Id(const std::string& text) {
  return std::make_shared<const std::string>(text);
}

class DispatchTraceTest : public ::testing::Test {
 protected:
  Dispatcher& dispatcher() { return engine_.dispatcher(); }

  FakeEngineThread engine_{{.residency = {.max_resident = 4},
                            .max_adapters = 4,
                            .max_adapters_per_tenant = 4}};
};

TEST_F(DispatchTraceTest, ATaskRunsWithTheIdOfItsPoster) {
  TraceId seen;
  {
    const TraceScope scope(Id("poster"));
    dispatcher().Post([&](const absl::Status&) { seen = CurrentTrace(); });
  }
  (void)engine_.Next();
  ASSERT_NE(seen, nullptr);
  EXPECT_EQ(*seen, "poster");
}

TEST_F(DispatchTraceTest, ATaskThatWaitsForASlotKeepsTheId) {
  TraceId seen;
  {
    const TraceScope scope(Id("creator"));
    dispatcher().adapters().WhenSlot([&](const absl::Status&) {
      seen = CurrentTrace();
      dispatcher().adapters().ReturnSlot();
    });
  }
  (void)engine_.Next();
  ASSERT_NE(seen, nullptr);
  EXPECT_EQ(*seen, "creator");
}

TEST_F(DispatchTraceTest, AStepHasTheIdOfItsFirstCaller) {
  engine_.Create("a", "tenant", [](const absl::StatusOr<AdapterKey>& key) {
    EXPECT_TRUE(key.ok()) << key.status();
  });
  (void)engine_.Next();
  const OptimStepRequest request{.adapter_id = "a", .step = 1};
  const WorkItem item{.kind = WorkKind::kOptim, .tokens = 1};
  for (const char* id : {"first", "repeated"}) {
    const TraceScope scope(Id(id));
    (void)dispatcher().steps().Submit(
        request, item, [](const absl::StatusOr<StepResultPtr>&, bool) {});
  }
  const std::optional<Work> work =
      dispatcher().Next(/*active_samples=*/0, absl::ZeroDuration());
  ASSERT_TRUE(work.has_value() && std::holds_alternative<RunStep>(*work));
  const StepTask& step = std::get<RunStep>(*work).step;
  ASSERT_NE(step.trace, nullptr);
  EXPECT_EQ(*step.trace, "first");
  dispatcher().steps().Complete(step.id, absl::AbortedError("test"));
}

}  // namespace
}  // namespace weft::dispatch
