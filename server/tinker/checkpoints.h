// Checkpoints: their paths, "tinker://RUN/KIND/NAME", what clients say about
// them, and the training runs that made them. A run is an adapter with its
// checkpoints. After the adapter is deleted, the checkpoints alone are the run.
// Threads: the front's for what takes a Front, else any.
#ifndef WEFT_SERVER_TINKER_CHECKPOINTS_H_
#define WEFT_SERVER_TINKER_CHECKPOINTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/tinker/front.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::server::tinker {

enum class CheckpointKind : uint8_t { kTraining, kSampler, kExternal };

struct CheckpointPath {
  std::string run;  // The model's id (ModelOfAdapter).
  CheckpointKind kind = CheckpointKind::kTraining;
  std::string name;

  // Returns "weights/NAME", "sampler_weights/NAME" or "external_weights/NAME".
  [[nodiscard]] std::string Id() const;
  // Returns the whole path, "tinker://RUN/KIND/NAME".
  [[nodiscard]] std::string ToString() const;
  // Returns the name that Weft gives the checkpoint: NAME for a training
  // checkpoint, "KIND.NAME" for others.
  [[nodiscard]] std::string WeftName() const;
  // Returns "training", "sampler" or "external".
  [[nodiscard]] const char* KindName() const;
  // Returns "save_weights", "save_weights_for_sampler" or
  // "save_weights_external".
  [[nodiscard]] const char* SavedBy() const;
};

// Parses "tinker://RUN/KIND/NAME". Errors: INVALID_ARGUMENT; that of `path`.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path);
// Makes the path of the checkpoint `name`. Errors: INVALID_ARGUMENT, whose
// message calls the name `field`. The name of a training checkpoint must not
// begin with "sampler_weights." or "external_weights.", because PathOfWeft
// takes such names for other kinds.
[[nodiscard]] absl::StatusOr<CheckpointPath> NameCheckpoint(
    absl::string_view field, absl::string_view run, CheckpointKind kind,
    absl::string_view name);
// Returns the path of the checkpoint that the URL of a request names by the
// arguments RUN, KIND and NAME. Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<CheckpointPath> PathOf(const Call& call);
// Returns the path of a checkpoint from its run and its name in Weft.
[[nodiscard]] CheckpointPath PathOfWeft(absl::string_view run,
                                        absl::string_view weft_name);

// The engine does not know the extras of checkpoints: the metadata, the time of
// expiry and the base model's name that clients of the Tinker API give.

inline constexpr int64_t kMinTtlSeconds = 3600;
inline constexpr int64_t kMaxTtlSeconds = 10LL * 365 * 86400;

// Reads `user_metadata` and `ttl_seconds`, the seconds from now until the
// checkpoint expires. Errors: INVALID_ARGUMENT if `ttl_seconds` is not a whole
// number in [kMinTtlSeconds, kMaxTtlSeconds]; those of ShownField.
[[nodiscard]] absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body);

// Sets `extras->charge` to a charge of the caller for the text. Errors: those
// of Front::ChargeEntry.
[[nodiscard]] absl::Status ChargeExtras(const Front& front,
                                        const Caller& caller,
                                        CheckpointExtras* extras);

// Stores a checkpoint's extras in Front::extras and in the ledger. If all
// fields of `extras` are empty, removes the entry. A failed write is only
// logged, because the checkpoint itself exists.
void KeepExtras(Front& front, const Caller& caller, const CheckpointPath& path,
                CheckpointExtras extras);
// Returns the extras; all fields are empty if the checkpoint has none.
[[nodiscard]] CheckpointExtras FindExtras(const Front& front,
                                          const Caller& caller,
                                          const CheckpointPath& path);

// Returns the base model's name: the one in the extras, otherwise the served
// model's.
[[nodiscard]] std::string BaseModelOf(const Front& front, const Caller& caller,
                                      const CheckpointPath& path);

// Has the engine delete the checkpoints that have expired by `now`, and then
// removes their extras.
void SweepCheckpoints(Front& front, absl::Time now);

// Reads all extras from the ledger.
void RestoreExtras(Front& front);

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

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINTS_H_
