#include "src/executor/executor.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/executor/message.h"
#include "src/model_config/model_shard.h"

namespace weft::executor {

Executor::Executor(const model::Decoder& decoder, const loss::HeadOptions& head,
                   parallel::Links links)
    : runner_(decoder, head), links_(std::move(links)) {}

void Executor::BeginCall() const {
  TORCH_CHECK(!failed_, "the group of ranks has failed");
}

void Executor::Stop() {
  if (!failed_) Broadcast(StopCommand());
}

void Executor::Broadcast(const Message& message) {
  if (links_.alone()) return;
  failed_ = true;
  SendMessage(message, *links_.commands);
}

void Executor::Ping() {
  BeginCall();
  Broadcast(DropVersions{.ids = TakeDead()});
  EndCall();
}

void Executor::Announce(const lora::LoraRouting& routing) {
  if (links_.alone()) return;
  DropVersions dead{.ids = TakeDead()};
  if (!dead.ids.empty()) Broadcast(dead);
  for (const lora::LoraSegment& segment : routing) {
    if (!sent_versions_.contains(segment.version->id.value())) {
      AnnounceOne(segment.version);
    }
  }
}

std::vector<uint64_t> Executor::TakeDead() {
  std::vector<uint64_t> dead;
  std::erase_if(sent_versions_, [&](const auto& entry) {
    if (!entry.second.whole.expired()) return false;
    dead.push_back(entry.first);
    return true;
  });
  return dead;
}

void Executor::AnnounceOne(const lora::AdapterVersionPtr& version) {
  const parallel::Topology& topology = links_.topology;
  const LoraConfig& config = version->layout->config();
  SentVersion sent{.whole = version};
  for (int r = 0; r < topology.tensor_size && topology.tensor_size > 1; ++r) {
    const model_config::ModelConfig& model = runner_.decoder().config();
    const parallel::Shard shard = topology.ShardOf(r);
    const lora::AdapterLayout local(
        model_config::LocalConfig(model, shard).shape(), config);
    sent.parts.push_back(
        {.shard = lora::AdapterShard(*version->layout, local,
                                     model_config::LocalRanges(model, shard)),
         .num_parameters = local.num_parameters()});
  }
  Broadcast(NewVersion{.id = version->id.value(), .config = config});
  for (int to = 1; to < topology.size(); ++to) {
    links_.transfers->Send(
        sent.parts.empty() ? version->compute_N
                           : sent.parts[topology.ShardOf(to).rank].shard.Slice(
                                 version->compute_N),
        to);
  }
  if (!sent.parts.empty()) {
    sent.own = MakeVersion(runner_.decoder(), config,
                           sent.parts.front().shard.Slice(version->compute_N));
  }
  sent_versions_.emplace(version->id.value(), std::move(sent));
}

void Executor::UseOwnParts(lora::LoraRouting& routing) const {
  for (lora::LoraSegment& segment : routing) {
    const auto known = sent_versions_.find(segment.version->id.value());
    if (known != sent_versions_.end() && known->second.own != nullptr) {
      segment.version = known->second.own;
    }
  }
}

std::vector<TrainScores> Executor::Forward(std::vector<TrainPlan> plans) {
  BeginCall();
  for (const TrainPlan& plan : plans) {
    Announce(plan.batch.routing);
    Announce(plan.distill.batch.routing);
  }
  TrainCommand command{.plans = std::move(plans)};
  Broadcast(command);
  const std::vector<TrainPlan>& sent = command.plans;
  TrainPlan own =
      links_.alone() ? std::move(command.plans.front()) : command.plans.front();
  if (links_.tensor != nullptr) {
    for (lora::LoraRouting* routing :
         {&own.batch.routing, &own.rows.routing, &own.distill.batch.routing,
          &own.distill.rows.scores.routing,
          &own.distill.rows.teacher_routing}) {
      UseOwnParts(*routing);
    }
  }
  std::vector<TrainScores> scores = {runner_.Forward(std::move(own))};
  for (size_t i = 1; i < sent.size(); ++i) {
    scores.push_back(ReceiveScores(
        sent[i], static_cast<int>(i) * links_.topology.tensor_size));
  }
  EndCall();
  return scores;
}

TrainScores Executor::ReceiveScores(const TrainPlan& plan, int from) {
  const size_t distilled = plan.distill.rows.divergences.size();
  const auto receive = [&](size_t size) {
    at::Tensor values = at::empty({static_cast<int64_t>(size)}, at::kFloat);
    links_.commands->Receive(values, from);
    return values;
  };
  TrainScores scores;
  scores.logprobs_E = receive(plan.rows.targets.size() + distilled);
  if (plan.wants_entropy) {
    scores.entropies_R = receive(plan.rows.temperatures.size() + distilled);
  }
  if (distilled > 0) scores.divergences_D = receive(distilled);
  const model_config::ExpertShape& experts =
      runner_.decoder().config().moe.shape;
  if (experts.num_layers() == 0) return scores;
  if (plan.wants_routing) {
    scores.experts_TE = at::empty(
        {plan.batch.tokens_T.size(0), experts.routing_width()}, at::kInt);
    links_.commands->Receive(scores.experts_TE, from);
  }
  scores.expert_rows_LE =
      at::empty({experts.num_layers(), experts.count}, at::kLong);
  links_.commands->Receive(scores.expert_rows_LE, from);
  return scores;
}

void Executor::Backward(const std::vector<at::Tensor>& gradients_E,
                        const std::vector<lora::LoraGradients>& gradients) {
  BeginCall();
  GradientsCommand command{.gradients_E = gradients_E};
  for (const lora::LoraGradients& of_plan : gradients) {
    std::vector<uint64_t>& ids = command.trained.emplace_back();
    for (const lora::LoraGradient& gradient : of_plan) {
      ids.push_back(gradient.version->id.value());
    }
  }
  Broadcast(command);
  RunOwnBackward(gradients_E.front(), gradients.front());
  for (int from = 1; from < links_.topology.size(); ++from) {
    const auto replica = static_cast<size_t>(links_.topology.ReplicaOf(from));
    if (replica < gradients.size()) ReceiveGradients(gradients[replica], from);
  }
  EndCall();
}

void Executor::DropPending() { runner_.DropPending(); }

void Executor::RunOwnBackward(const at::Tensor& gradients_E,
                              const lora::LoraGradients& gradients) {
  if (links_.tensor == nullptr) return runner_.Backward(gradients_E, gradients);
  std::vector<lora::AdapterVersionPtr> parts;
  for (const lora::LoraGradient& whole : gradients) {
    parts.push_back(sent_versions_.at(whole.version->id.value()).own);
  }
  const lora::LoraGradients own =
      lora::ZeroGradients(parts, runner_.decoder().device());
  runner_.Backward(gradients_E, own);
  for (size_t i = 0; i < own.size(); ++i) {
    AddPart(gradients[i], /*tensor_rank=*/0, own[i].gradient_N);
  }
}

void Executor::ReceiveGradients(const lora::LoraGradients& gradients,
                                int from) {
  const int tensor_rank = links_.topology.ShardOf(from).rank;
  for (const lora::LoraGradient& whole : gradients) {
    const SentVersion& sent = sent_versions_.at(whole.version->id.value());
    at::Tensor part_N =
        at::empty({sent.parts.empty() ? whole.gradient_N.numel()
                                      : sent.parts[tensor_rank].num_parameters},
                  whole.gradient_N.options());
    links_.transfers->Receive(part_N, from);
    AddPart(whole, tensor_rank, part_N);
  }
}

void Executor::AddPart(const lora::LoraGradient& whole, int tensor_rank,
                       const at::Tensor& part_N) const {
  const SentVersion& sent = sent_versions_.at(whole.version->id.value());
  at::Tensor gradient_N = whole.gradient_N;
  if (sent.parts.empty()) {
    gradient_N.add_(part_N);
  } else {
    sent.parts[tensor_rank].shard.AddTo(part_N, gradient_N);
  }
}

void Executor::MakeCache(int64_t num_pages, int64_t page_tokens,
                         int64_t num_states) {
  BeginCall();
  Broadcast(CacheSize{.num_pages = num_pages,
                      .page_tokens = page_tokens,
                      .num_states = num_states});
  graphs_.reset();
  cache_ = AllocateCache(runner_.decoder(), num_pages, page_tokens, num_states);
  EndCall();
}

void Executor::UseDecodeGraphs(int64_t max_rows) {
  std::unique_ptr<StepDevice> device = MakeStepDevice(runner_.decoder());
  if (device == nullptr) return;
  graphs_ = std::make_unique<DecodeGraphs>(
      runner_.decoder(), runner_.head(), &cache_, max_rows, std::move(device));
}

void Executor::Copy(const CacheCopy& copy) {
  BeginCall();
  Broadcast(copy);
  executor::Copy(copy, &cache_);
  EndCall();
}

CacheOutput Executor::Run(CachePlan plan) {
  BeginCall();
  Announce(plan.batch.routing);
  if (!links_.alone()) Broadcast(CacheCommand{.plan = plan});
  for (lora::LoraRouting* routing :
       {&plan.batch.routing, &plan.logit_routing, &plan.scores.routing}) {
    UseOwnParts(*routing);
  }
  CacheOutput output = runner_.Run(std::move(plan), &cache_, graphs_.get());
  EndCall();
  return output;
}

}  // namespace weft::executor
