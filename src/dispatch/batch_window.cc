#include "src/dispatch/batch_window.h"

#include <algorithm>

namespace weft::sched {
namespace {

// The longest wait, as a share of the time that the batch is expected to take.
constexpr double kShare = 0.01;
constexpr absl::Duration kLongest = absl::Milliseconds(5);
// A batch starts at once if its wait would be shorter than this. A timer and
// the wake-up of a thread take about this long.
constexpr absl::Duration kShortest = absl::Microseconds(200);
// A batch waits only for adapters that trained within this time.
constexpr absl::Duration kLately = absl::Minutes(1);
// The weight of the latest batch in the average time per token.
constexpr double kLatest = 0.25;

}  // namespace

bool BatchWindow::Waits(const std::vector<AdapterQueue*>& ready,
                        const std::set<AdapterKey>& absent, absl::Time now) {
  start_ = absl::InfiniteFuture();
  // If the clock was set back, the wait begins again.
  if (!wait_began_ || now < *wait_began_) wait_began_ = now;
  std::set<AdapterKey> present;
  int64_t tokens = 0;
  absl::Time deadline = absl::InfiniteFuture();
  for (const AdapterQueue* queue : ready) {
    const WorkItem& item = queue->Ready(now)->item;
    // A barrier runs alone, and it is unknown which other adapters will send a
    // Forward. So no batch waits if an adapter has a barrier or a Forward
    // ready.
    if (item.kind != WorkKind::kTrain || !item.backward) return false;
    present.insert(queue->key());
    tokens += item.tokens;
    deadline = std::min(deadline, item.deadline);
  }
  const absl::Time end = *wait_began_ + WindowOf(tokens);
  if (end <= now || deadline <= end || !LacksAdapters(present, absent, now)) {
    return false;
  }
  start_ = end;
  return true;
}

absl::Duration BatchWindow::WindowOf(int64_t tokens) const {
  const absl::Duration window = std::min(
      kLongest,
      absl::Seconds(kShare * seconds_per_token_ * static_cast<double>(tokens)));
  const bool waits = window >= kShortest && tokens < large_batch_tokens_;
  return waits ? window : absl::ZeroDuration();
}

bool BatchWindow::LacksAdapters(const std::set<AdapterKey>& present,
                                const std::set<AdapterKey>& absent,
                                absl::Time now) const {
  return std::ranges::any_of(trained_at_, [&](const auto& entry) {
    const auto& [adapter, trained_at] = entry;
    return now - trained_at < kLately && !absent.contains(adapter) &&
           !present.contains(adapter);
  });
}

void BatchWindow::Start(const Plan& plan,
                        const std::vector<AdapterQueue*>& ready,
                        absl::Time now) {
  NoteIdle();
  running_tokens_ = plan.tokens;
  std::erase_if(trained_at_, [&](const auto& entry) {
    return now - entry.second >= kLately;
  });
  if (!plan.backward) return;
  for (const AdapterQueue* queue : ready) {
    if (queue->on_device()) trained_at_[queue->key()] = now;
  }
}

void BatchWindow::NoteIdle() {
  wait_began_.reset();
  start_ = absl::InfiniteFuture();
}

int64_t BatchWindow::TokensOf(absl::Duration elapsed) const {
  if (seconds_per_token_ == 0) return 0;
  return static_cast<int64_t>(absl::ToDoubleSeconds(elapsed) /
                              seconds_per_token_);
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
