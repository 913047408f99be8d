// Finds training runs and checkpoints for the handlers of the REST client. A run
// is an adapter with its checkpoints. After the adapter is deleted, the
// checkpoints alone are the run.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_RUNS_H_
#define WEFT_SERVER_TINKER_RUNS_H_

#include <string>
#include <vector>

#include "server/tinker/checkpoints.h"
#include "server/tinker/front.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::tinker {

// Returns a time as the SDK reads it, in microseconds.
[[nodiscard]] std::string TimeText(absl::Time time);

using Checkpoints = std::vector<CheckpointInfo>;

// Lists the checkpoints of an adapter, or of all adapters of the caller if
// `adapter` is empty. Errors: those of EnginePort::Call.
[[nodiscard]] absl::Status ListCheckpoints(Front& front, const CallPtr& call,
                                           const std::string& adapter,
                                           Callback<Checkpoints> done);

// Finds the checkpoint of a path. `done` gets NOT_FOUND if there is none.
// Errors: those of EnginePort::Call.
[[nodiscard]] absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                                          const CheckpointPath& path,
                                          Callback<CheckpointInfo> done);
// Deletes the checkpoint of a path, but not its extras. Errors: those of
// EnginePort::Call.
[[nodiscard]] absl::Status DeleteRunCheckpoint(Front& front, CallOrigin origin,
                                               const CheckpointPath& path,
                                               Callback<bool> done);

// A training run: an adapter and its checkpoints. After the adapter is deleted,
// the checkpoints alone are the run.
struct Run {
  std::string adapter;
  LoraConfig config;
  absl::Time last_used_at;
  Checkpoints checkpoints;  // Newest first.
};

// Groups adapters and checkpoints into runs. The run that was used last comes
// first. Leaves out all tenants' adapters that were loaded for sampling
// (kSamplerAdapterPrefix).
[[nodiscard]] std::vector<Run> MakeRuns(
    const std::vector<AdapterInfo>& adapters, const Checkpoints& checkpoints);

// Returns the part [offset, offset + limit) of the list `all`, and a cursor:
// {name: [...], "cursor": {...}}. `offset` (default 0) and `limit` (default 20,
// at most 1000) come from the call's query. Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                                            const Json& all);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RUNS_H_
