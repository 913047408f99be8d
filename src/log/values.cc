#include "src/log/values.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"

namespace weft::records {
namespace {

template <typename T>
void PutBytes(const std::vector<T>& values, std::string* out) {
  if (values.empty()) return;
  out->assign(reinterpret_cast<const char*>(values.data()),
              values.size() * sizeof(T));
}

template <typename T>
void GetBytes(const std::string& bytes, std::vector<T>* out) {
  out->resize(bytes.size() / sizeof(T));
  // data() of an empty vector may be null, which memcpy forbids.
  if (out->empty()) return;
  std::memcpy(out->data(), bytes.data(), out->size() * sizeof(T));
}

void Put(const Datum& datum, log::Datum* out) {
  PutBytes(datum.tokens, out->mutable_tokens());
  PutBytes(datum.targets, out->mutable_targets());
  PutBytes(datum.weights, out->mutable_weights());
  PutBytes(datum.logprobs, out->mutable_logprobs());
  PutBytes(datum.advantages, out->mutable_advantages());
  PutBytes(datum.target_offsets, out->mutable_target_offsets());
  out->set_targets_per_token(datum.targets_per_token);
  PutBytes(datum.routing, out->mutable_routing());
  PutBytes(datum.support.offsets, out->mutable_support_offsets());
  PutBytes(datum.support.tokens, out->mutable_support_tokens());
  for (const auto& [name, input] : datum.custom_inputs) {
    log::CustomInput& to = *out->add_custom_inputs();
    to.set_name(name);
    to.mutable_shape()->Add(input.shape.begin(), input.shape.end());
    to.set_is_int(input.is_int);
    input.is_int ? PutBytes(input.ints, to.mutable_values())
                 : PutBytes(input.floats, to.mutable_values());
  }
  PutBytes(datum.teacher_tokens, out->mutable_teacher_tokens());
  out->set_teacher_offset(datum.teacher_offset);
}

Datum Get(const log::Datum& in) {
  Datum datum;
  GetBytes(in.tokens(), &datum.tokens);
  GetBytes(in.targets(), &datum.targets);
  GetBytes(in.weights(), &datum.weights);
  GetBytes(in.logprobs(), &datum.logprobs);
  GetBytes(in.advantages(), &datum.advantages);
  GetBytes(in.target_offsets(), &datum.target_offsets);
  datum.targets_per_token = in.targets_per_token();
  GetBytes(in.routing(), &datum.routing);
  GetBytes(in.support_offsets(), &datum.support.offsets);
  GetBytes(in.support_tokens(), &datum.support.tokens);
  for (const log::CustomInput& from : in.custom_inputs()) {
    CustomInput& input = datum.custom_inputs[from.name()];
    input.shape.assign(from.shape().begin(), from.shape().end());
    input.is_int = from.is_int();
    input.is_int ? GetBytes(from.values(), &input.ints)
                 : GetBytes(from.values(), &input.floats);
  }
  GetBytes(in.teacher_tokens(), &datum.teacher_tokens);
  datum.teacher_offset = in.teacher_offset();
  return datum;
}

// The requests that Get returns have no adapter_id and no step. log::Request
// has these two for every kind of request.

void Put(const SaveCheckpointRequest& request, log::Request* out) {
  log::Save* const save = out->mutable_save();
  save->set_name(request.name);
  save->set_overwrite(request.overwrite);
  save->set_kind(static_cast<int>(request.kind));
  save->mutable_metadata()->insert(request.metadata.begin(),
                                   request.metadata.end());
  save->set_ttl_seconds(request.ttl_seconds);
  save->set_keep_newest(request.keep_newest);
}

SaveCheckpointRequest Get(const log::Save& in) {
  SaveCheckpointRequest request;
  request.name = in.name();
  request.overwrite = in.overwrite();
  request.kind = static_cast<CheckpointKind>(in.kind());
  request.metadata.insert(in.metadata().begin(), in.metadata().end());
  request.ttl_seconds = in.ttl_seconds();
  request.keep_newest = in.keep_newest();
  return request;
}

void Put(const LoadCheckpointRequest& request, log::Request* out) {
  log::Load* const load = out->mutable_load();
  load->set_source_adapter_id(request.source_adapter_id);
  load->set_name(request.name);
  load->set_weights_only(request.weights_only);
  load->set_tenant(request.tenant);
}

LoadCheckpointRequest Get(const log::Load& in) {
  LoadCheckpointRequest request;
  request.source_adapter_id = in.source_adapter_id();
  request.name = in.name();
  request.weights_only = in.weights_only();
  request.tenant = in.tenant();
  return request;
}

void Put(const CheckpointInfo& info, log::Result* out) {
  log::CheckpointResult* const to = out->mutable_checkpoint();
  to->set_adapter_id(info.adapter_id);
  to->set_name(info.name);
  to->set_last_step(info.last_step);
  to->set_optim_steps(info.optim_steps);
  to->set_optimizer(static_cast<int>(info.optimizer));
  to->set_size_bytes(info.size_bytes);
  to->set_created_at_us(absl::ToUnixMicros(info.created_at));
  ToProto(info.config, to->mutable_config());
  to->set_kind(static_cast<int>(info.kind));
  to->mutable_metadata()->insert(info.metadata.begin(), info.metadata.end());
  if (info.expires_at != absl::InfiniteFuture()) {
    to->set_expires_at_us(absl::ToUnixMicros(info.expires_at));
  }
  to->set_tenant(info.tenant);
  to->set_base_model(info.base_model);
  to->set_base_fingerprint(info.base_fingerprint);
}

CheckpointInfo Get(const log::CheckpointResult& in) {
  CheckpointInfo info{.adapter_id = in.adapter_id(),
                      .name = in.name(),
                      .last_step = in.last_step(),
                      .optim_steps = in.optim_steps(),
                      .optimizer = static_cast<Optimizer>(in.optimizer()),
                      .size_bytes = in.size_bytes(),
                      .created_at = absl::FromUnixMicros(in.created_at_us()),
                      .config = FromProto(in.config()),
                      .kind = static_cast<CheckpointKind>(in.kind()),
                      .metadata = {in.metadata().begin(), in.metadata().end()},
                      .tenant = in.tenant(),
                      .base_model = in.base_model(),
                      .base_fingerprint = in.base_fingerprint()};
  if (in.has_expires_at_us()) {
    info.expires_at = absl::FromUnixMicros(in.expires_at_us());
  }
  return info;
}

void Put(const TrainRequest& request, log::Request* out) {
  log::Train* const train = out->mutable_train();
  const LossConfig& loss = request.loss;
  train->set_backward(request.backward);
  train->set_function(static_cast<int>(loss.function));
  train->set_clip_low(loss.clip_low);
  train->set_clip_high(loss.clip_high);
  train->set_beta(loss.beta);
  train->set_temperature(loss.temperature);
  train->set_return_entropy(loss.return_entropy);
  train->set_gradient_filter(loss.gradient_filter);
  train->set_score_all(loss.score_all);
  train->set_return_routing(loss.return_routing);
  train->set_custom_graph(loss.custom.graph);
  for (const CustomLossInput& input : loss.custom.inputs) {
    log::CustomLossInput* const to = train->add_custom_inputs();
    to->set_name(input.name);
    to->set_rank(input.rank);
  }
  if (HasTeacher(loss.function)) {
    log::Teacher* const teacher = train->mutable_teacher();
    teacher->set_base_model(loss.teacher.base_model);
    teacher->set_adapter_id(loss.teacher.adapter_id);
    teacher->set_snapshot(loss.teacher.snapshot);
  }
  for (const Datum& datum : request.data) Put(datum, train->add_data());
  const Replayed& replayed = request.replayed;
  if (replayed == Replayed()) return;
  train->mutable_replayed()->set_tokens(replayed.tokens);
  train->mutable_replayed()->set_missing(replayed.missing);
  train->mutable_replayed()->set_own_tokens(replayed.own_tokens);
  train->mutable_replayed()->set_versions(replayed.versions);
}

TrainRequest Get(const log::Train& in) {
  TrainRequest request;
  request.backward = in.backward();
  request.loss = {.function = static_cast<LossFunction>(in.function()),
                  .clip_low = in.clip_low(),
                  .clip_high = in.clip_high(),
                  .beta = in.beta(),
                  .temperature = in.temperature(),
                  .return_entropy = in.return_entropy(),
                  .gradient_filter = in.gradient_filter(),
                  .score_all = in.score_all(),
                  .return_routing = in.return_routing(),
                  .teacher = {.base_model = in.teacher().base_model(),
                              .adapter_id = in.teacher().adapter_id(),
                              .snapshot = in.teacher().snapshot()}};
  request.loss.custom.graph = in.custom_graph();
  for (const log::CustomLossInput& input : in.custom_inputs()) {
    request.loss.custom.inputs.push_back(
        {.name = input.name(), .rank = input.rank()});
  }
  for (const log::Datum& datum : in.data()) request.data.push_back(Get(datum));
  request.replayed = {.tokens = in.replayed().tokens(),
                      .missing = in.replayed().missing(),
                      .own_tokens = in.replayed().own_tokens(),
                      .versions = in.replayed().versions()};
  return request;
}

void Put(const MuonConfig& muon, log::Muon* out) {
  out->set_learning_rate(muon.learning_rate);
  out->set_momentum(muon.momentum);
  out->set_nesterov(muon.nesterov);
  out->set_weight_decay(muon.weight_decay);
  out->set_ns_steps(muon.ns_steps);
  out->set_max_grad_norm(muon.max_grad_norm);
}

OptimStepRequest Get(const log::Muon& in) {
  OptimStepRequest request;
  request.muon = {.learning_rate = in.learning_rate(),
                  .momentum = in.momentum(),
                  .nesterov = in.nesterov(),
                  .weight_decay = in.weight_decay(),
                  .ns_steps = in.ns_steps(),
                  .max_grad_norm = in.max_grad_norm()};
  return request;
}

void Put(const OptimStepRequest& request, log::Request* out) {
  if (request.muon) return Put(*request.muon, out->mutable_muon());
  log::Optim* const optim = out->mutable_optim();
  const AdamWConfig& adamw = request.adamw;
  optim->set_learning_rate(adamw.learning_rate);
  optim->set_beta1(adamw.beta1);
  optim->set_beta2(adamw.beta2);
  optim->set_eps(adamw.eps);
  optim->set_weight_decay(adamw.weight_decay);
  optim->set_max_grad_norm(adamw.max_grad_norm);
}

OptimStepRequest Get(const log::Optim& in) {
  OptimStepRequest request;
  request.adamw = {.learning_rate = in.learning_rate(),
                   .beta1 = in.beta1(),
                   .beta2 = in.beta2(),
                   .eps = in.eps(),
                   .weight_decay = in.weight_decay(),
                   .max_grad_norm = in.max_grad_norm()};
  return request;
}

void Put(const PublishSnapshotRequest& request, log::Request* out) {
  out->mutable_publish()->set_name(request.name);
}

// The log has only the results of such steps.
void Put(const RefusedStep& /*request*/, log::Request* /*out*/) {}

PublishSnapshotRequest Get(const log::Publish& in) {
  PublishSnapshotRequest request;
  request.name = in.name();
  return request;
}

template <typename Kind>
StepRequest WithPlace(const log::Request& in, const Kind& kind) {
  auto request = Get(kind);
  request.adapter_id = in.adapter_id();
  request.step = in.step();
  return request;
}

void Put(const TrainResult& result, log::Result* out) {
  log::TrainResult* const train = out->mutable_train();
  for (const DatumResult& datum : result.data) {
    log::DatumResult* const to = train->add_data();
    PutBytes(datum.logprobs, to->mutable_logprobs());
    PutBytes(datum.losses, to->mutable_losses());
    PutBytes(datum.entropies, to->mutable_entropies());
    PutBytes(datum.routing, to->mutable_routing());
    to->set_targets_per_token(datum.targets_per_token);
  }
  train->mutable_metrics()->insert(result.metrics.begin(),
                                   result.metrics.end());
  train->set_step(result.step);
}

TrainResult Get(const log::TrainResult& in) {
  TrainResult result;
  for (const log::DatumResult& datum : in.data()) {
    DatumResult& to = result.data.emplace_back();
    GetBytes(datum.logprobs(), &to.logprobs);
    GetBytes(datum.losses(), &to.losses);
    GetBytes(datum.entropies(), &to.entropies);
    GetBytes(datum.routing(), &to.routing);
    to.targets_per_token = datum.targets_per_token();
  }
  result.metrics.insert(in.metrics().begin(), in.metrics().end());
  result.step = in.step();
  return result;
}

void Put(const OptimStepResult& result, log::Result* out) {
  log::OptimResult* const optim = out->mutable_optim();
  optim->set_grad_norm(result.grad_norm);
  optim->set_version(result.version);
  optim->set_step(result.step);
}

void Put(const AdapterInfo& info, log::Result* out) {
  log::AdapterResult* const to = out->mutable_adapter();
  to->set_adapter_id(info.adapter_id);
  to->set_tenant(info.tenant);
  ToProto(info.config, to->mutable_config());
  to->set_epoch(info.epoch);
  to->set_last_step(info.last_step);
  to->set_next_step(info.next_step);
  to->set_durable_step(info.durable_step);
  to->set_optim_steps(info.optim_steps);
  to->set_optimizer(static_cast<int>(info.optimizer));
  to->set_version(info.version);
  to->set_num_parameters(info.num_parameters);
  to->set_resident_bytes(info.resident_bytes);
  to->mutable_snapshots()->Add(info.snapshots.begin(), info.snapshots.end());
  to->set_created_at_us(absl::ToUnixMicros(info.created_at));
  to->set_last_used_at_us(absl::ToUnixMicros(info.last_used_at));
  to->set_location(static_cast<int>(info.location));
}

AdapterInfo Get(const log::AdapterResult& in) {
  AdapterInfo info;
  info.adapter_id = in.adapter_id();
  info.tenant = in.tenant();
  info.config = FromProto(in.config());
  info.epoch = in.epoch();
  info.last_step = in.last_step();
  info.next_step = in.next_step();
  info.durable_step = in.durable_step();
  info.optim_steps = in.optim_steps();
  info.optimizer = static_cast<Optimizer>(in.optimizer());
  info.version = in.version();
  info.num_parameters = in.num_parameters();
  info.resident_bytes = in.resident_bytes();
  info.snapshots.assign(in.snapshots().begin(), in.snapshots().end());
  info.created_at = absl::FromUnixMicros(in.created_at_us());
  info.last_used_at = absl::FromUnixMicros(in.last_used_at_us());
  info.location = static_cast<AdapterLocation>(in.location());
  return info;
}

void Put(const PublishedSnapshot& result, log::Result* out) {
  out->mutable_published()->set_name(result.name);
  out->mutable_published()->set_version(result.version);
}

void Put(const StepFailure& failure, log::Result* out) {
  out->mutable_failure()->set_code(static_cast<int>(failure.status.code()));
  out->mutable_failure()->set_message(std::string(failure.status.message()));
}

}  // namespace

void ToProto(const LoraConfig& config, log::Config* out) {
  out->set_rank(config.rank);
  out->set_alpha(config.alpha);
  for (const TargetModule module : config.target_modules) {
    out->add_target_modules(static_cast<int>(module));
  }
  out->set_seed(config.seed);
  for (const LoraOverride& layer : config.overrides) {
    log::Shape* const shape = out->add_overrides();
    shape->set_layer(layer.layer);
    shape->set_module(static_cast<int>(layer.module));
    shape->set_rank(layer.shape.rank);
    shape->set_alpha(layer.shape.alpha);
  }
}

LoraConfig FromProto(const log::Config& in) {
  LoraConfig config{.rank = in.rank(),
                    .alpha = in.alpha(),
                    .target_modules = {},
                    .seed = in.seed(),
                    .overrides = {}};
  for (const int module : in.target_modules()) {
    config.target_modules.push_back(static_cast<TargetModule>(module));
  }
  for (const log::Shape& shape : in.overrides()) {
    config.overrides.push_back(
        {.layer = shape.layer(),
         .module = static_cast<TargetModule>(shape.module()),
         .shape = {.rank = shape.rank(), .alpha = shape.alpha()}});
  }
  return config;
}

void ToProto(const StepRequest& request, log::Request* out) {
  out->set_adapter_id(AdapterIdOf(request));
  out->set_step(StepOf(request));
  std::visit([out](const auto& kind) { Put(kind, out); }, request);
}

absl::StatusOr<StepRequest> FromProto(const log::Request& in) {
  switch (in.kind_case()) {
    case log::Request::kTrain:
      return WithPlace(in, in.train());
    case log::Request::kOptim:
      return WithPlace(in, in.optim());
    case log::Request::kMuon:
      return WithPlace(in, in.muon());
    case log::Request::kSave:
      return WithPlace(in, in.save());
    case log::Request::kLoad:
      return WithPlace(in, in.load());
    case log::Request::kPublish:
      return WithPlace(in, in.publish());
    case log::Request::KIND_NOT_SET:
      break;
  }
  return absl::DataLossError("a request of an unknown kind");
}

void ToProto(const StepResult& result, log::Result* out) {
  std::visit([out](const auto& kind) { Put(kind, out); }, result);
}

absl::StatusOr<StepResult> FromProto(const log::Result& in) {
  switch (in.kind_case()) {
    case log::Result::kTrain:
      return Get(in.train());
    case log::Result::kOptim:
      return OptimStepResult{.grad_norm = in.optim().grad_norm(),
                             .version = in.optim().version(),
                             .step = in.optim().step()};
    case log::Result::kCheckpoint:
      return Get(in.checkpoint());
    case log::Result::kAdapter:
      return Get(in.adapter());
    case log::Result::kPublished:
      return PublishedSnapshot{.name = in.published().name(),
                               .version = in.published().version()};
    case log::Result::kFailure:
      return StepFailure{.status = absl::Status(
                             static_cast<absl::StatusCode>(in.failure().code()),
                             in.failure().message())};
    case log::Result::KIND_NOT_SET:
      break;
  }
  return absl::DataLossError("a result of an unknown kind");
}

}  // namespace weft::records
