#include "src/dispatch/batch_planner.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace weft::dispatch {
namespace {

using Queues = std::vector<AdapterQueue*>;

// The adapters that may still add work to the plan, in the order of their
// turns.
class Line {
 public:
  Line(const Queues& queues, const FairShares& shares)
      : queues_(queues), shares_(shares) {
    for (size_t i = 0; i < queues.size(); ++i) Join(i);
  }

  bool empty() const { return tenants_.empty(); }

  void Join(size_t queue) {
    const FairShares::Turn turn = TurnOf(queue);
    tenants_[turn.tenant].emplace(turn.adapter, queue);
  }

  // Removes the adapter whose turn it is and returns its index in `queues_`.
  // The adapter's tenant stays first in line until MoveTenant.
  size_t Take() {
    auto& adapters = tenants_.begin()->second;
    return adapters.extract(adapters.begin()).mapped();
  }

  // Moves the tenant of the latest Take to its new place in line. Removes the
  // tenant if none of its adapters is in line.
  void MoveTenant() {
    auto tenant = tenants_.extract(tenants_.begin());
    if (tenant.mapped().empty()) return;
    tenant.key() = TurnOf(tenant.mapped().begin()->second).tenant;
    tenants_.insert(std::move(tenant));
  }

 private:
  FairShares::Turn TurnOf(size_t queue) const {
    return shares_.TurnOf(queues_[queue]->key());
  }

  const Queues& queues_;
  const FairShares& shares_;
  // Indices of `queues_`, by the tenant's place and then by the adapter's
  // place.
  std::map<FairShares::Place, std::map<FairShares::Place, size_t>> tenants_;
};

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

Plan PlanBatch(const Queues& queues, const std::set<AdapterKey>& held,
               absl::Time now, int64_t max_batch_tokens, FairShares& shares) {
  Plan plan;
  Line line(queues, shares);
  int64_t room = max_batch_tokens;
  bool recorded = false;  // The log records the plan's work.
  std::optional<TeacherName> held_teacher;
  std::vector<std::vector<TrainSlice>> slices(queues.size());
  std::vector<size_t> order;  // Indices of `queues`, in the order of the plan.
  while (!line.empty() && room > 0) {
    const size_t index = line.Take();
    AdapterQueue& queue = *queues[index];
    const AdapterQueue::Entry& head = *queue.Ready(now);
    const bool empty = plan.kind == Plan::Kind::kNone;
    if (empty && head.barrier()) {
      const AdapterQueue::Started started = queue.StartBarrier();
      shares.Charge(queue.key(), started.tokens);
      plan.kind = Plan::Kind::kExclusive;
      plan.work_id = started.slice.work_id;
      return plan;
    }
    if (empty) {
      plan.backward = head.item.backward;
      recorded = head.item.recorded;
    }
    const TeacherName teacher = head.item.teacher;
    const bool is_held = held.contains(teacher.adapter);
    const bool alone = head.item.alone;
    if ((!empty && alone) ||
        (plan.backward && head.item.recorded != recorded) ||
        (is_held && held_teacher && *held_teacher != teacher)) {
      line.MoveTenant();
      continue;
    }
    const std::optional<AdapterQueue::Started> started = queue.StartTrain(
        now, plan.backward, room, max_batch_tokens, /*take_any=*/empty);
    if (started) {
      plan.kind = Plan::Kind::kTrain;
      if (is_held) held_teacher = teacher;
      shares.Charge(queue.key(), started->tokens);
      room -= started->tokens;
      plan.tokens += started->tokens;
      if (slices[index].empty()) order.push_back(index);
      slices[index].push_back(started->slice);
      if (alone) break;
    }
    line.MoveTenant();
    const bool whole =
        started && started->slice.last && started->slice.first_datum == 0;
    if (whole && queue.Ready(now) != nullptr) line.Join(index);
  }
  for (const size_t index : order) {
    plan.slices.insert(plan.slices.end(), slices[index].begin(),
                       slices[index].end());
  }
  return plan;
}

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

}  // namespace weft::dispatch
