#include "server/load_history.h"

#include "absl/time/clock.h"

namespace weft {

void LoadHistory::Record(absl::Time now, const prometheus::Registry& registry) {
  MutexLock lock(&mu_);
  if (!readings_.empty() && now - readings_.back().steady < kInterval) return;
  readings_.push_back(
      {.steady = now, .wall = absl::Now(), .values = MetricValues(registry)});
  while (now - readings_.front().steady > kLength) readings_.pop_front();
}

std::vector<LoadHistory::Rates> LoadHistory::rates() const {
  MutexLock lock(&mu_);
  std::vector<Rates> rates;
  for (size_t i = 1; i < readings_.size(); ++i) {
    const Reading& from = readings_[i - 1];
    const Reading& to = readings_[i];
    const auto rate = [&](const char* name) {
      return (to.values.Sum(name) - from.values.Sum(name)) /
             absl::ToDoubleSeconds(to.steady - from.steady);
    };
    rates.push_back({.at = to.wall,
                     .train_tokens = rate("weft_train_tokens_total"),
                     .sampled_tokens = rate("weft_sampled_tokens_total")});
  }
  return rates;
}

double LoadHistory::Recent(const MetricValues& now, const std::string& name,
                           double q) const {
  MutexLock lock(&mu_);
  const Histogram before =
      readings_.empty() ? Histogram() : readings_.front().values.Buckets(name);
  return Quantile(before, now.Buckets(name), q);
}

}  // namespace weft
