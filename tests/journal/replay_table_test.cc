#include "src/journal/replay_table.h"

#include <memory>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

using Verdict = ReplayTable::Verdict;

ReplayTable::Result Value(int value) {
  return std::make_shared<const int>(value);
}

TEST(ReplayTableTest, ReplaysTheResultOfADoneStep) {
  ReplayTable table;
  EXPECT_EQ(table.Lookup(1, "a")->verdict, Verdict::kNew);
  table.Begin(1, "a");
  EXPECT_EQ(table.Lookup(1, "a")->verdict, Verdict::kInFlight);
  EXPECT_TRUE(table.HasInFlight());
  table.Complete(1, Value(42));
  const auto answer = table.Lookup(1, "a");
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->verdict, Verdict::kReplay);
  EXPECT_EQ(*std::static_pointer_cast<const int>(answer->result), 42);
  EXPECT_FALSE(table.HasInFlight());
}

TEST(ReplayTableTest, RefusesAnotherPayloadInFlightAndDone) {
  ReplayTable table;
  table.Begin(3, "a");
  EXPECT_THAT(table.Lookup(3, "b"),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 3"));
  table.Complete(3, Value(1));
  EXPECT_THAT(table.Lookup(3, "b"),
              IsStatus(absl::StatusCode::kAlreadyExists, "step 3"));
}

TEST(ReplayTableTest, ForgetsFailedSteps) {
  ReplayTable table;
  table.Begin(1, "a");
  table.Fail(1);
  EXPECT_EQ(table.Lookup(1, "b")->verdict, Verdict::kNew);
  table.Complete(1, Value(1));  // Not in flight: no effect.
  EXPECT_TRUE(table.done().empty());
}

TEST(ReplayTableTest, RefusesStepsOlderThanTheWindow) {
  ReplayTable table(/*window=*/2);
  for (const uint64_t step : {1, 2, 3}) {
    table.Begin(step, "a");
    table.Complete(step, Value(0));
  }
  EXPECT_THAT(table.Lookup(1, "a"),
              IsStatus(absl::StatusCode::kOutOfRange, "from step 2"));
  EXPECT_EQ(table.Lookup(2, "a")->verdict, Verdict::kReplay);
  EXPECT_EQ(table.Lookup(4, "a")->verdict, Verdict::kNew);
}

TEST(ReplayTableTest, RemembersRestoredStepsWithoutTheirResults) {
  ReplayTable table;
  table.Restore(9, {.digest = "a", .result = nullptr});
  const auto answer = table.Lookup(9, "a");
  ASSERT_THAT(answer, IsOk());
  EXPECT_EQ(answer->verdict, Verdict::kReplay);
  EXPECT_EQ(answer->result, nullptr);
}

TEST(ReplayTableTest, CallsWithoutANumberAreAlwaysNew) {
  ReplayTable table;
  table.Begin(0, "a");
  table.Complete(0, Value(1));
  EXPECT_EQ(table.Lookup(0, "a")->verdict, Verdict::kNew);
  EXPECT_FALSE(table.HasInFlight());
}

}  // namespace
}  // namespace weft
