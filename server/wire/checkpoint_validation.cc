// Validation of AdapterService's requests on checkpoints; see
// request_validation.h.
#include <utility>

#include "server/wire/adapter_fields.h"
#include "server/wire/field_checks.h"
#include "server/wire/file_assembler.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

absl::StatusOr<CheckpointKind> ReadKind(int kind) {
  switch (kind) {
    case v1::CHECKPOINT_KIND_UNSPECIFIED:
    case v1::CHECKPOINT_KIND_TRAIN:
      return CheckpointKind::kTrain;
    case v1::CHECKPOINT_KIND_SAMPLER:
      return CheckpointKind::kSampler;
    default:
      return BadField("kind", "is ", kind, ", must be a known CheckpointKind");
  }
}

absl::StatusOr<CheckpointMetadata> ReadMetadata(
    const v1::SaveCheckpointRequest& request) {
  if (request.metadata().size() > kMaxMetadataEntries) {
    return BadField("metadata", "has ", request.metadata().size(),
                    " entries, must be at most ", kMaxMetadataEntries);
  }
  CheckpointMetadata metadata;
  for (const auto& [key, value] : request.metadata()) {
    WEFT_RETURN_IF_ERROR(CheckName("metadata key", key));
    metadata.emplace(key, value);
  }
  const size_t bytes = MetadataBytes(metadata);
  if (bytes > kMaxMetadataBytes) {
    return BadField("metadata", "has ", bytes, " bytes, must be at most ",
                    kMaxMetadataBytes);
  }
  return metadata;
}

}  // namespace

absl::StatusOr<std::string> Validate(const v1::ListCheckpointsRequest& request,
                                     const RequestLimits& limits) {
  if (request.adapter_id().empty()) return std::string();
  return ReadAdapterId(request, limits);
}

absl::StatusOr<SaveCheckpointRequest> Validate(
    const v1::SaveCheckpointRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  SaveCheckpointRequest out{.adapter_id = request.adapter_id(),
                            .name = request.name(),
                            .overwrite = request.overwrite(),
                            .step = request.step(),
                            .epoch = request.epoch(),
                            .ttl_seconds = request.ttl_seconds(),
                            .keep_newest = request.keep_newest()};
  WEFT_ASSIGN_OR_RETURN(out.kind, ReadKind(request.kind()));
  WEFT_ASSIGN_OR_RETURN(out.metadata, ReadMetadata(request));
  WEFT_RETURN_IF_ERROR(
      CheckCount("ttl_seconds", out.ttl_seconds, 0, kMaxTtlSeconds));
  WEFT_RETURN_IF_ERROR(
      CheckCount("keep_newest", out.keep_newest, 0, kMaxKeepNewest));
  return out;
}

absl::StatusOr<LoadCheckpointRequest> Validate(
    const v1::LoadCheckpointRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  const std::string& source = request.source_adapter_id().empty()
                                  ? request.adapter_id()
                                  : request.source_adapter_id();
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("source_adapter_id", source, limits.engine_names));
  WEFT_ASSIGN_OR_RETURN(std::string tenant, ReadTenant("tenant", request));
  WEFT_ASSIGN_OR_RETURN(const Durability durability,
                        ReadDurability("durability", request));
  return LoadCheckpointRequest{.adapter_id = request.adapter_id(),
                               .source_adapter_id = source,
                               .name = request.name(),
                               .weights_only = request.weights_only(),
                               .tenant = std::move(tenant),
                               .durability = durability,
                               .step = request.step(),
                               .epoch = request.epoch()};
}

absl::StatusOr<std::pair<std::string, std::string>> Validate(
    const v1::DeleteCheckpointRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  return std::make_pair(request.adapter_id(), request.name());
}

absl::StatusOr<std::pair<std::string, std::string>> Validate(
    const v1::DownloadCheckpointRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  return std::make_pair(request.adapter_id(), request.name());
}

absl::StatusOr<SetCheckpointTtlRequest> Validate(
    const v1::SetCheckpointTtlRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  WEFT_RETURN_IF_ERROR(
      CheckCount("ttl_seconds", request.ttl_seconds(), 0, kMaxTtlSeconds));
  return SetCheckpointTtlRequest{.adapter_id = request.adapter_id(),
                                 .name = request.name(),
                                 .ttl_seconds = request.ttl_seconds()};
}

absl::StatusOr<UploadCheckpointRequest> ReadOptions(
    const v1::UploadOptions& options, bool engine_names) {
  UploadCheckpointRequest out{.adapter_id = options.adapter_id(),
                              .name = options.name(),
                              .overwrite = options.overwrite()};
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("options.adapter_id", out.adapter_id, engine_names));
  WEFT_RETURN_IF_ERROR(CheckName("options.name", out.name));
  WEFT_ASSIGN_OR_RETURN(out.tenant, ReadTenant("options.tenant", options));
  return out;
}

}  // namespace weft::server
