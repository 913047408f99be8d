// Opens the state that a server goes on with.
#ifndef WEFT_SRC_ENGINE_START_OPEN_STATE_H_
#define WEFT_SRC_ENGINE_START_OPEN_STATE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/options/options.h"
#include "src/checkpoint/checkpoint_files.h"
#include "src/directory/directory.h"
#include "src/engine/engine.h"
#include "src/log/bucket/members.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/running_steps.h"
#include "src/log/state.h"
#include "src/store/store_metrics.h"

namespace weft::engine {

struct BucketMetrics {
  explicit BucketMetrics(prometheus::Registry* registry)
      : store(registry), owner(registry) {}

  store::StoreMetrics store;
  log::OwnerMetrics owner;
};

// The state of --state-dir or --state. Empty without them.
struct OpenedState {
  std::unique_ptr<BucketMetrics> metrics;  // Outlive `state`.
  std::unique_ptr<log::State> state;
  log::StateBucket* bucket = nullptr;  // `state`, if it is in a store.
  // The steps that ran when this machine's last process ended. For a store,
  // null until TakeState.
  std::unique_ptr<log::RunningSteps> running;
};

// Opens the folder, or the store, which must keep conditions. `model` is the
// base model's fingerprint. `registry` outlives the result. Errors: those of
// StateFolder::Open, StateBucket::Open, StateBucket::CheckLogs, CheckConditions
// and RunningSteps::Open.
absl::StatusOr<OpenedState> OpenState(const EngineOptions& options,
                                      const std::string& model,
                                      prometheus::Registry* registry);

// Returns when this process has the state, in a store one of its logs.
// Meanwhile calls `on_standby`. Errors: those of TakeWhenFree and
// RunningSteps::Open.
absl::Status TakeState(const EngineOptions& options,
                       const OnStandby& on_standby, OpenedState* opened);

// Returns where checkpoints are kept: in the store, else in --checkpoint-dir.
// Call it when this process has the state, which outlives the result.
std::unique_ptr<checkpoint::CheckpointFiles> OpenCheckpoints(
    const OpenedState& opened, const EngineOptions& options);

// Returns the directory of adapters; null if the state is not in a store. Call
// it when this process has a log. The state outlives the result.
std::unique_ptr<directory::Directory> OpenAdapterDirectory(
    const OpenedState& opened, const EngineOptions& options);

// Returns the choice of who samples; null if the state is not in a store. Call
// it when this process has a log. The state and the metrics outlive the result.
std::unique_ptr<log::Members> OpenMembers(const OpenedState& opened,
                                          const EngineOptions& options,
                                          prometheus::Registry* registry);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_START_OPEN_STATE_H_
