#include "server/wire/response_conversion.h"

#include <bit>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/base/fingerprint.h"

namespace weft::server {
namespace {

static_assert(std::endian::native == std::endian::little,
              "raw fields are copied, not swapped");

template <typename T>
void CopyRaw(const std::vector<T>& values, std::string* out) {
  out->assign(reinterpret_cast<const char*>(values.data()),
              values.size() * sizeof(T));
}

template <typename Message>
void FillTrainResponse(const TrainResult& result, Message* out) {
  out->mutable_results()->Reserve(static_cast<int>(result.data.size()));
  for (const DatumResult& datum : result.data) {
    v1::DatumResult* const to = out->add_results();
    CopyRaw(datum.logprobs, to->mutable_logprobs_le());
    CopyRaw(datum.losses, to->mutable_losses_le());
    CopyRaw(datum.entropies, to->mutable_entropies_le());
    CopyRaw(datum.routing, to->mutable_routing_le());
  }
  out->mutable_metrics()->insert(result.metrics.begin(), result.metrics.end());
  out->set_step(result.step);
}

v1::FinishReason ToProto(FinishReason reason) {
  static_assert(static_cast<int>(FinishReason::kLength) ==
                v1::FINISH_REASON_LENGTH);
  return static_cast<v1::FinishReason>(reason);
}

void FillTop(const std::vector<TopLogprobs>& rows,
             google::protobuf::RepeatedPtrField<v1::TopLogprobs>* out) {
  for (const TopLogprobs& row : rows) {
    v1::TopLogprobs* const to = out->Add();
    for (const auto& [token, logprob] : row) {
      to->add_tokens(static_cast<uint32_t>(token));
      to->add_logprobs(logprob);
    }
  }
}

// v1::Sample and v1::SampleStreamResponse both have these fields.
template <typename Message>
void FillSample(const Sample& sample, Message* out) {
  out->mutable_tokens()->Add(sample.tokens.begin(), sample.tokens.end());
  out->mutable_logprobs()->Add(sample.logprobs.begin(), sample.logprobs.end());
  out->set_finish_reason(ToProto(sample.finish_reason));
  FillTop(sample.top_logprobs, out->mutable_top_logprobs());
  CopyRaw(sample.routing, out->mutable_routing_le());
  CopyRaw(sample.support.offsets, out->mutable_support_offsets_le());
  CopyRaw(sample.support.tokens, out->mutable_support_tokens_le());
  out->set_sequence_id(sample.sequence_id);
  for (const VersionSpan& span : sample.version_spans) {
    v1::VersionSpan* const to = out->add_version_spans();
    to->set_version(span.version);
    to->set_tokens(span.tokens);
  }
}

// v1::SampleResponse and v1::SampleStreamResponse both have these fields.
template <typename Result, typename Message>
void FillPrompt(const Result& result, Message* out) {
  out->mutable_prompt_logprobs()->Add(result.prompt_logprobs.begin(),
                                      result.prompt_logprobs.end());
  FillTop(result.prompt_top_logprobs, out->mutable_prompt_top_logprobs());
  out->mutable_prompt_target_logprobs()->Add(
      result.prompt_target_logprobs.begin(),
      result.prompt_target_logprobs.end());
  FillTop(result.prompt_alternatives, out->mutable_prompt_alternatives());
  out->set_prompt_cached_tokens(
      static_cast<uint32_t>(result.prompt_cached_tokens));
  out->set_version(result.version);
}

double UnixSecondsOf(absl::Time time) {
  return absl::ToDoubleSeconds(time - absl::UnixEpoch());
}

}  // namespace

void ToProto(const TrainResult& result, v1::ForwardBackwardResponse* out) {
  FillTrainResponse(result, out);
}

void ToProto(const TrainResult& result, v1::ForwardResponse* out) {
  FillTrainResponse(result, out);
}

void ToProto(const OptimStepResult& result, v1::OptimStepResponse* out) {
  out->set_grad_norm(result.grad_norm);
  out->set_version(result.version);
  out->set_step(result.step);
  out->set_accumulated_tokens(result.accumulated_tokens);
}

void ToProto(const SampleResult& result, v1::SampleResponse* out) {
  for (const Sample& sample : result.samples) {
    FillSample(sample, out->add_samples());
  }
  FillPrompt(result, out);
}

void ToProto(const SampleDelta& delta, v1::SampleStreamResponse* out) {
  out->set_sample_index(static_cast<uint32_t>(delta.sample_index));
  FillSample(delta.piece, out);
  FillPrompt(delta, out);
}

v1::TargetModule ToProto(TargetModule module) {
  // Both enums have the same order, but 0 of v1 is no module.
  static_assert(kAllTargetModules.size() + 1 == v1::TargetModule_ARRAYSIZE);
  return static_cast<v1::TargetModule>(static_cast<int>(module) + 1);
}

void ToProto(const LoraConfig& config, v1::LoraConfig* out) {
  out->set_rank(static_cast<uint32_t>(config.rank));
  out->set_alpha(config.alpha);
  for (const TargetModule module : config.target_modules) {
    out->add_target_modules(ToProto(module));
  }
  out->set_seed(config.seed);
}

v1::Durability ToProto(Durability durability) {
  switch (durability) {
    case Durability::kMemory:
      return v1::DURABILITY_MEMORY;
    case Durability::kStep:
      return v1::DURABILITY_STEP;
    case Durability::kDefault:
      break;
  }
  return v1::DURABILITY_UNSPECIFIED;
}

v1::AdapterLocation ToProto(AdapterLocation location) {
  // Both enums have the same order, but 0 of v1 is no location.
  static_assert(kNumAdapterLocations + 1 == v1::AdapterLocation_ARRAYSIZE);
  return static_cast<v1::AdapterLocation>(static_cast<int>(location) + 1);
}

// `Info` is AdapterInfo or CheckpointInfo.
template <typename Info>
v1::Optimizer OptimizerOf(const Info& info) {
  if (info.optim_steps == 0) return v1::OPTIMIZER_UNSPECIFIED;
  return info.optimizer == Optimizer::kMuon ? v1::OPTIMIZER_MUON
                                            : v1::OPTIMIZER_ADAMW;
}

void ToProto(const AdapterInfo& info, v1::Adapter* out) {
  out->set_adapter_id(info.adapter_id);
  ToProto(info.config, out->mutable_config());
  out->set_last_step(info.last_step);
  out->set_next_step(info.next_step);
  out->set_optim_steps(info.optim_steps);
  out->set_optimizer(OptimizerOf(info));
  out->set_accumulated_tokens(info.accumulated_tokens);
  out->set_version(info.version);
  out->set_num_parameters(info.num_parameters);
  out->set_resident_bytes(info.resident_bytes);
  out->mutable_snapshots()->Add(info.snapshots.begin(), info.snapshots.end());
  out->set_created_at(UnixSecondsOf(info.created_at));
  out->set_tenant(info.tenant);
  out->set_location(ToProto(info.location));
  out->set_epoch(info.epoch);
  out->set_durable_step(info.durable_step);
  out->set_durability(ToProto(info.durability));
  out->set_restoring(info.restoring);
  out->set_last_used_at(UnixSecondsOf(info.last_used_at));
}

void ToProto(const CheckpointInfo& info, v1::Checkpoint* out) {
  out->set_adapter_id(info.adapter_id);
  out->set_name(info.name);
  out->set_last_step(info.last_step);
  out->set_optim_steps(info.optim_steps);
  out->set_optimizer(OptimizerOf(info));
  out->set_accumulated_tokens(info.accumulated_tokens);
  out->set_size_bytes(info.size_bytes);
  out->set_created_at(UnixSecondsOf(info.created_at));
  ToProto(info.config, out->mutable_config());
  out->set_kind(info.kind == CheckpointKind::kSampler
                    ? v1::CHECKPOINT_KIND_SAMPLER
                    : v1::CHECKPOINT_KIND_TRAIN);
  out->mutable_metadata()->insert(info.metadata.begin(), info.metadata.end());
  if (info.expires_at != absl::InfiniteFuture()) {
    out->set_expires_at(UnixSecondsOf(info.expires_at));
  }
  out->set_tenant(info.tenant);
  out->set_base_model(info.base_model);
  out->set_base_fingerprint(
      info.base_fingerprint.substr(0, kFingerprintDigits));
}

void ToProto(const AdapterPage& page, v1::ListAdaptersResponse* out) {
  for (const AdapterInfo& info : page.adapters) {
    ToProto(info, out->add_adapters());
  }
  if (page.more) out->set_next_page_token(page.adapters.back().adapter_id);
  out->mutable_others()->Assign(page.others.begin(), page.others.end());
}

void ToProto(const std::vector<CheckpointInfo>& checkpoints,
             v1::ListCheckpointsResponse* out) {
  for (const CheckpointInfo& info : checkpoints) {
    ToProto(info, out->add_checkpoints());
  }
}

void ToProto(const PublishedSnapshot& snapshot,
             v1::PublishSnapshotResponse* out) {
  out->set_version(snapshot.version);
}

}  // namespace weft::server
