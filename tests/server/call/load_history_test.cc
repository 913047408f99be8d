// Tests the memory of the server's load, and quantiles of histograms.
#include "server/call/load_history.h"

#include "gmock/gmock.h"
#include "src/base/observe/metrics.h"

namespace weft::server {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(QuantileTest, IsThatOfWhatCameAfterTheFirstState) {
  const double inf = std::numeric_limits<double>::infinity();
  const Histogram none;
  const Histogram one = {{1, 10}, {2, 10}, {4, 10}, {inf, 10}};
  const Histogram two = {{1, 10}, {2, 20}, {4, 20}, {inf, 20}};
  EXPECT_EQ(Quantile(none, none, 0.5), 0);
  EXPECT_EQ(Quantile(one, one, 0.5), 0);
  EXPECT_EQ(Quantile(none, one, 0.5), 0.5);
  EXPECT_EQ(Quantile(one, two, 0.5), 1.5);
  const Histogram beyond = {{1, 10}, {2, 10}, {4, 10}, {inf, 30}};
  EXPECT_EQ(Quantile(one, beyond, 0.99), 4);
}

class LoadHistoryTest : public ::testing::Test {
 protected:
  void Step(double tokens, absl::Duration pause) {
    trained_.Increment(tokens);
    now_ += pause;
    history_.Record(now_, registry_);
  }

  prometheus::Registry registry_;
  prometheus::Counter& trained_ =
      AddCounter(&registry_, "weft_train_tokens_total", "");
  prometheus::Histogram& waits_ =
      AddHistogram(&registry_, "weft_queue_wait_seconds", "", {1, 2, 4});
  LoadHistory history_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(LoadHistoryTest, HasTheRatesOfTheLastTenMinutes) {
  Step(0, absl::ZeroDuration());
  EXPECT_THAT(history_.rates(), IsEmpty());
  Step(50, absl::Seconds(1));  // Too soon for a reading of its own.
  Step(50, absl::Seconds(4));
  ASSERT_THAT(history_.rates(), SizeIs(1));
  EXPECT_EQ(history_.rates()[0].train_tokens, 20);
  for (int i = 0; i < 200; ++i) Step(10, LoadHistory::kInterval);
  EXPECT_THAT(history_.rates(), SizeIs(120));
  EXPECT_EQ(history_.rates().back().train_tokens, 2);
}

TEST_F(LoadHistoryTest, QuantilesForgetWhatIsOld) {
  waits_.Observe(3);
  Step(0, absl::ZeroDuration());
  waits_.Observe(0.5);
  const MetricValues now(registry_);
  EXPECT_EQ(history_.Recent(now, "weft_queue_wait_seconds", 1), 1);
  EXPECT_EQ(history_.Recent(now, "no_such_metric", 1), 0);
}

}  // namespace
}  // namespace weft::server
