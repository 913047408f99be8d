#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "src/base/files/disk_room.h"
#include "tests/support/failpoints.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::Key;

// Returns the values of a metric family by folder.
std::map<std::string, double> ValuesOf(const prometheus::Registry& registry,
                                       const std::string& name) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.name != name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      values[metric.label.at(0).value] = metric.gauge.value;
    }
  }
  return values;
}

TEST(DiskMetricsTest, AFolderThatCannotBeReadHasNoMetrics) {
  prometheus::Registry registry;
  DiskMetrics metrics(&registry, {{.label = "state", .path = "/no/such"},
                                  {.label = "spill", .path = "."}});
  metrics.Refresh();
  const auto free = ValuesOf(registry, "weft_disk_free_bytes");
  const auto size = ValuesOf(registry, "weft_disk_size_bytes");
  EXPECT_THAT(free, ElementsAre(Key("spill")));
  EXPECT_THAT(size, ElementsAre(Key("spill")));
  EXPECT_GT(free.at("spill"), 0);
  EXPECT_LE(free.at("spill"), size.at("spill"));
}

TEST(DiskMetricsTest, ADiskThatFailsKeepsItsLastValues) {
  prometheus::Registry registry;
  DiskMetrics metrics(&registry, {{.label = "state", .path = "."}});
  metrics.Refresh();
  const auto before = ValuesOf(registry, "weft_disk_free_bytes");
  ScopedFailpoints fail("files.free_bytes=err(EIO)");
  metrics.Refresh();
  EXPECT_EQ(ValuesOf(registry, "weft_disk_free_bytes"), before);
}

}  // namespace
}  // namespace weft
