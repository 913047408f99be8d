// Converts a CheckpointInfo to and from the fields that a checkpoint's manifest
// stores as JSON. Torch-free. The fields have no checksum and may come from a
// client, so they are not trusted.
#ifndef WEFT_SRC_LORA_CHECKPOINT_FIELDS_H_
#define WEFT_SRC_LORA_CHECKPOINT_FIELDS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "src/lora/adapter_layout.h"
#include "src/request/checkpoint.h"

namespace weft::lora {

// The most seconds from a checkpoint's creation to its expiry that a manifest
// may have. A time to live that is set later counts from then, so it is more
// than kMaxTtlSeconds.
inline constexpr uint64_t kMaxStoredTtlSeconds = 100 * kMaxTtlSeconds;

// The server's base model.
struct BaseModel {
  std::string name;
  std::string fingerprint;  // ModelFingerprint (src/engine) makes it.
  model_config::ModelShape shape;
  std::string model_dir;  // Empty: its weights are random.
  // Whether the server takes checkpoints of another fingerprint.
  bool accepts_change = false;
};

nlohmann::json WriteCheckpointFields(const CheckpointInfo& info,
                                     const model_config::ModelShape& shape);

// Writes when the checkpoint expires. Fields have this in whole seconds after
// the creation, at least one and at most kMaxStoredTtlSeconds, to which
// `info->expires_at` is changed.
void WriteExpiry(CheckpointInfo* info, nlohmann::json* fields);

// Parses the text of a client's file that has the manifest's fields. Errors:
// INVALID_ARGUMENT, naming `file`, for text that is no JSON object or exceeds
// the default limits of weights::JsonLimits.
absl::StatusOr<nlohmann::json> ParseCheckpointFields(absl::string_view text,
                                                     absl::string_view file);

// Reads the fields. Accepts fields of older servers, which may lack overrides,
// kind, optimizer, accumulated_tokens, metadata, ttl_seconds, tenant,
// base_model_name and base_fingerprint.
// Errors: DATA_LOSS if another field is missing, or if a field has another type
// or exceeds its limit.
absl::StatusOr<CheckpointInfo> ReadCheckpointFields(
    const nlohmann::json& fields);

// Checks that the checkpoint belongs to the base model: the fields must have
// the same shape and, if they have a fingerprint, the same fingerprint. With
// base.accepts_change, another fingerprint only logs a warning. Errors:
// FAILED_PRECONDITION for another model or format version; DATA_LOSS if a field
// that it reads is missing or has another type.
absl::Status CheckBaseModel(const nlohmann::json& fields,
                            const BaseModel& base);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_CHECKPOINT_FIELDS_H_
