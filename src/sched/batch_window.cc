#include "src/sched/batch_window.h"

#include <algorithm>

namespace weft::sched {
namespace {

// The most that a wait adds to the time of a batch.
constexpr double kShare = 0.01;
constexpr absl::Duration kLongest = absl::Milliseconds(5);
// A shorter wait would end late, because a timer and a wake take as long.
constexpr absl::Duration kShortest = absl::Microseconds(200);
// An adapter that has not trained for so long is not expected.
constexpr absl::Duration kLately = absl::Minutes(1);
// The weight of the latest batch in the average.
constexpr double kLatest = 0.25;

}  // namespace

absl::Time BatchWindow::StartOf(const Ready& ready,
                                const std::set<AdapterKey>& absent,
                                absl::Time now) {
  if (!wait_began_) wait_began_ = now;
  const absl::Duration window =
      std::min(kLongest, absl::Seconds(kShare * seconds_per_token_ *
                                       static_cast<double>(ready.tokens)));
  if (window < kShortest || ready.tokens >= large_batch_tokens_ ||
      !LacksAdapters(ready, absent, now)) {
    return now;
  }
  return *wait_began_ + window;
}

bool BatchWindow::LacksAdapters(const Ready& ready,
                                const std::set<AdapterKey>& absent,
                                absl::Time now) const {
  return std::ranges::any_of(trained_at_, [&](const auto& entry) {
    const auto& [adapter, trained_at] = entry;
    return now - trained_at < kLately && !absent.contains(adapter) &&
           !std::ranges::binary_search(ready.adapters, adapter);
  });
}

void BatchWindow::Start(const Ready& batch, absl::Time now) {
  wait_began_.reset();
  running_tokens_ = batch.tokens;
  std::erase_if(trained_at_, [&](const auto& entry) {
    return now - entry.second >= kLately;
  });
  for (const AdapterKey adapter : batch.adapters) trained_at_[adapter] = now;
}

void BatchWindow::Ran(absl::Duration elapsed) {
  if (running_tokens_ == 0) return;
  const double latest =
      absl::ToDoubleSeconds(elapsed) / static_cast<double>(running_tokens_);
  seconds_per_token_ += seconds_per_token_ == 0
                            ? latest
                            : kLatest * (latest - seconds_per_token_);
  running_tokens_ = 0;
}

}  // namespace weft::sched
