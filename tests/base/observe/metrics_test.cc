#include "src/base/observe/metrics.h"

#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/observe/process_collector.h"

namespace weft {
namespace {

using ::testing::ElementsAre;

TEST(MetricsTest, SameNameAndLabelsAreTheSameMetric) {
  prometheus::Registry registry;
  prometheus::Counter& first =
      AddCounter(&registry, "a_total", "Help.", {{"kind", "x"}});
  prometheus::Counter& again =
      AddCounter(&registry, "a_total", "Help.", {{"kind", "x"}});
  prometheus::Counter& other =
      AddCounter(&registry, "a_total", "Help.", {{"kind", "y"}});
  EXPECT_EQ(&first, &again);
  EXPECT_NE(&first, &other);
}

TEST(MetricsTest, ExponentialBucketsGrowByTheFactor) {
  EXPECT_THAT(ExponentialBuckets(1, 4, 4), ElementsAre(1, 4, 16, 64));
  EXPECT_TRUE(ExponentialBuckets(1, 4, 0).empty());
}

TEST(MetricsTest, LatencyBucketsAscend) {
  const std::vector<double> buckets = LatencyBuckets();
  for (size_t i = 1; i < buckets.size(); ++i) {
    EXPECT_LT(buckets[i - 1], buckets[i]);
  }
}

TEST(MetricsTest, EveryLabelValueIsThereBeforeAnyEvent) {
  prometheus::Registry registry;
  const LabelledCounters counters(&registry, "b_total", "Help.", "reason",
                                  {"one", "two"});
  counters[1].Increment();
  const auto families = registry.Collect();
  ASSERT_EQ(families.size(), 1u);
  std::map<std::string, double> values;
  for (const auto& metric : families[0].metric) {
    values[metric.label.at(0).value] = metric.counter.value;
  }
  EXPECT_EQ(values, (std::map<std::string, double>{{"one", 0}, {"two", 1}}));
}

TEST(MetricsTest, SelectLeavesOneGaugeAtOne) {
  prometheus::Registry registry;
  const LabelledGauges phase(&registry, "phase", "Help.", "phase",
                             {"a", "b", "c"});
  phase.Select(0);
  phase.Select(2);
  EXPECT_EQ(phase[0].Value(), 0);
  EXPECT_EQ(phase[1].Value(), 0);
  EXPECT_EQ(phase[2].Value(), 1);
}

TEST(MetricsTest, LabelledHistogramsObserveApart) {
  prometheus::Registry registry;
  const LabelledHistograms seconds(&registry, "c_seconds", "Help.", {1, 10},
                                   "kind", {"x", "y"});
  seconds[0].Observe(5);
  EXPECT_EQ(seconds[0].Collect().histogram.sample_count, 1u);
  EXPECT_EQ(seconds[1].Collect().histogram.sample_count, 0u);
}

TEST(ProcessCollectorTest, ReportsThisProcess) {
  std::map<std::string, double> values;
  for (const auto& family : ProcessCollector().Collect()) {
    values[family.name] = family.type == prometheus::MetricType::Counter
                              ? family.metric.at(0).counter.value
                              : family.metric.at(0).gauge.value;
  }
  EXPECT_GE(values.at("process_cpu_seconds_total"), 0);
  EXPECT_GT(values.at("process_resident_memory_bytes"), 1 << 20);
  EXPECT_GT(values.at("process_virtual_memory_bytes"),
            values.at("process_resident_memory_bytes"));
  EXPECT_GE(values.at("process_open_fds"), 3);
  EXPECT_GT(values.at("process_max_fds"), values.at("process_open_fds"));
  EXPECT_GE(values.at("process_threads"), 1);
  EXPECT_EQ(values.at("weft_log_lines_dropped_total"), 0);
  // The time is after 2020 and before 2100.
  EXPECT_GT(values.at("process_start_time_seconds"), 1577836800);
  EXPECT_LT(values.at("process_start_time_seconds"), 4102444800);
}

}  // namespace
}  // namespace weft
