// Tests the list of adapters, page by page, and the totals over all adapters.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "src/base/observe/metrics.h"
#include "tests/dispatch/fake_engine_thread.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class AdapterListTest : public ::testing::Test {
 protected:
  void Create(const std::string& id) {
    engine_.Create(id, "tenant", [](const absl::StatusOr<AdapterKey>& key) {
      EXPECT_TRUE(key.ok()) << key.status();
    });
    (void)engine_.Next();
  }
  std::vector<std::string> List(const ListAdaptersRequest& request) {
    const AdapterPage page = *desk_.List(request);
    more_ = page.more;
    std::vector<std::string> ids;
    for (const AdapterInfo& info : page.adapters) {
      ids.push_back(info.adapter_id);
    }
    return ids;
  }

  FakeEngineThread engine_{{.residency = {.max_resident = 10000},
                            .max_adapters = 10000,
                            .max_adapters_per_tenant = 10000}};
  AdapterDesk& desk_ = engine_.dispatcher().adapters();
  bool more_ = false;
};

TEST_F(AdapterListTest, PagesAreOrderedByIdAndSayWhetherMoreCome) {
  EXPECT_THAT(List({}), IsEmpty());
  EXPECT_FALSE(more_);
  for (const char* id : {"d", "b", "a", "c"}) Create(id);
  EXPECT_EQ(desk_.Count(), 4U);
  EXPECT_THAT(List({.size = 3}), ElementsAre("a", "b", "c"));
  EXPECT_TRUE(more_);
  EXPECT_THAT(List({.size = 3, .after = "c"}), ElementsAre("d"));
  EXPECT_FALSE(more_);
  EXPECT_THAT(List({.size = 4}), ElementsAre("a", "b", "c", "d"));
  EXPECT_FALSE(more_);
  EXPECT_THAT(List({.size = 4, .after = "d"}), IsEmpty());
  EXPECT_FALSE(more_);
}

TEST_F(AdapterListTest, TheWeightsOfACheckpointAreNoAdapter) {
  Create("a");
  const AdapterKey key = desk_.NewKey();
  desk_.AddSampler(key, "a", "tenant", {.image_bytes = 100});
  EXPECT_THAT(List({.size = 4}), ElementsAre("a"));
  EXPECT_EQ(desk_.Count(), 1U);
  EXPECT_NE(desk_.KeyOf("a"), key);
  const TenantLoad load = desk_.Watch({.tenants = {"tenant"}}).tenants[0];
  EXPECT_EQ(load.num_adapters, 1U);
  EXPECT_EQ(load.adapter_bytes, 10U);  // Those of the adapter.
  (void)desk_.Remove(key);
  EXPECT_THAT(List({.size = 4}), ElementsAre("a"));
}

TEST_F(AdapterListTest, APageGoesOnAfterAnAdapterThatIsGone) {
  for (const char* id : {"a", "b", "c"}) Create(id);
  EXPECT_THAT(List({.size = 2}), ElementsAre("a", "b"));
  (void)desk_.Remove(*desk_.KeyOf("b"));
  EXPECT_THAT(List({.size = 2, .after = "b"}), ElementsAre("c"));
}

TEST_F(AdapterListTest, APageOfManyHoldsNoMoreThanWasAskedFor) {
  constexpr int kAdapters = 1000;
  for (int i = 0; i < kAdapters; ++i) Create(absl::StrCat("a", 10000 + i));
  EXPECT_EQ(desk_.Count(), size_t{kAdapters});
  EXPECT_THAT(List({.size = 2, .after = "a10499"}),
              ElementsAre("a10500", "a10501"));
  EXPECT_TRUE(more_);
}

TEST_F(AdapterListTest, TheMetricOfBytesFollowsEachAdapter) {
  const prometheus::Gauge& bytes =
      AddGauge(&engine_.registry(), "weft_adapter_bytes",
               "Bytes of all adapters on the device.");
  for (const char* id : {"a", "b", "c"}) Create(id);
  EXPECT_EQ(bytes.Value(), 30);
  const AdapterKey a = *desk_.KeyOf("a");
  desk_.Publish(a, {.info = {.resident_bytes = 25}});
  EXPECT_EQ(bytes.Value(), 45);
  desk_.Publish(a, {.info = {.resident_bytes = 0}});
  EXPECT_EQ(bytes.Value(), 20);
  (void)desk_.Remove(*desk_.KeyOf("b"));
  EXPECT_EQ(bytes.Value(), 10);
  (void)desk_.Remove(a);
  EXPECT_EQ(bytes.Value(), 10);
}

}  // namespace
}  // namespace weft::dispatch
