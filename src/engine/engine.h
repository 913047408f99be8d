// The engine's interface for the server. Requests and results hold no tensors.
//
// Threads: every method may be called from any thread and never waits for the
// device. Each `done` runs exactly once, on the engine's reply thread. But it
// may run on the caller's thread before the method returns, for example if the
// request is refused at once. Callbacks must not block.
#ifndef WEFT_SRC_ENGINE_ENGINE_H_
#define WEFT_SRC_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/files/file_source.h"
#include "src/base/options/options.h"
#include "src/base/options/world.h"
#include "src/request/activity.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/engine_info.h"
#include "src/request/note.h"
#include "src/request/profile.h"
#include "src/request/reply.h"
#include "src/request/sample.h"
#include "src/request/step.h"
#include "src/request/train.h"

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace weft::engine {

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const EngineInfo& info() const = 0;

  // Queues a step (src/request/step.h). A RefusedStep takes the place of a step
  // whose request is invalid: in its turn it fails with its status, which is
  // its stored reply. Errors, besides validation errors: NOT_FOUND (adapter or
  // snapshot), ALREADY_EXISTS (step number reused with another payload),
  // OUT_OF_RANGE (step whose result is no longer kept), FAILED_PRECONDITION
  // (step out of order, another adapter's epoch, gradient is not finite),
  // RESOURCE_EXHAUSTED (queue, memory or disk), DEADLINE_EXCEEDED, CANCELLED,
  // UNAVAILABLE (draining, or the adapter is not restored yet), INTERNAL.
  // A TrainRequest also fails with FAILED_PRECONDITION if the record of a
  // sample is gone that the request names, and with INVALID_ARGUMENT if the
  // sample drew other tokens (ReplaySamples). A load without a step number
  // creates the adapter if there is none.
  // A step is kept as `keep` says, unless it repeats another.
  virtual CancelHandle Submit(StepRequest request, KeepStep keep,
                              StepCallback done) = 0;
  CancelHandle Submit(StepRequest request, StepCallback done) {
    return Submit(std::move(request), KeepStep(), std::move(done));
  }
  // Returns and forgets the kept steps of an earlier process that this one
  // runs. Call it when their adapters are restored. Any thread may call it.
  virtual std::vector<KeptStep> TakeResumed() = 0;
  // Submit the steps whose kinds they name.
  CancelHandle Train(TrainRequest request,
                     Callback<StepReply<TrainResult>> done) {
    return Submit(std::move(request), TypedReply(std::move(done)));
  }
  CancelHandle OptimStep(OptimStepRequest request,
                         Callback<StepReply<OptimStepResult>> done) {
    return Submit(std::move(request), TypedReply(std::move(done)));
  }
  CancelHandle SaveCheckpoint(SaveCheckpointRequest request,
                              Callback<StepReply<CheckpointInfo>> done) {
    return Submit(std::move(request), TypedReply(std::move(done)));
  }
  CancelHandle LoadCheckpoint(LoadCheckpointRequest request,
                              Callback<StepReply<AdapterInfo>> done) {
    return Submit(std::move(request), TypedReply(std::move(done)));
  }
  CancelHandle PublishSnapshot(PublishSnapshotRequest request,
                               Callback<StepReply<PublishedSnapshot>> done) {
    return Submit(std::move(request), TypedReply(std::move(done)));
  }
  // Returns at most how many bytes of memory the request takes from records.
  // Any thread may call it.
  virtual int64_t ReplayBytes(const TrainRequest& request) const = 0;
  // Returns how far the step is above the lowest number that no step of the
  // adapter has: so many others may have to come before it can run. `step` 0
  // stands for the number that the adapter would give. 0 if there is no such
  // adapter. Any thread may call it.
  virtual uint64_t Ahead(const std::string& adapter_id,
                         uint64_t step) const = 0;
  // Gives `done` the result of a step, when the step has ended and the result
  // is on disk. Errors: NOT_FOUND (adapter), OUT_OF_RANGE (there is no such
  // step, or its result is no longer kept), UNAVAILABLE (the adapter is not
  // restored yet), and those with which a step ends without a result.
  virtual void Retrieve(std::string adapter_id, uint64_t step,
                        Callback<StepResultPtr> done) = 0;

  // Keep notes (src/request/note.h) in the log; without --state-dir nothing is
  // kept. PutNote replaces a note of the same name, and runs `done` on the
  // reply thread when the note is on disk. Its errors: RESOURCE_EXHAUSTED (the
  // disk is full or slow) and those of CheckHeld for the note's unit, before it
  // returns; then nothing is recorded. If the process crashes right after
  // EraseNote, the note may stay; that of a held unit does.
  virtual void PutNote(const std::string& name, std::string value,
                       std::function<void(const absl::Status&)> done) = 0;
  virtual void EraseNote(const std::string& name) = 0;
  // Returns the notes whose names begin with `prefix`.
  virtual Notes NotesWith(const std::string& prefix) const = 0;

  // Without --state or with one log there are no other logs.
  //
  // Returns HOST:PORT of the process that has another log's adapter, or unit,
  // as far as is known without asking the store; empty otherwise.
  virtual std::string OwnerOf(const std::string& adapter_id) const = 0;
  // Returns HOST:PORT of the process that is to draw the next samples from a
  // checkpoint (log/bucket/members.h); empty for this one.
  virtual std::string ChooseSampler() = 0;
  // Gives `done` HOST:PORT of the process that has a unit of another log
  // (src/request/move_unit.h), or that has log `home`, if the unit is empty,
  // has no models and never moved. `done` runs at once if this is known.
  // Errors: NOT_FOUND (no other log has it), UNAVAILABLE (nobody has the log
  // now, or the store does not answer).
  virtual void FindOwner(const std::string& unit, int home,
                         Callback<std::string> done) = 0;
  // Returns UNAVAILABLE, with the reason ADAPTER_RECOVERING, while the unit is
  // on its way to or from another log. Any thread may call it.
  virtual absl::Status CheckHeld(const std::string& unit) const = 0;
  // Gives `done` the bytes that the engines of all logs use under a name:
  // `bytes`, if none of them has given others before. Errors: UNAVAILABLE.
  virtual void Agree(const std::string& name, const std::string& bytes,
                     Callback<std::string> done) = 0;

  // `on_delta` may be empty. Otherwise it runs on the reply thread for each new
  // piece of a sample, in order, before `done`.
  virtual CancelHandle Sample(SampleRequest request,
                              std::function<void(SampleDelta)> on_delta,
                              Callback<SampleResult> done) = 0;

  // Operations on adapters.
  virtual void CreateAdapter(CreateAdapterRequest request,
                             Callback<AdapterInfo> done) = 0;
  virtual void GetAdapter(std::string adapter_id,
                          Callback<AdapterInfo> done) = 0;
  virtual void ListAdapters(ListAdaptersRequest request,
                            Callback<AdapterPage> done) = 0;
  virtual void DeleteAdapter(std::string adapter_id, Callback<bool> done) = 0;
  // Takes the adapter's unit to another log of --state. Runs `done` when its
  // server has it, or it has stayed. Errors: those of Departure::Start.
  virtual void MoveAdapter(MoveAdapterRequest request, Callback<bool> done) = 0;
  virtual void ListCheckpoints(std::string adapter_id,
                               Callback<std::vector<CheckpointInfo>> done) = 0;
  virtual void DeleteCheckpoint(std::string adapter_id, std::string name,
                                Callback<bool> done) = 0;
  virtual void SetCheckpointTtl(SetCheckpointTtlRequest request,
                                Callback<CheckpointInfo> done) = 0;
  // `done` gets the checkpoint's files, which stay on disk.
  virtual void DownloadCheckpoint(std::string adapter_id, std::string name,
                                  Callback<std::vector<FileSource>> done) = 0;
  virtual void UploadCheckpoint(UploadCheckpointRequest request,
                                Callback<CheckpointInfo> done) = 0;
  virtual void ReleaseSnapshot(ReleaseSnapshotRequest request,
                               Callback<bool> done) = 0;
  virtual void ExportAdapter(ExportAdapterRequest request,
                             Callback<PeftFiles> done) = 0;
  virtual void ImportAdapter(ImportAdapterRequest request,
                             Callback<AdapterInfo> done) = 0;

  // Adds the report to the adapter's activity. Runs `done` before it returns.
  // Any thread may call it.
  virtual void ReportMetrics(MetricReport report, Callback<bool> done) = 0;

  // Returns the number of adapters, with those that are still restored. Any
  // thread may call it.
  virtual size_t num_adapters() const = 0;

  // Returns the recent activity of the adapters in `query` and the load of the
  // tenants in `query`. Any thread may call it.
  virtual Activity activity(const ActivityQuery& query) const = 0;

  // Records what the engine thread does. `done` gets a Chrome trace (JSON).
  // Errors: FAILED_PRECONDITION while another profile runs, UNAVAILABLE if the
  // engine stops.
  virtual CancelHandle Profile(const ProfileRequest& request,
                               Callback<std::string> done) = 0;

  // Refuses new work from now on. Runs `done` when all accepted work is done.
  // Saves, exports and reads go on.
  virtual void Drain(Callback<bool> done) = 0;
  // Does what Drain does for a process that ends: also refuses saves, and waits
  // for all that Drain let through. Undrain must not follow.
  virtual void Finish(Callback<bool> done) = 0;
  // Takes new work again. Drains that have not ended yet are ABORTED.
  virtual void Undrain() = 0;

  // Does what LogDrain::Start does (moves/log_drain.h). When `done` has got
  // true, the process must end, and gives its log away.
  virtual void DrainLog(Callback<bool> done) = 0;

  // Writes a snapshot of --state-dir and cuts the log. Runs `done` when it is
  // on disk. Errors: FAILED_PRECONDITION without --state-dir; UNAVAILABLE while
  // adapters are restored, or if the engine stops; those of writing files.
  virtual void WriteSnapshot(Callback<bool> done) = 0;

  // Returns an error if the engine can no longer compute or record, or if it
  // cannot restore an adapter. ABORTED if another process has taken the state
  // over. The process must then end. Any thread may call it.
  virtual absl::Status failure() const = 0;

  // Call it before the process ends while steps may run, unless they are the
  // cause: no later start then suspects them. Does nothing after the loss of a
  // device or of another rank, which a step may have caused. Any thread may
  // call it.
  virtual void ExcuseRunning() = 0;

  // Returns the time when the engine thread last finished a piece of work or
  // found no work. Any thread may call it.
  virtual absl::Time last_heartbeat() const = 0;
};

// Gets the --advertise-address of the process that has the state in --state.
using OnStandby = std::function<void(const std::string& owner)>;

// Loads the base model, restores the state, and starts the engine thread.
// While another process has the state in --state, waits and calls `on_standby`,
// at least once a second, on the caller's thread. Shows
// progress on stderr. In a world of several ranks this process is rank 0,
// and the call returns when all ranks have loaded. `registry` outlives the
// engine. The engine's destructor cancels queued work and joins its threads.
// Errors, among others: INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED
// (a model whose architecture or config field is not supported),
// FAILED_PRECONDITION (no such device; --checkpoint-dir cannot be written;
// --state-dir belongs to another model or has another format), UNAVAILABLE
// (another process uses --state-dir), DATA_LOSS (damaged files),
// RESOURCE_EXHAUSTED (too little device memory). Errors of another rank begin
// with "rank N: ".
absl::StatusOr<std::unique_ptr<Engine>> StartEngine(
    const EngineOptions& options, const World& world,
    prometheus::Registry* registry, const OnStandby& on_standby);

// Runs a rank other than 0: loads its part of the model and computes until rank
// 0 ends. Runs `met` when all ranks are connected. Errors: those of StartEngine
// about the model and the device, and INTERNAL if another rank is lost.
absl::Status RunRemoteWorker(const EngineOptions& options, const World& world,
                             const std::function<void()>& met);

// Checks what StartEngine checks before it loads weights: device, config.json
// and headers, sizes of the world, that folders can be written, and FORMAT of
// --state-dir, which may be in use. Makes no folder. Errors: StartEngine's.
absl::Status CheckStart(const EngineOptions& options);

// Returns a table of how StartEngine would divide the memory of CUDA devices
// with `device_bytes` each. Each line names a part, its size in bytes and GiB,
// what limits the part, and what it is for. Needs no device, and reads only
// config.json and the headers of the weight files. Errors: INVALID_ARGUMENT for
// --device=cpu, because a CPU's memory is not divided; errors of StartEngine
// about options, config.json, the headers and the device's memory.
absl::StatusOr<std::string> DescribeMemory(const EngineOptions& options,
                                           int64_t device_bytes);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_H_
