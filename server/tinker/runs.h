// Training runs and checkpoints, as the REST client asks for them. A run is an
// adapter, or what is left of one: checkpoints on disk.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_RUNS_H_
#define WEFT_SERVER_TINKER_RUNS_H_

#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// The checkpoint of a path. NOT_FOUND in `done` when there is none.
[[nodiscard]] absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                                          const CheckpointPath& path,
                                          Callback<CheckpointInfo> done);
[[nodiscard]] absl::Status DeleteRunCheckpoint(Front& front, CallOrigin origin,
                                               const CheckpointPath& path,
                                               Callback<bool> done);

[[nodiscard]] absl::Status ListRuns(Front& front, const CallPtr& call,
                                    const Respond& respond);
[[nodiscard]] absl::Status GetRun(Front& front, const CallPtr& call,
                                  const Respond& respond);
[[nodiscard]] absl::Status ListRunCheckpoints(Front& front, const CallPtr& call,
                                              const Respond& respond);
[[nodiscard]] absl::Status ListAllCheckpoints(Front& front, const CallPtr& call,
                                              const Respond& respond);
[[nodiscard]] absl::Status DeleteCheckpoint(Front& front, const CallPtr& call,
                                            const Respond& respond);
[[nodiscard]] absl::Status SetCheckpointTtl(Front& front, const CallPtr& call,
                                            const Respond& respond);
[[nodiscard]] absl::Status GetWeightsInfo(Front& front, const CallPtr& call,
                                          const Respond& respond);
// publish and copy: a checkpoint is its tenant's alone.
[[nodiscard]] absl::Status RefuseSharing(Front& front, const CallPtr& call,
                                         const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RUNS_H_
