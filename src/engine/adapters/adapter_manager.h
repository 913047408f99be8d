// Operations on whole adapters: create, delete, load, import, export. The
// engine thread changes adapters between two plans (units of device work), and
// the I/O thread reads and writes files.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MANAGER_H_
#define WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MANAGER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "src/engine/adapters/adapter_io.h"
#include "src/engine/adapters/adapter_mover.h"
#include "src/engine/engine_context.h"

namespace weft::engine {

// The requests (Create to ReleaseSnapshot) queue work and return. Their
// callbacks run on the reply thread. Threads: any, except where a comment says
// otherwise.
class AdapterManager {
 public:
  // `context` and `mover` outlive the manager. The removal of an adapter fails
  // the adapter's steps. `forget_step` runs on the engine thread for each
  // failed step that had started.
  AdapterManager(const EngineContext* context, AdapterMover* mover,
                 std::function<void(uint64_t step_id)> forget_step)
      : context_(*context),
        mover_(*mover),
        forget_step_(std::move(forget_step)) {}

  void Create(CreateAdapterRequest request, Callback<AdapterInfo> done);
  void Delete(std::string adapter_id, Callback<bool> done);
  // Creates an adapter from a checkpoint.
  void LoadNew(LoadCheckpointRequest request, Callback<AdapterInfo> done);
  void Import(ImportAdapterRequest request, Callback<AdapterInfo> done);
  void Export(ExportAdapterRequest request, Callback<PeftFiles> done);
  void ReleaseSnapshot(ReleaseSnapshotRequest request, Callback<bool> done);

  // Returns INVALID_ARGUMENT if a rank is above --max-rank, or if an expert's
  // rank is above SharedRank(--max-rank).
  absl::Status CheckRanks(const LoraConfig& config) const;
  // The I/O thread calls the next method. Describes the checkpoint that the
  // request would load, without reading its tensors. Errors: those of
  // AdapterIo::Describe; FAILED_PRECONDITION if a rank is above --max-rank.
  absl::StatusOr<CheckpointInfo> DescribeLoad(
      const LoadCheckpointRequest& request) const;

  // Frees the name if this log has nothing of its unit when all records until
  // now are durable. Any thread may call it.
  void FreeName(const std::string& adapter_id) const;

  // The engine thread calls the methods below.

  // Errors: NOT_FOUND, and those of AdapterDesk::CheckReady.
  absl::StatusOr<AdapterKey> Find(const std::string& adapter_id) const;
  // Creates an adapter of an earlier process from the adapter's record in the
  // log. The adapter gets initial weights. The caller must hold a slot
  // (AdapterDesk::WhenSlot). After an error, MakeAgain gives the slot back.
  absl::Status MakeAgain(const log::StoredAdapter& adapter);
  // Removes the adapter with its tensors, its spill file and its steps. Does
  // not write the removal to the log.
  void Remove(AdapterKey key);
  // From now on clients are told to make new adapters at another log's server,
  // or here again.
  void SendNewElsewhere(bool elsewhere) { sends_elsewhere_ = elsewhere; }
  bool sends_elsewhere() const { return sends_elsewhere_; }

 private:
  // The first state of a new adapter. If `state` has no weights, the adapter
  // gets initial ones.
  struct NewAdapter {
    CreateAdapterRequest request;
    lora::AdapterState state;
    std::string image;  // The image file that KeepState wrote; may be empty.
    uint64_t last_step = 0;
  };

  // Runs `body` on the engine thread. If the engine has ended, `done` gets an
  // error.
  template <typename T, typename Body>
  void Post(const Callback<T>& done, Body body) const {
    context_.dispatcher.Post(
        [this, done, body = std::move(body)](const absl::Status& open) mutable {
          if (open.ok()) {
            body();
          } else {
            context_.Reply(done, open);
          }
        });
  }

  // Replaces kDefault by the server's default. Errors: FAILED_PRECONDITION if
  // the durability needs --state-dir and the server runs without it.
  absl::Status Resolve(Durability* durability) const;
  // The I/O thread calls the next two methods. They read the first state of a
  // new adapter. If the log needs the state, they copy it to an image
  // (KeepState).
  absl::StatusOr<NewAdapter> ReadLoad(
      const LoadCheckpointRequest& request) const;
  absl::StatusOr<NewAdapter> ReadImport(
      const ImportAdapterRequest& request) const;

  // The engine thread calls the methods below.

  // Runs `then` on the engine thread when the name is this log's, or with the
  // error of Directory::Claim. After OK the caller calls Make or EndClaim.
  void WhenClaimed(const std::string& adapter_id, const std::string& tenant,
                   std::function<void(const absl::Status&)> then);
  // Ends the claim of a name, and frees the name unless the adapter was made.
  void EndClaim(const std::string& adapter_id, bool made);
  void MakeWhenRoom(NewAdapter adapter, Callback<AdapterInfo> done);
  // Creates an adapter with a claimed name in the slot that WhenSlot gave.
  // After an error gives both back and removes the image file.
  absl::StatusOr<AdapterInfo> Make(const NewAdapter& adapter);
  absl::Status MakeTensors(AdapterKey key, const LoraConfig& config,
                           const lora::AdapterState& state,
                           absl::Time created_at);
  void ReadWhenRoom(const LoadCheckpointRequest& request,
                    const Callback<AdapterInfo>& done);
  void ReadThenMake(const LoadCheckpointRequest& request,
                    const Callback<AdapterInfo>& done);
  // Writes the adapter's StoredAdapter, with the facts in `made`. Writes none
  // if the durability is kMemory. If a load made the adapter, stores the load's
  // reply for repeated calls.
  void Record(AdapterKey key, const NewAdapter& adapter,
              const AdapterInfo& made) const;
  // Removes the adapter and records its removal. Returns false for the base
  // model and for an adapter that does not exist.
  bool Forget(const std::string& adapter_id);
  // Exports an adapter that is on the device. If `status` is an error, only
  // gives `done` the error.
  void ExportNow(AdapterKey key, const ExportAdapterRequest& request,
                 const Callback<PeftFiles>& done, absl::Status status);

  const EngineContext& context_;
  AdapterMover& mover_;
  const std::function<void(uint64_t)> forget_step_;
  bool sends_elsewhere_ = false;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MANAGER_H_
