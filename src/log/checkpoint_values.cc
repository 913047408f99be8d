#include "src/log/checkpoint_values.h"

#include "src/log/values.h"

namespace weft::records {

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

}  // namespace weft::records
