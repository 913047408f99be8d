// Converts protobuf requests to the engine's request structs (src/request),
// called plain requests. The fields are checked here, before the request is
// queued.
//
// Errors: INVALID_ARGUMENT, which names the field's path and the problem
// (data[3].targets[17] is 50000, must be in [0, 49152)); FAILED_PRECONDITION
// for byte-string stops without a tokenizer.
// Units: time O(bytes of the message). Threads: any. Deadlines of plain
// requests stay at infinity, because CallRecord sets them later.
#ifndef WEFT_SERVER_WIRE_REQUEST_VALIDATION_H_
#define WEFT_SERVER_WIRE_REQUEST_VALIDATION_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/options/options.h"
#include "src/engine/engine.h"
#include "src/request/activity.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/profile.h"
#include "src/request/sample.h"
#include "src/request/train.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/server.pb.h"
#include "weft/v1/training.pb.h"

namespace weft::server {

// The most targets of a token, in training and in prompt_targets, the most
// entries of a StopRule, the highest value of top_logprobs and of
// prompt_top_logprobs, and the highest value of prompt_alternatives.
inline constexpr uint32_t kMaxTargetsPerToken = 1024;
inline constexpr size_t kMaxStopEntries = 64;
inline constexpr uint32_t kMaxTopLogprobs = 1024;
inline constexpr uint32_t kMaxAlternatives = 64;
inline constexpr int kMaxLogitBiases = 1024;
// The value of `max_tokens` that means as many as fit.
inline constexpr uint32_t kAllThatFit = std::numeric_limits<uint32_t>::max();

// The limits that the running model and the operator's options set.
struct RequestLimits {
  int vocab_size = 0;
  int context_length = 0;
  // EngineInfo::cached_tokens.
  int64_t cached_tokens = std::numeric_limits<int64_t>::max();
  std::vector<int32_t> eos_token_ids;
  int max_rank = 0;
  // The next three fields are 0 for a model without experts.
  int num_experts = 0;
  int experts_per_token = 0;
  int expert_layers = 0;
  // The modules of the model's layers that may have LoRA.
  std::vector<TargetModule> projections = DefaultTargetModules();
  // Whether the model has a tokenizer that byte-string stops can use.
  bool has_byte_decoder = false;
  bool keeps_sample_records = false;
  int max_data = 0;        // Sequences in a training request.
  int64_t max_tokens = 0;  // Tokens of a training request.
  int max_samples = 0;
  bool engine_names = true;  // An adapter's name may be TENANT~ID.
};

RequestLimits MakeLimits(const EngineInfo& info, const ServerOptions& options);

// Returns INVALID_ARGUMENT, which names `field`, if `asked` is true but the
// model has no experts. `asked` says whether the request sends routing or asks
// for it.
absl::Status CheckRouting(absl::string_view field, bool asked,
                          const RequestLimits& limits);

absl::StatusOr<TrainRequest> Validate(const v1::ForwardBackwardRequest& request,
                                      const RequestLimits& limits);
absl::StatusOr<TrainRequest> Validate(const v1::ForwardRequest& request,
                                      const RequestLimits& limits);
absl::StatusOr<OptimStepRequest> Validate(const v1::OptimStepRequest& request,
                                          const RequestLimits& limits);

// Sets absent fields to their defaults, and an absent seed to a random number.
absl::StatusOr<SampleRequest> Validate(const v1::SampleRequest& request,
                                       const RequestLimits& limits);

// Derives an absent seed from the adapter's id. So a repeated call asks for the
// same adapter.
absl::StatusOr<CreateAdapterRequest> Validate(
    const v1::CreateAdapterRequest& request, const RequestLimits& limits);

absl::StatusOr<ListAdaptersRequest> Validate(
    const v1::ListAdaptersRequest& request, const RequestLimits& limits);

// Returns the adapter's id, which may be empty for ListCheckpoints.
absl::StatusOr<std::string> Validate(const v1::GetAdapterRequest& request,
                                     const RequestLimits& limits);
absl::StatusOr<std::string> Validate(const v1::DeleteAdapterRequest& request,
                                     const RequestLimits& limits);
// Errors, besides: UNIMPLEMENTED for a model of the Tinker API.
absl::StatusOr<MoveAdapterRequest> Validate(
    const v1::MoveAdapterRequest& request, const RequestLimits& limits);
absl::StatusOr<std::string> Validate(const v1::ListCheckpointsRequest& request,
                                     const RequestLimits& limits);

absl::StatusOr<SaveCheckpointRequest> Validate(
    const v1::SaveCheckpointRequest& request, const RequestLimits& limits);
absl::StatusOr<LoadCheckpointRequest> Validate(
    const v1::LoadCheckpointRequest& request, const RequestLimits& limits);

// Returns the adapter's id and the checkpoint's name.
absl::StatusOr<std::pair<std::string, std::string>> Validate(
    const v1::DeleteCheckpointRequest& request, const RequestLimits& limits);
absl::StatusOr<std::pair<std::string, std::string>> Validate(
    const v1::DownloadCheckpointRequest& request, const RequestLimits& limits);

absl::StatusOr<SetCheckpointTtlRequest> Validate(
    const v1::SetCheckpointTtlRequest& request, const RequestLimits& limits);

absl::StatusOr<PublishSnapshotRequest> Validate(
    const v1::PublishSnapshotRequest& request, const RequestLimits& limits);
absl::StatusOr<MetricReport> Validate(const v1::ReportMetricsRequest& request,
                                      const RequestLimits& limits);
absl::StatusOr<ReleaseSnapshotRequest> Validate(
    const v1::ReleaseSnapshotRequest& request, const RequestLimits& limits);
absl::StatusOr<ExportAdapterRequest> Validate(
    const v1::ExportAdapterRequest& request, const RequestLimits& limits);

absl::StatusOr<ProfileRequest> Validate(const v1::ProfileRequest& request,
                                        const RequestLimits& limits);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_REQUEST_VALIDATION_H_
