#include "src/group/group.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/group/channel.h"
#include "src/model_config/model_shard.h"

namespace weft::group {

class Group::Attempt {
 public:
  explicit Attempt(Group* group) : group_(*group) {
    TORCH_CHECK(!group_.failed_, "the group of ranks has failed");
  }
  void Succeed() { group_.failed_ = false; }

 private:
  Group& group_;
};

Group::Group(const model::Decoder& decoder, const loss::HeadOptions& head,
             parallel::Links links)
    : rank_(decoder, head), links_(std::move(links)) {}

void Group::Stop() {
  if (!failed_) Tell(StopCommand());
}

void Group::Tell(const Message& message) {
  if (links_.alone()) return;
  failed_ = true;
  SendMessage(message, *links_.commands);
}

void Group::Ping() {
  Attempt attempt(this);
  Tell(DropVersions{.ids = TakeDead()});
  attempt.Succeed();
}

void Group::Announce(const lora::LoraRouting& routing) {
  if (links_.alone()) return;
  DropVersions dead{.ids = TakeDead()};
  if (!dead.ids.empty()) Tell(dead);
  for (const lora::LoraSegment& segment : routing) {
    if (!known_.contains(segment.version->id.value())) {
      AnnounceOne(segment.version);
    }
  }
}

std::vector<uint64_t> Group::TakeDead() {
  std::vector<uint64_t> dead;
  std::erase_if(known_, [&](const auto& entry) {
    if (!entry.second.whole.expired()) return false;
    dead.push_back(entry.first);
    return true;
  });
  return dead;
}

void Group::AnnounceOne(const lora::AdapterVersionPtr& version) {
  const parallel::Topology& topology = links_.topology;
  const LoraConfig& config = version->layout->config();
  Known known{.whole = version};
  for (int r = 0; r < topology.tensor_size && topology.tensor_size > 1; ++r) {
    const model::ModelConfig& model = rank_.decoder().config();
    const parallel::Shard shard = topology.ShardOf(r);
    const lora::AdapterLayout local(model::LocalConfig(model, shard).shape(),
                                    config);
    known.parts.push_back(
        {.shard = lora::AdapterShard(*version->layout, local,
                                     model::LocalRanges(model, shard)),
         .num_parameters = local.num_parameters()});
  }
  Tell(NewVersion{.id = version->id.value(), .config = config});
  for (int to = 1; to < topology.size(); ++to) {
    links_.transfers->Send(
        known.parts.empty()
            ? version->compute_N
            : known.parts[topology.ShardOf(to).rank].shard.Slice(
                  version->compute_N),
        to);
  }
  if (!known.parts.empty()) {
    known.own =
        MakeVersion(rank_.decoder(), config,
                    known.parts.front().shard.Slice(version->compute_N));
  }
  known_.emplace(version->id.value(), std::move(known));
}

void Group::UseOwnParts(lora::LoraRouting& routing) const {
  for (lora::LoraSegment& segment : routing) {
    const auto known = known_.find(segment.version->id.value());
    if (known != known_.end() && known->second.own != nullptr) {
      segment.version = known->second.own;
    }
  }
}

std::vector<TrainScores> Group::Forward(std::vector<TrainPlan> plans) {
  Attempt attempt(this);
  gradients_.clear();
  for (const TrainPlan& plan : plans) {
    Announce(plan.batch.routing);
    gradients_.push_back(GradientsOf(plan));
  }
  TrainCommand command{.plans = std::move(plans)};
  Tell(command);
  const std::vector<TrainPlan>& told = command.plans;
  TrainPlan own =
      links_.alone() ? std::move(command.plans.front()) : command.plans.front();
  if (links_.tensor != nullptr) {
    UseOwnParts(own.batch.routing);
    UseOwnParts(own.rows.routing);
    own_gradients_ = MakeGradients(own, rank_.decoder().device());
  }
  std::vector<TrainScores> scores = {rank_.Forward(std::move(own))};
  for (size_t i = 1; i < told.size(); ++i) {
    scores.push_back(ReceiveScores(
        told[i], static_cast<int>(i) * links_.topology.tensor_size));
  }
  attempt.Succeed();
  return scores;
}

TrainScores Group::ReceiveScores(const TrainPlan& plan, int from) {
  TrainScores scores{
      .logprobs_E = at::empty({static_cast<int64_t>(plan.rows.targets.size())},
                              at::kFloat)};
  links_.commands->Receive(scores.logprobs_E, from);
  if (plan.wants_entropy) {
    scores.entropies_R = at::empty(
        {static_cast<int64_t>(plan.rows.temperatures.size())}, at::kFloat);
    links_.commands->Receive(scores.entropies_R, from);
  }
  return scores;
}

void Group::Backward(const std::vector<at::Tensor>& gradients_E) {
  Attempt attempt(this);
  Tell(GradientsCommand{.gradients_E = gradients_E});
  rank_.Backward(gradients_E.front());
  for (size_t i = 0; i < own_gradients_.size(); ++i) {
    AddPart(gradients_.front()[i], /*tensor_rank=*/0,
            own_gradients_[i].gradient_N);
  }
  own_gradients_.clear();
  for (int from = 1; from < links_.topology.size(); ++from) {
    const auto replica = static_cast<size_t>(links_.topology.ReplicaOf(from));
    if (replica < gradients_.size()) ReceiveGradients(replica, from);
  }
  gradients_.clear();
  attempt.Succeed();
}

void Group::DropPending() {
  rank_.DropPending();
  own_gradients_.clear();
  gradients_.clear();
}

void Group::ReceiveGradients(size_t replica, int from) {
  const int tensor_rank = links_.topology.ShardOf(from).rank;
  for (const PlanGradient& whole : gradients_[replica]) {
    const Known& known = known_.at(whole.version->id.value());
    at::Tensor part_N = at::empty(
        {known.parts.empty() ? whole.gradient_N.numel()
                             : known.parts[tensor_rank].num_parameters},
        whole.gradient_N.options());
    links_.transfers->Receive(part_N, from);
    AddPart(whole, tensor_rank, part_N);
  }
}

void Group::AddPart(const PlanGradient& whole, int tensor_rank,
                    const at::Tensor& part_N) const {
  const Known& known = known_.at(whole.version->id.value());
  at::Tensor gradient_N = whole.gradient_N;
  if (known.parts.empty()) {
    gradient_N.add_(part_N);
  } else {
    known.parts[tensor_rank].shard.AddTo(part_N, gradient_N);
  }
}

void Group::MakeCache(int64_t num_pages, int64_t page_tokens) {
  Attempt attempt(this);
  Tell(CacheSize{.num_pages = num_pages, .page_tokens = page_tokens});
  graphs_.reset();
  cache_ = AllocateCache(rank_.decoder(), num_pages, page_tokens);
  attempt.Succeed();
}

void Group::UseDecodeGraphs(int64_t max_rows) {
  std::unique_ptr<StepDevice> device = MakeStepDevice(rank_.decoder());
  if (device == nullptr) return;
  graphs_ = std::make_unique<DecodeGraphs>(
      rank_.decoder(), rank_.head(), &cache_, max_rows, std::move(device));
}

void Group::CopyPage(const kv::PageCopy& copy) {
  Attempt attempt(this);
  Tell(CopyPageCommand{.copy = copy});
  group::CopyPage(copy, &cache_);
  attempt.Succeed();
}

CacheOutput Group::Run(CachePlan plan) {
  Attempt attempt(this);
  Announce(plan.batch.routing);
  if (!links_.alone()) Tell(CacheCommand{.plan = plan});
  for (lora::LoraRouting* routing :
       {&plan.batch.routing, &plan.logit_routing, &plan.scores.routing}) {
    UseOwnParts(*routing);
  }
  CacheOutput output = rank_.Run(std::move(plan), &cache_, graphs_.get());
  attempt.Succeed();
  return output;
}

}  // namespace weft::group
