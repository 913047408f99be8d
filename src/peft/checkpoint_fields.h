// The manifest's fields of a checkpoint, as JSON. Torch-free. A manifest has no
// checksum and may come from a client, so it is not trusted.
#ifndef WEFT_SRC_PEFT_CHECKPOINT_FIELDS_H_
#define WEFT_SRC_PEFT_CHECKPOINT_FIELDS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "src/peft/adapter_layout.h"
#include "src/request/checkpoint.h"

namespace weft::lora {

// The server's base model.
struct BaseModel {
  std::string name;
  std::string fingerprint;  // As from ModelFingerprint of src/startup.
  ModelShape shape;
};

[[nodiscard]] nlohmann::json WriteCheckpointFields(const CheckpointInfo& info,
                                                   const ModelShape& shape);

// Parses the text of a file with these fields, which a client sent. Errors:
// INVALID_ARGUMENT, naming `file`, for text that is no JSON object or exceeds
// the limits of a manifest.
[[nodiscard]] absl::StatusOr<nlohmann::json> ParseCheckpointFields(
    absl::string_view text, absl::string_view file);

// Accepts the fields of older servers, which lack kind, metadata, ttl, tenant
// and the base model's fingerprint. Errors: DATA_LOSS if a field is missing,
// has another type or exceeds its limit.
[[nodiscard]] absl::StatusOr<CheckpointInfo> ReadCheckpointFields(
    const nlohmann::json& fields);

// Checks that the checkpoint belongs to the base model: it has the same
// fingerprint, or no fingerprint and the same shape. Errors:
// FAILED_PRECONDITION, which names both models; DATA_LOSS.
[[nodiscard]] absl::Status CheckBaseModel(const nlohmann::json& fields,
                                          const BaseModel& base);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_CHECKPOINT_FIELDS_H_
