#include "src/dispatch/batch_planner.h"

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace weft::sched {
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

  [[nodiscard]] bool empty() const { return tenants_.empty(); }

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
  [[nodiscard]] FairShares::Turn TurnOf(size_t queue) const {
    return shares_.TurnOf(queues_[queue]->key());
  }

  const Queues& queues_;
  const FairShares& shares_;
  // Indices of `queues_`, by the tenant's place and then by the adapter's
  // place.
  std::map<FairShares::Place, std::map<FairShares::Place, size_t>> tenants_;
};

}  // namespace

Plan PlanBatch(const Queues& queues, absl::Time now, int64_t max_batch_tokens,
               FairShares& shares) {
  Plan plan;
  Line line(queues, shares);
  int64_t room = max_batch_tokens;
  bool recorded = false;  // The log records the plan's work.
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
    if (plan.backward && head.item.recorded != recorded) {
      line.MoveTenant();
      continue;
    }
    const std::optional<AdapterQueue::Started> started = queue.StartTrain(
        now, plan.backward, room, max_batch_tokens, /*take_any=*/empty);
    if (started) {
      plan.kind = Plan::Kind::kTrain;
      shares.Charge(queue.key(), started->tokens);
      room -= started->tokens;
      plan.tokens += started->tokens;
      if (slices[index].empty()) order.push_back(index);
      slices[index].push_back(started->slice);
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

}  // namespace weft::sched
