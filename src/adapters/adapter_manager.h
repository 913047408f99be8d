// Operations on adapters as a whole: create, delete, read and write their
// files, import, export. They run between two plans.
#ifndef WEFT_SRC_ADAPTERS_ADAPTER_MANAGER_H_
#define WEFT_SRC_ADAPTERS_ADAPTER_MANAGER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/adapters/adapter_io.h"
#include "src/adapters/adapter_mover.h"
#include "src/adapters/engine_context.h"

namespace weft::engine {

// Every public method queues work and returns; callbacks run on the reply
// thread. Threads: any.
class AdapterManager {
 public:
  // Both outlive it. `forget_step` runs on the engine thread for each started
  // step that an adapter takes with it.
  AdapterManager(const EngineContext* context, AdapterMover* mover,
                 std::function<void(uint64_t step_id)> forget_step)
      : context_(*context),
        mover_(*mover),
        forget_step_(std::move(forget_step)) {}

  void Create(CreateAdapterRequest request, Callback<AdapterInfo> done);
  void Delete(std::string adapter_id, Callback<bool> done);
  // Reads a checkpoint into an adapter that does not exist yet.
  void LoadNew(LoadCheckpointRequest request, Callback<AdapterInfo> done);
  void Import(ImportAdapterRequest request, Callback<AdapterInfo> done);
  void Export(ExportAdapterRequest request, Callback<PeftFiles> done);
  void ReleaseSnapshot(ReleaseSnapshotRequest request, Callback<bool> done);
  void ListCheckpoints(std::string adapter_id,
                       Callback<std::vector<CheckpointInfo>> done);
  void DeleteCheckpoint(std::string adapter_id, std::string name,
                        Callback<bool> done);

  // Engine thread.

  // Makes an adapter of an earlier process, as it was made then, in a slot that
  // WhenSlot gave.
  [[nodiscard]] absl::Status MakeAgain(const records::AdapterRecord& adapter);
  // The adapter and its work are gone.
  void Remove(AdapterKey key);

 private:
  // A new adapter. An empty `state` makes a fresh one.
  struct NewAdapter {
    CreateAdapterRequest request;
    lora::AdapterState state;
    std::string image;  // Where KeepState has put the state.
    uint64_t last_step = 0;
    std::optional<LoadCheckpointRequest> load;  // It comes from there.
  };

  template <typename T>
  void Reply(const Callback<T>& done, absl::StatusOr<T> result) const {
    context_.PostReply([done, result = std::move(result)]() mutable {
      done(std::move(result));
    });
  }

  // Runs `body` on the engine thread; once that has ended, replies why not.
  template <typename T, typename Body>
  void Post(const Callback<T>& done, Body body) const {
    context_.dispatcher.Post(
        [this, done, body = std::move(body)](const absl::Status& open) mutable {
          if (open.ok()) {
            body();
          } else {
            Reply<T>(done, open);
          }
        });
  }

  // The largest rank that an adapter of this model would have.
  [[nodiscard]] int MaxRank(const LoraConfig& config) const;

  // I/O thread: the state that a new adapter begins with, kept for the log.
  [[nodiscard]] absl::StatusOr<NewAdapter> ReadLoad(
      const LoadCheckpointRequest& request) const;
  [[nodiscard]] absl::StatusOr<NewAdapter> ReadImport(
      const ImportAdapterRequest& request) const;

  // Engine thread.

  // Once there is a slot for a new adapter, which the task then has to use or
  // return; at once with an error when there can be none.
  void WhenSlot(const CreateAdapterRequest& request, dispatch::EngineTask task);
  void MakeWhenRoom(NewAdapter adapter, Callback<AdapterInfo> done);
  // Makes an adapter in the slot that it was given, or returns the slot.
  [[nodiscard]] absl::StatusOr<AdapterInfo> Make(const NewAdapter& adapter);
  [[nodiscard]] absl::Status MakeTensors(AdapterKey key,
                                         const LoraConfig& config,
                                         const lora::AdapterState& state,
                                         absl::Time created_at);
  void ReadWhenRoom(const LoadCheckpointRequest& request,
                    const Callback<AdapterInfo>& done);
  // `made`: what the adapter is.
  void Record(AdapterKey key, const NewAdapter& adapter,
              const AdapterInfo& made) const;
  // False: it does not exist.
  bool Forget(const std::string& adapter_id);
  // The adapter is on the device, unless `status` says why not.
  void ExportNow(AdapterKey key, const ExportAdapterRequest& request,
                 const Callback<PeftFiles>& done, absl::Status status);

  const EngineContext& context_;
  AdapterMover& mover_;
  const std::function<void(uint64_t)> forget_step_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_MANAGER_H_
