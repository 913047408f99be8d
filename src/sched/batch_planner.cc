#include "src/sched/batch_planner.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>

namespace weft::sched {
namespace {

// An adapter's turn: who was served least goes first, then who came first.
struct Turn {
  int64_t virtual_time = 0;
  uint64_t arrival = 0;
  size_t queue = 0;

  friend bool operator>(const Turn& a, const Turn& b) {
    return std::tie(a.virtual_time, a.arrival) >
           std::tie(b.virtual_time, b.arrival);
  }
};

using Turns = std::priority_queue<Turn, std::vector<Turn>, std::greater<>>;

void PushTurn(Turns& turns, const AdapterQueue& queue, size_t index,
              absl::Time now) {
  const AdapterQueue::Entry* head = queue.Ready(now);
  if (head == nullptr) return;
  turns.push({.virtual_time = queue.virtual_time,
              .arrival = head->arrival,
              .queue = index});
}

}  // namespace

Plan PlanBatch(const std::vector<AdapterQueue*>& queues, absl::Time now,
               int64_t max_batch_tokens, int64_t* virtual_time) {
  Turns turns;
  for (size_t i = 0; i < queues.size(); ++i)
    PushTurn(turns, *queues[i], i, now);
  Plan plan;
  if (turns.empty()) return plan;

  AdapterQueue& first = *queues[turns.top().queue];
  *virtual_time = std::max(*virtual_time, first.virtual_time);
  const AdapterQueue::Entry* head = first.Ready(now);
  if (head->barrier()) {
    plan.kind = Plan::Kind::kExclusive;
    plan.work_id = first.StartBarrier(now);
    return plan;
  }
  plan.kind = Plan::Kind::kTrain;
  plan.backward = head->item.backward;
  int64_t room = max_batch_tokens;
  bool empty = true;
  std::vector<std::vector<TrainSlice>> slices(queues.size());
  std::vector<size_t> order;  // Of adapters, as they enter the plan.
  while (!turns.empty() && room > 0) {
    const size_t index = turns.top().queue;
    turns.pop();
    AdapterQueue& queue = *queues[index];
    const int64_t start = queue.virtual_time;
    const std::optional<TrainSlice> slice = queue.StartTrain(
        now, plan.backward, room, max_batch_tokens, /*take_any=*/empty);
    if (!slice) continue;
    *virtual_time = std::max(*virtual_time, start);
    empty = false;
    room -= queue.virtual_time - start;
    if (slices[index].empty()) order.push_back(index);
    slices[index].push_back(*slice);
    const bool whole = slice->last && slice->first_datum == 0;
    if (whole) PushTurn(turns, queue, index, now);
  }
  for (const size_t index : order) {
    plan.slices.insert(plan.slices.end(), slices[index].begin(),
                       slices[index].end());
  }
  return plan;
}

}  // namespace weft::sched
