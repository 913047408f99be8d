// Tests that tenants share the base model as they share their adapters.
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/dispatch/fake_engine_thread.h"
#include "tests/support/status_matchers.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

class BaseModelSharesTest : public ::testing::Test {
 protected:
  // Sends a sample of the base model.
  absl::Status Sample(const std::string& tenant) {
    absl::Status refused;
    (void)desk_.Submit(
        {.tenant = tenant, .prompt = {1, 2}, .config = {.max_tokens = 10}},
        /*on_delta=*/{}, [&refused](const absl::StatusOr<SampleResult>& end) {
          refused = end.status();
        });
    return refused;
  }

  // Returns whose samples are taken, in their order.
  std::vector<std::string> TakeAll(const std::set<std::string>& without = {}) {
    std::vector<std::string> tenants;
    while (const auto task = desk_.Take(without)) {
      EXPECT_EQ(task->adapter, AdapterKey::kBaseModel);
      tenants.push_back(task->tenant);
    }
    return tenants;
  }

  FakeEngineThread engine_{{}};
  SampleDesk& desk_ = engine_.dispatcher().samples();
};

TEST_F(BaseModelSharesTest, TenantsTakeTurns) {
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Sample("alice"), IsOk());
  for (int i = 0; i < 2; ++i) EXPECT_THAT(Sample("bob"), IsOk());
  EXPECT_THAT(TakeAll(), ElementsAre("alice", "bob", "alice", "bob", "alice"));
}

TEST_F(BaseModelSharesTest, ATenantWithoutRoomIsPassedOver) {
  EXPECT_THAT(Sample("alice"), IsOk());
  EXPECT_THAT(Sample("bob"), IsOk());
  EXPECT_THAT(TakeAll({"alice"}), ElementsAre("bob"));
  EXPECT_THAT(TakeAll(), ElementsAre("alice"));
}

TEST_F(BaseModelSharesTest, TenantsShareABatchOfForwards) {
  TrainRequest forward = OneDatum("", 0);
  forward.backward = false;
  for (const char* tenant : {"alice", "bob"}) {
    forward.tenant = tenant;
    (void)engine_.dispatcher().steps().Submit(
        forward, {.kind = WorkKind::kTrain, .datum_tokens = {10}},
        [](const absl::StatusOr<StepResultPtr>& end, bool) {
          EXPECT_THAT(end, IsOk());
        });
  }
  const std::optional<Work> work = engine_.Next();
  ASSERT_TRUE(work && std::holds_alternative<RunTrain>(*work));
  const RunTrain& train = std::get<RunTrain>(*work);
  ASSERT_THAT(train.slices, SizeIs(2));
  for (const StepSlice& slice : train.slices) {
    EXPECT_EQ(slice.step.adapter, AdapterKey::kBaseModel);
  }
}

}  // namespace
}  // namespace weft::dispatch
