#include "server/call/load_history.h"

#include "absl/time/clock.h"

namespace weft::server {

void LoadHistory::Record(absl::Time now, const prometheus::Registry& registry) {
  MutexLock lock(&mu_);
  if (!readings_.empty() && now - readings_.back().steady < kInterval) return;
  const MetricValues values(registry);
  Reading& reading = readings_.emplace_back(
      Reading{.steady = now,
              .wall = absl::Now(),
              .train_tokens = values.Sum("weft_train_tokens_total"),
              .sampled_tokens = values.Sum("weft_sampled_tokens_total"),
              .histograms = {}});
  for (const char* const name : {kQueueWaitMetric, kFirstTokenMetric}) {
    reading.histograms[name] = values.Buckets(name);
  }
  while (now - readings_.front().steady > kLength) readings_.pop_front();
}

std::vector<LoadHistory::Rates> LoadHistory::rates() const {
  MutexLock lock(&mu_);
  std::vector<Rates> rates;
  for (size_t i = 1; i < readings_.size(); ++i) {
    const Reading& from = readings_[i - 1];
    const Reading& to = readings_[i];
    const double seconds = absl::ToDoubleSeconds(to.steady - from.steady);
    rates.push_back(
        {.at = to.wall,
         .train_tokens = (to.train_tokens - from.train_tokens) / seconds,
         .sampled_tokens =
             (to.sampled_tokens - from.sampled_tokens) / seconds});
  }
  return rates;
}

double LoadHistory::Recent(const MetricValues& now, const std::string& name,
                           double q) const {
  MutexLock lock(&mu_);
  Histogram before;
  if (!readings_.empty()) {
    const auto known = readings_.front().histograms.find(name);
    if (known == readings_.front().histograms.end()) return 0;
    before = known->second;
  }
  return Quantile(before, now.Buckets(name), q);
}

}  // namespace weft::server
