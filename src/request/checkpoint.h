// Checkpoints of adapters: what they hold, and the requests that save and load
// them. The server validates a request before the engine gets it
// (server/wire/checkpoint_validation.cc).
#ifndef WEFT_SRC_REQUEST_CHECKPOINT_H_
#define WEFT_SRC_REQUEST_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "src/request/adapter.h"

namespace weft {

// kTrain: weights, optimizer moments and gradient. kSampler: weights only.
// Checkpoints store the kind's name, and logs store its number.
enum class CheckpointKind : uint8_t { kTrain, kSampler };
inline constexpr int kNumCheckpointKinds = 2;

// Returns "train" or "sampler".
const char* CheckpointKindName(CheckpointKind kind);

// Entries that the caller gave. A key is a name of at most 128 letters, digits,
// '.', '_' and '-' (IsName).
using CheckpointMetadata = std::map<std::string, std::string>;

inline constexpr size_t kMaxMetadataEntries = 64;
inline constexpr size_t kMaxMetadataBytes = 16 << 10;  // Keys and values.
inline constexpr uint64_t kMaxTtlSeconds = 10ULL * 365 * 86400;
inline constexpr uint64_t kMaxKeepNewest = 1'000'000;

// Returns the bytes of all keys and values.
size_t MetadataBytes(const CheckpointMetadata& metadata);

struct CheckpointInfo {
  std::string adapter_id;
  std::string name;
  uint64_t last_step = 0;
  uint64_t optim_steps = 0;
  Optimizer optimizer = Optimizer::kAdamW;  // That of optim_steps.
  uint64_t accumulated_tokens = 0;          // As in AdapterInfo.
  uint64_t size_bytes = 0;
  absl::Time created_at;
  LoraConfig config;
  CheckpointKind kind = CheckpointKind::kTrain;
  CheckpointMetadata metadata;
  absl::Time expires_at = absl::InfiniteFuture();
  // Since when expires_at counts: no later than created_at.
  absl::Time ttl_from;
  // Old checkpoints lack the three fields below, which are then empty.
  std::string tenant;
  std::string base_model;  // Name of the base model.
  std::string base_fingerprint;
};

struct SaveCheckpointRequest {
  std::string adapter_id;
  std::string name;
  bool overwrite = false;
  uint64_t step = 0;
  uint64_t epoch = 0;
  CheckpointKind kind = CheckpointKind::kTrain;
  CheckpointMetadata metadata;
  uint64_t ttl_seconds = 0;  // From the save to the expiry; 0: no expiry.
  // After the save, the adapter's oldest checkpoints of the same kind are
  // deleted until this many remain. 0: none are deleted.
  uint64_t keep_newest = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.
};

// Asks to write the files of an earlier download as a checkpoint. With
// `source_adapter_id` it asks for a copy of that adapter's checkpoint `name`
// instead, which expires after `ttl_seconds` (0: never), and `files` is empty.
struct UploadCheckpointRequest {
  std::string adapter_id;
  std::string name;
  bool overwrite = false;
  std::string tenant;
  PeftFiles files;
  std::string source_adapter_id = {};
  uint64_t ttl_seconds = 0;
};

// Asks that the checkpoint expires `ttl_seconds` from now, or never if it is 0.
struct SetCheckpointTtlRequest {
  std::string adapter_id;
  std::string name;
  uint64_t ttl_seconds = 0;
};

struct LoadCheckpointRequest {
  std::string adapter_id;
  std::string source_adapter_id;
  std::string name;
  bool weights_only = false;
  // What follows is used only if the load creates the adapter. `optimizer` is
  // that of CreateAdapterRequest, if weights_only.
  std::string tenant;
  Durability durability = Durability::kDefault;
  Optimizer optimizer = Optimizer::kAdamW;
  uint64_t step = 0;
  uint64_t epoch = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_CHECKPOINT_H_
