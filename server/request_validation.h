// Wire messages to plain requests. A plain request that exists is valid: later
// layers do not check again, so every field is checked here, on the CPU, before
// anything is queued.
//
// Errors: INVALID_ARGUMENT naming the field's path, its value and the limit
// (data[3].targets[17] is 50000, must be in [0, 49152)); FAILED_PRECONDITION
// for byte-string stops without a tokenizer.
// Units: time O(bytes of the message), about 1 ns a token; no more memory than
// the result.
// Threads: any. Deadlines are left at infinity: the caller knows them.
#ifndef WEFT_SERVER_REQUEST_VALIDATION_H_
#define WEFT_SERVER_REQUEST_VALIDATION_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/config/options.h"
#include "src/engine/engine.h"
#include "src/request/adapter.h"
#include "src/request/sample.h"
#include "src/request/train.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/training.pb.h"

namespace weft {

// What the running model and the operator allow.
struct RequestLimits {
  int vocab_size = 0;
  int context_length = 0;
  int max_rank = 0;
  bool has_byte_decoder = false;
  int max_data = 0;        // Sequences of a training request.
  int64_t max_tokens = 0;  // Tokens of all of them.
  int max_samples = 0;
  bool engine_names = true;  // Adapters may be named TENANT~ID.
};

[[nodiscard]] RequestLimits MakeLimits(const EngineInfo& info,
                                       const ServerOptions& options);

[[nodiscard]] absl::StatusOr<TrainRequest> Validate(
    const v1::ForwardBackwardRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<TrainRequest> Validate(
    const v1::ForwardRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<OptimStepRequest> Validate(
    const v1::OptimStepRequest& request, const RequestLimits& limits);

// Fills in what is absent: max_tokens, a drawn seed.
[[nodiscard]] absl::StatusOr<SampleRequest> Validate(
    const v1::SampleRequest& request, const RequestLimits& limits);

// An absent seed is derived from the id, so that repeating the call asks for
// the same adapter and is answered as the first one.
[[nodiscard]] absl::StatusOr<CreateAdapterRequest> Validate(
    const v1::CreateAdapterRequest& request, const RequestLimits& limits);

[[nodiscard]] absl::StatusOr<ListAdaptersRequest> Validate(
    const v1::ListAdaptersRequest& request, const RequestLimits& limits);

// The adapter's id; for ListCheckpoints it may be empty.
[[nodiscard]] absl::StatusOr<std::string> Validate(
    const v1::GetAdapterRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<std::string> Validate(
    const v1::DeleteAdapterRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<std::string> Validate(
    const v1::ListCheckpointsRequest& request, const RequestLimits& limits);

[[nodiscard]] absl::StatusOr<SaveCheckpointRequest> Validate(
    const v1::SaveCheckpointRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<LoadCheckpointRequest> Validate(
    const v1::LoadCheckpointRequest& request, const RequestLimits& limits);

// (adapter id, checkpoint name).
[[nodiscard]] absl::StatusOr<std::pair<std::string, std::string>> Validate(
    const v1::DeleteCheckpointRequest& request, const RequestLimits& limits);

[[nodiscard]] absl::StatusOr<PublishSnapshotRequest> Validate(
    const v1::PublishSnapshotRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<ReleaseSnapshotRequest> Validate(
    const v1::ReleaseSnapshotRequest& request, const RequestLimits& limits);
[[nodiscard]] absl::StatusOr<ExportAdapterRequest> Validate(
    const v1::ExportAdapterRequest& request, const RequestLimits& limits);

// Puts the messages of an import together.
class ImportAssembler {
 public:
  // `engine_names`: as RequestLimits has it.
  explicit ImportAssembler(bool engine_names = true)
      : engine_names_(engine_names) {}

  static constexpr size_t kMaxFiles = 16;
  static constexpr size_t kMaxChunkBytes = 1 << 20;

  // INVALID_ARGUMENT when the message breaks the order (options first, the
  // pieces of a file together), a name or a size is bad.
  [[nodiscard]] absl::Status Add(const v1::ImportAdapterRequest& message);

  // The request, once the stream has ended. INVALID_ARGUMENT when options or
  // adapter_config.json are missing. Leaves the assembler empty.
  [[nodiscard]] absl::StatusOr<ImportAdapterRequest> Finish();

 private:
  [[nodiscard]] absl::Status ReadOptions(const v1::ImportOptions& options);
  [[nodiscard]] absl::Status AddChunk(const v1::FileChunk& chunk);

  bool engine_names_;
  bool has_options_ = false;
  ImportAdapterRequest request_;
};

}  // namespace weft

#endif  // WEFT_SERVER_REQUEST_VALIDATION_H_
