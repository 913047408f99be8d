// Operations on whole adapters: create, delete, load, save, import, export. The
// engine thread runs them between two plans.
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
  // Both outlive the manager. When an adapter is removed, `forget_step` runs on
  // the engine thread for each of its steps that had started.
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
  void DownloadCheckpoint(std::string adapter_id, std::string name,
                          Callback<PeftFiles> done);
  void UploadCheckpoint(UploadCheckpointRequest request,
                        Callback<CheckpointInfo> done);

  // The engine thread calls the methods below.

  // Creates an adapter of an earlier process again. The task of WhenSlot calls
  // it.
  [[nodiscard]] absl::Status MakeAgain(const records::AdapterRecord& adapter);
  // Removes the adapter and its work.
  void Remove(AdapterKey key);

 private:
  // What a new adapter begins with. If `state` is empty, its weights are
  // initialised.
  struct NewAdapter {
    CreateAdapterRequest request;
    lora::AdapterState state;
    std::string image;  // The image file that KeepState wrote.
    uint64_t last_step = 0;
    std::optional<LoadCheckpointRequest> load;  // The load that creates the
                                                // adapter.
  };

  template <typename T>
  void Reply(const Callback<T>& done, absl::StatusOr<T> result) const {
    context_.PostReply([done, result = std::move(result)]() mutable {
      done(std::move(result));
    });
  }

  // Runs `body` on the engine thread. If the engine has ended, `done` gets an
  // error.
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

  // Replaces kDefault. Errors: FAILED_PRECONDITION for a durability that needs
  // --state-dir, without it.
  [[nodiscard]] absl::Status Resolve(Durability* durability) const;
  // Refuses ranks above the limits of --max-rank.
  [[nodiscard]] absl::Status CheckRanks(const LoraConfig& config) const;

  // The I/O thread calls the next two. They read the state that a new adapter
  // begins with and keep a copy of the state for the log.
  [[nodiscard]] absl::StatusOr<NewAdapter> ReadLoad(
      const LoadCheckpointRequest& request) const;
  [[nodiscard]] absl::StatusOr<NewAdapter> ReadImport(
      const ImportAdapterRequest& request) const;

  // The engine thread calls the methods below.

  void MakeWhenRoom(NewAdapter adapter, Callback<AdapterInfo> done);
  // Creates an adapter in the slot that WhenSlot gave, or returns the slot.
  [[nodiscard]] absl::StatusOr<AdapterInfo> Make(const NewAdapter& adapter);
  [[nodiscard]] absl::Status MakeTensors(AdapterKey key,
                                         const LoraConfig& config,
                                         const lora::AdapterState& state,
                                         absl::Time created_at);
  void ReadWhenRoom(const LoadCheckpointRequest& request,
                    const Callback<AdapterInfo>& done);
  // Records that the adapter exists, with the facts in `made`, unless nothing
  // of it survives.
  void Record(AdapterKey key, const NewAdapter& adapter,
              const AdapterInfo& made) const;
  // Returns false if the adapter does not exist.
  bool Forget(const std::string& adapter_id);
  // Exports an adapter that is on the device. If `status` is an error, `done`
  // gets the error.
  void ExportNow(AdapterKey key, const ExportAdapterRequest& request,
                 const Callback<PeftFiles>& done, absl::Status status);

  const EngineContext& context_;
  AdapterMover& mover_;
  const std::function<void(uint64_t)> forget_step_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_MANAGER_H_
