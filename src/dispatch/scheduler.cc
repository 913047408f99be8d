#include "src/dispatch/scheduler.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

absl::Status Invalid(const WorkItem& item, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat("work ", item.id, " ", problem));
}

// Returns INVALID_ARGUMENT for a malformed item.
absl::Status CheckForm(const WorkItem& item) {
  const auto invalid = [&](absl::string_view problem) {
    return Invalid(item, problem);
  };
  const bool train = item.kind == WorkKind::kTrain;
  const bool sample = item.kind == WorkKind::kSample;
  if (train != !item.datum_tokens.empty()) {
    return invalid("must have data if and only if it is a training request");
  }
  if (std::any_of(item.datum_tokens.begin(), item.datum_tokens.end(),
                  [](int64_t tokens) { return tokens < 1; })) {
    return invalid("has a datum of less than one token");
  }
  if (!item.datum_prefix.empty() &&
      item.datum_prefix.size() != item.datum_tokens.size()) {
    return invalid("has prefixes of another number of data");
  }
  if (item.tokens < 0) return invalid("has a negative cost");
  if (item.step != 0 && (sample || IsBaseModel(item.adapter))) {
    return invalid("has a step but no place in an order of steps");
  }
  if (item.unnumbered && (!train || item.backward || item.step != 0)) {
    return invalid("is unnumbered but no Forward without a step");
  }
  if (IsBaseModel(item.adapter) && !sample && (!train || item.backward)) {
    return invalid("would change the base model");
  }
  return absl::OkStatus();
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      shares_(options.tenant_weights),
      samples_(options.tenant_weights),
      share_(options.sampling_share),
      window_(options.max_batch_tokens) {
  AddAdapter(AdapterKey::kBaseModel, /*name=*/"", /*tenant=*/"",
             /*last_step=*/0);
}

bool Scheduler::AddAdapter(AdapterKey adapter, const std::string& name,
                           const std::string& tenant, uint64_t last_step) {
  if (!adapters_.try_emplace(adapter, adapter, name, last_step).second) {
    return false;
  }
  shares_.Add(adapter, tenant);
  samples_.AddAdapter(adapter, tenant);
  return true;
}

std::vector<uint64_t> Scheduler::RemoveAdapter(AdapterKey adapter) {
  const auto it = adapters_.find(adapter);
  if (it == adapters_.end() || IsBaseModel(adapter)) return {};
  std::vector<uint64_t> ids = it->second.Unfinishable();
  const std::vector<uint64_t> samples = samples_.RemoveAdapter(adapter);
  ids.insert(ids.end(), samples.begin(), samples.end());
  for (const uint64_t id : ids) NoteLeft(id);
  std::erase_if(
      work_, [&](const auto& work) { return work.second.adapter == adapter; });
  std::erase_if(taken_,
                [&](const auto& sample) { return sample.adapter == adapter; });
  adapters_.erase(it);
  shares_.Remove(adapter);
  backlogged_.erase(adapter);
  held_.erase(adapter);
  window_.Forget(adapter);
  return ids;
}

void Scheduler::SetHeld(AdapterKey adapter, bool held) {
  if (held) {
    held_.insert(adapter);
  } else {
    held_.erase(adapter);
  }
  samples_.SetHeld(adapter, held);
  const auto it = adapters_.find(adapter);
  if (it != adapters_.end()) NoteBacklog(it->second);
}

WorkKinds Scheduler::ReadyKinds(AdapterKey adapter) const {
  const auto it = adapters_.find(adapter);
  if (it == adapters_.end()) return 0;
  const AdapterQueue::Entry* const ready =
      it->second.Ready(absl::InfinitePast());
  const bool trains = ready != nullptr && !ready->item.empty;
  const bool samples = samples_.HasWaiting(adapter);
  return static_cast<WorkKinds>((trains ? kTraining : 0) |
                                (samples ? kSampling : 0));
}

bool Scheduler::IsRunning(AdapterKey adapter) const {
  const auto it = adapters_.find(adapter);
  return it != adapters_.end() &&
         (it->second.on_device() || it->second.has_started());
}

std::vector<uint64_t> Scheduler::WaitingOf(AdapterKey adapter) const {
  std::vector<uint64_t> ids;
  for (const auto& [id, queued] : work_) {
    if (queued.waiting && queued.adapter == adapter) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(), std::greater<>());
  return ids;
}

void Scheduler::SkipTo(AdapterKey adapter, uint64_t step) {
  const auto it = adapters_.find(adapter);
  if (it != adapters_.end()) it->second.SkipTo(step);
}

uint64_t Scheduler::LastStep(AdapterKey adapter) const {
  const auto it = adapters_.find(adapter);
  return it == adapters_.end() ? 0 : it->second.last_step();
}

uint64_t Scheduler::NextStep(AdapterKey adapter) const {
  const auto it = adapters_.find(adapter);
  return it == adapters_.end() ? 0 : it->second.next_step();
}

uint64_t Scheduler::Ahead(AdapterKey adapter, uint64_t step) const {
  const auto it = adapters_.find(adapter);
  return it == adapters_.end() ? 0 : it->second.Ahead(step);
}

absl::StatusOr<uint64_t> Scheduler::Enqueue(WorkItem item, absl::Time now) {
  if (work_.contains(item.id)) {
    return Invalid(item, "has the id of other work");
  }
  WEFT_RETURN_IF_ERROR(CheckForm(item));
  if (!adapters_.contains(item.adapter)) {
    return absl::NotFoundError(absl::StrCat(
        "work ", item.id, " is of an adapter that does not exist"));
  }
  if (item.deadline <= now) {
    return absl::DeadlineExceededError("the deadline has passed already");
  }
  if (item.kind == WorkKind::kTrain) {
    item.tokens = std::accumulate(item.datum_tokens.begin(),
                                  item.datum_tokens.end(), int64_t{0});
  }
  AdapterQueue& queue = adapters_.find(item.adapter)->second;
  const bool sample = item.kind == WorkKind::kSample;
  uint64_t number = 0;
  if (!sample) {
    WEFT_ASSIGN_OR_RETURN(number, queue.NumberFor(item));
  }
  NoteWaiting(item.id, {.adapter = item.adapter,
                        .kind = item.kind,
                        .deadline = item.deadline,
                        .teacher = item.teacher.adapter,
                        .arrival = ++arrivals_});
  if (sample) {
    samples_.Add({.id = item.id,
                  .adapter = std::move(item.adapter),
                  .tokens = item.tokens,
                  .deadline = item.deadline,
                  .arrival = arrivals_});
    return 0;
  }
  queue.Add(std::move(item), number, arrivals_);
  NoteBacklog(queue);
  return number;
}

bool Scheduler::Remove(uint64_t id) {
  const auto it = work_.find(id);
  if (it == work_.end() || !it->second.waiting) return false;
  const AdapterKey adapter = it->second.adapter;
  if (it->second.kind == WorkKind::kSample) {
    samples_.Remove(adapter, it->second.arrival);
  } else {
    AdapterQueue& queue = adapters_.find(adapter)->second;
    if (!queue.Remove(id)) return false;
    NoteBacklog(queue);
  }
  Forget(id);
  return true;
}

bool Scheduler::Empty(uint64_t id) {
  const auto it = work_.find(id);
  if (it == work_.end() || !it->second.waiting || it->second.emptied) {
    return false;
  }
  Queued& queued = it->second;
  AdapterQueue& queue = adapters_.find(queued.adapter)->second;
  if (!queue.Empty(id)) return false;
  queued.emptied = true;
  deadlines_.erase({queued.deadline, id});
  NoteBacklog(queue);
  return true;
}

std::vector<uint64_t> Scheduler::Expired(absl::Time now) const {
  std::vector<uint64_t> ids;
  for (const auto& [deadline, id] : deadlines_) {
    if (deadline > now) break;
    ids.push_back(id);
  }
  return ids;
}

absl::Time Scheduler::NextDeadline() const {
  return deadlines_.empty() ? absl::InfiniteFuture()
                            : deadlines_.begin()->first;
}

Plan Scheduler::Next(absl::Time now, int active_decodes) {
  std::erase_if(taught_by_held_,
                [&](uint64_t id) { return !work_.contains(id); });
  std::vector<AdapterQueue*> ready;
  for (AdapterKey adapter : backlogged_) {
    AdapterQueue& queue = adapters_.find(adapter)->second;
    if (!queue.on_device() && CanStart(queue, now) &&
        !MayNotDivide(*queue.Ready(now))) {
      ready.push_back(&queue);
    }
  }
  const bool can_decode = active_decodes > 0 || samples_.HasReady(now);
  if (ready.empty() && !can_decode) {
    share_.NoteIdle();
    window_.NoteIdle();
    return Plan{};
  }
  if (!can_decode && window_.Waits(ready, held_, now)) return Plan{};
  if (share_.ChooseDecode(!ready.empty(), can_decode)) {
    Plan plan;
    plan.kind = Plan::Kind::kDecode;
    return plan;
  }
  Plan plan = PlanBatch(ready, held_, now, options_.max_batch_tokens, shares_);
  charged_time_ = absl::ZeroDuration();
  if (plan.kind == Plan::Kind::kExclusive) {
    exclusive_ = work_.at(plan.work_id).adapter;
    NoteLeft(plan.work_id);
  }
  if (plan.kind == Plan::Kind::kTrain) window_.Start(plan, ready, now);
  for (const TrainSlice& slice : plan.slices) {
    NoteLeft(slice.work_id);
    if (slice.first_datum == 0 && !slice.last &&
        held_.contains(work_.at(slice.work_id).teacher)) {
      taught_by_held_.insert(slice.work_id);
    }
  }
  for (const AdapterQueue* queue : ready) NoteBacklog(*queue);
  return plan;
}

std::vector<uint64_t> Scheduler::TakeSamples(
    absl::Time now, int max, const std::set<std::string>& without) {
  taken_.clear();
  std::vector<uint64_t> ids;
  while (static_cast<int>(ids.size()) < max) {
    std::optional<SampleQueue::Entry> entry = samples_.Take(now, without);
    if (!entry) break;
    ids.push_back(entry->id);
    Forget(entry->id);
    taken_.push_back(*std::move(entry));
  }
  return ids;
}

bool Scheduler::PutBack(uint64_t id) {
  const auto it =
      std::find_if(taken_.begin(), taken_.end(),
                   [id](const SampleQueue::Entry& e) { return e.id == id; });
  if (it == taken_.end() || work_.contains(id)) return false;
  NoteWaiting(id, {.adapter = it->adapter,
                   .kind = WorkKind::kSample,
                   .deadline = it->deadline,
                   .arrival = it->arrival});
  samples_.PutBack(*it);
  taken_.erase(it);
  return true;
}

void Scheduler::Finished(uint64_t work_id, bool ok, bool more) {
  const auto it = work_.find(work_id);
  if (it == work_.end() || it->second.waiting) return;
  AdapterQueue& queue = adapters_.find(it->second.adapter)->second;
  if (queue.Finish(work_id, ok, more)) work_.erase(it);
  NoteBacklog(queue);
}

void Scheduler::ChargeTime(AdapterKey adapter, absl::Duration elapsed) {
  if (!charged_time_) return;
  *charged_time_ += elapsed;
  if (adapters_.contains(adapter)) {
    shares_.Charge(adapter, window_.TokensOf(elapsed));
  }
}

void Scheduler::AccountDeviceTime(Plan::Kind kind, absl::Duration elapsed) {
  if (kind == Plan::Kind::kDecode) {
    share_.AddDecoding(elapsed);
  } else if (kind != Plan::Kind::kNone) {
    share_.AddTraining(elapsed);
    if (kind == Plan::Kind::kTrain) {
      window_.Ran(std::max(absl::ZeroDuration(), elapsed - *charged_time_));
    }
    if (kind == Plan::Kind::kExclusive) ChargeTime(exclusive_, elapsed);
    charged_time_.reset();
  }
}

bool Scheduler::Idle() const { return work_.empty(); }

int64_t Scheduler::QueueDepth(WorkKind kind) const {
  return depth_[static_cast<size_t>(kind)];
}

int64_t Scheduler::QueueDepthOf(const std::string& tenant) const {
  const auto depth = depth_of_.find(tenant);
  return depth == depth_of_.end() ? 0 : depth->second;
}

const std::string& Scheduler::TenantOf(AdapterKey adapter) const {
  return shares_.TenantOf(adapter);
}

void Scheduler::NoteWaiting(uint64_t id, Queued queued) {
  ++depth_[static_cast<size_t>(queued.kind)];
  ++depth_of_[TenantOf(queued.adapter)];
  if (queued.deadline != absl::InfiniteFuture()) {
    deadlines_.emplace(queued.deadline, id);
  }
  work_.emplace(id, std::move(queued));
}

void Scheduler::NoteLeft(uint64_t id) {
  const auto it = work_.find(id);
  if (it == work_.end() || !it->second.waiting) return;
  Queued& queued = it->second;
  queued.waiting = false;
  --depth_[static_cast<size_t>(queued.kind)];
  const auto depth = depth_of_.find(TenantOf(queued.adapter));
  if (--depth->second == 0) depth_of_.erase(depth);
  deadlines_.erase({queued.deadline, id});
}

void Scheduler::Forget(uint64_t id) {
  NoteLeft(id);
  work_.erase(id);
}

void Scheduler::NoteBacklog(const AdapterQueue& queue) {
  if (queue.has_waiting()) {
    backlogged_.insert(queue.key());
  } else {
    backlogged_.erase(queue.key());
  }
  // An adapter that waits for a missing step or for its weights counts as idle,
  // so it earns no credit.
  shares_.SetActive(queue.key(),
                    queue.on_device() || CanStart(queue, absl::InfinitePast()));
}

bool Scheduler::CanStart(const AdapterQueue& queue, absl::Time now) const {
  const AdapterQueue::Entry* const ready = queue.Ready(now);
  return ready != nullptr &&
         (ready->item.empty || !held_.contains(queue.key()));
}

bool Scheduler::MayNotDivide(const AdapterQueue::Entry& ready) const {
  const WorkItem& item = ready.item;
  const bool begins_slices = ready.next_datum == 0 &&
                             item.datum_tokens.size() > 1 &&
                             item.tokens > options_.max_batch_tokens;
  const bool waits_for_teacher =
      !taught_by_held_.empty() && held_.contains(item.teacher.adapter);
  return begins_slices && (undivided_only_ || waits_for_teacher);
}

}  // namespace weft::dispatch
