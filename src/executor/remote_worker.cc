#include "src/executor/remote_worker.h"

#include <ATen/ATen.h>

#include <utility>
#include <variant>

#include "src/executor/message.h"

namespace weft::executor {

void RemoteWorker::Run() {
  const at::InferenceMode no_autograd;
  while (!stopped_) {
    Message message = Decode(ReceiveMessage(*links_.commands),
                             [this](uint64_t id) { return VersionOf(id); });
    std::visit([this](auto& content) { Do(content); }, message);
  }
}

lora::AdapterVersionPtr RemoteWorker::VersionOf(uint64_t id) const {
  const auto found = versions_.find(id);
  TORCH_CHECK(found != versions_.end(), "no weights have id ", id);
  return found->second;
}

void RemoteWorker::Do(const CacheSize& message) {
  if (!samples()) return;
  cache_ = AllocateCache(runner_.decoder(), message.num_pages,
                         message.page_tokens, message.num_states);
}

void RemoteWorker::Do(const NewVersion& message) {
  const model::Decoder& decoder = runner_.decoder();
  const lora::AdapterLayout layout(decoder.local_config().shape(),
                                   message.config);
  at::Tensor compute_N = at::empty(
      {layout.num_parameters()},
      at::TensorOptions().dtype(decoder.dtype()).device(decoder.device()));
  links_.transfers->Receive(compute_N, 0);
  versions_[message.id] =
      MakeVersion(decoder, message.config, std::move(compute_N));
}

void RemoteWorker::Do(const DropVersions& message) {
  for (const uint64_t id : message.ids) versions_.erase(id);
}

void RemoteWorker::Do(TrainCommand& message) {
  // A batch of which a loss failed had no backward pass.
  runner_.DropPending();
  const auto replica = static_cast<size_t>(links_.replica());
  has_plan_ = replica < message.plans.size();
  if (!has_plan_) return;
  const bool sends =
      replica > 0 && links_.topology.ShardOf(links_.rank).rank == 0;
  const TrainScores scores = runner_.Forward(std::move(message.plans[replica]));
  if (!sends) return;
  for (const at::Tensor* result :
       {&scores.logprobs_E, &scores.entropies_R, &scores.divergences_D,
        &scores.experts_TE, &scores.expert_rows_LE}) {
    if (result->defined()) links_.commands->Send(*result, 0);
  }
}

void RemoteWorker::Do(const GradientsCommand& message) {
  if (!has_plan_) return;
  const auto replica = static_cast<size_t>(links_.replica());
  std::vector<lora::AdapterVersionPtr> trained;
  for (const uint64_t id : message.trained[replica]) {
    trained.push_back(VersionOf(id));
  }
  const lora::LoraGradients gradients =
      lora::ZeroGradients(trained, runner_.decoder().device());
  runner_.Backward(message.gradients_E[replica], gradients);
  for (const lora::LoraGradient& own : gradients) {
    links_.transfers->Send(own.gradient_N, 0);
  }
}

void RemoteWorker::Do(CacheCommand& message) {
  if (samples()) {
    static_cast<void>(runner_.Run(std::move(message.plan), &cache_));
  }
}

void RemoteWorker::Do(const CacheCopy& copy) {
  if (samples()) Copy(copy, &cache_);
}

void RemoteWorker::Do(const StopCommand& /*message*/) { stopped_ = true; }

}  // namespace weft::executor
