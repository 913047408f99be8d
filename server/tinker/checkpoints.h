// Checkpoints, and the training runs that made them. A run is an adapter with
// its checkpoints. After the adapter is deleted, the checkpoints alone are the
// run. Threads: the front's for what takes a Front, else any.
#ifndef WEFT_SERVER_TINKER_CHECKPOINTS_H_
#define WEFT_SERVER_TINKER_CHECKPOINTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::server::tinker {

// Returns the path of the checkpoint that the URL of a request names by the
// arguments RUN, KIND and NAME. Errors: INVALID_ARGUMENT.
absl::StatusOr<CheckpointPath> PathOf(const Call& call);
inline constexpr int64_t kMinTtlSeconds = 3600;

// Reads `ttl_seconds`, after which a checkpoint expires; 0 if it is absent.
// Errors: INVALID_ARGUMENT if it is not a whole number in [kMinTtlSeconds,
// kMaxTtlSeconds].
absl::StatusOr<uint64_t> ReadTtl(const Json& body);

// What only clients of the Tinker API say about a checkpoint is in its
// metadata, with these keys.
inline constexpr char kUserMetadata[] = "tinker.user_metadata";  // ShownField.
inline constexpr char kBaseModel[] = "tinker.base_model";  // Model::base_model.
// Returns the entry of a checkpoint's metadata; empty if there is none.
std::string EntryOf(const CheckpointInfo& info, const char* key);

// Returns the base model's name: that of the checkpoint, otherwise the served
// model's.
std::string BaseModelOf(const Front& front, const CheckpointInfo& info);

// Returns a time as the SDK reads it, in microseconds.
std::string TimeText(absl::Time time);

using Checkpoints = std::vector<CheckpointInfo>;

// Lists the checkpoints of an adapter, or of all adapters of the caller if
// `adapter` is empty. Errors: those of EnginePort::Call.
absl::Status ListCheckpoints(Front& front, const CallPtr& call,
                             const std::string& adapter,
                             Callback<Checkpoints> done);

// Finds the checkpoint of a path. `done` gets NOT_FOUND if there is none.
// Errors: those of EnginePort::Call.
absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                            const CheckpointPath& path,
                            Callback<CheckpointInfo> done);

struct Run {
  std::string adapter;
  LoraConfig config;
  absl::Time last_used_at;
  Checkpoints checkpoints;  // Newest first.
};

// Groups adapters and checkpoints into runs. The run that was used last comes
// first.
std::vector<Run> MakeRuns(const std::vector<AdapterInfo>& adapters,
                          const Checkpoints& checkpoints);

// Returns the part [offset, offset + limit) of the list `all`, and a cursor:
// {name: [...], "cursor": {...}}. `offset` (default 0) and `limit` (default 20,
// at most 1000) come from the call's query. Errors: INVALID_ARGUMENT.
absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                              const Json& all);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINTS_H_
