// The engine: a door that any thread may use, and one thread that owns the
// device.
//
// A step's way: the door looks it up in the replay table, gives it to the
// scheduler and returns. The engine thread asks the scheduler for a plan, runs
// it, and hands results to the completion thread. Files are read and written by
// the I/O thread; a step that waits for a file keeps its adapter's barrier. Of
// an adapter that is not on the device the scheduler holds the work until its
// tensors are there.
#ifndef WEFT_SRC_ENGINE_ENGINE_IMPL_H_
#define WEFT_SRC_ENGINE_ENGINE_IMPL_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "src/base/mutex.h"
#include "src/base/worker.h"
#include "src/engine/adapter_io.h"
#include "src/engine/adapter_table.h"
#include "src/engine/compute_device.h"
#include "src/engine/engine.h"
#include "src/engine/engine_probe.h"
#include "src/engine/memory_split.h"
#include "src/engine/sample_loop.h"
#include "src/engine/train_runner.h"
#include "src/engine/work.h"
#include "src/group/group.h"
#include "src/journal/replay_table.h"
#include "src/journal/spill_folder.h"
#include "src/sampling/stop_matcher.h"
#include "src/sched/residency.h"
#include "src/sched/scheduler.h"

namespace weft::engine {

// What StartEngine has loaded.
struct EngineParts {
  EngineOptions options;
  EngineInfo info;
  parallel::Links links;  // Of rank 0.
  std::unique_ptr<ComputeDevice> device;
  std::unique_ptr<model::Decoder> decoder;
  std::unique_ptr<sampling::TokenBytes> token_bytes;  // Null: none.
  std::string model_name;
  std::unique_ptr<SpillFolder> spill;
  std::optional<MemorySplit> memory;  // Of CUDA devices.
};

class EngineImpl final : public Engine {
 public:
  EngineImpl(EngineParts parts, prometheus::Registry* registry);
  ~EngineImpl() override;

  [[nodiscard]] const EngineInfo& info() const override { return parts_.info; }

  CancelHandle Train(TrainRequest request,
                     Callback<StepReply<TrainResult>> done) override;
  CancelHandle OptimStep(OptimStepRequest request,
                         Callback<StepReply<OptimStepResult>> done) override;
  CancelHandle Sample(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done) override;
  void CreateAdapter(CreateAdapterRequest request,
                     Callback<AdapterInfo> done) override;
  void GetAdapter(std::string adapter_id, Callback<AdapterInfo> done) override;
  void ListAdapters(Callback<std::vector<AdapterInfo>> done) override;
  void DeleteAdapter(std::string adapter_id, Callback<bool> done) override;
  CancelHandle SaveCheckpoint(
      SaveCheckpointRequest request,
      Callback<StepReply<CheckpointInfo>> done) override;
  CancelHandle LoadCheckpoint(LoadCheckpointRequest request,
                              Callback<StepReply<AdapterInfo>> done) override;
  void ListCheckpoints(std::string adapter_id,
                       Callback<std::vector<CheckpointInfo>> done) override;
  void DeleteCheckpoint(std::string adapter_id, std::string name,
                        Callback<bool> done) override;
  CancelHandle PublishSnapshot(PublishSnapshotRequest request,
                               Callback<StepReply<uint64_t>> done) override;
  void ReleaseSnapshot(ReleaseSnapshotRequest request,
                       Callback<bool> done) override;
  void ExportAdapter(ExportAdapterRequest request,
                     Callback<PeftFiles> done) override;
  void ImportAdapter(ImportAdapterRequest request,
                     Callback<AdapterInfo> done) override;
  void Drain(Callback<bool> done) override;
  [[nodiscard]] absl::Status failure() const override;
  [[nodiscard]] absl::Time last_heartbeat() const override {
    return probe_.last_heartbeat();
  }

 private:
  // Progress of a training request over its slices. Engine thread only.
  struct TrainProgress {
    TrainResult result;
    loss::MetricSums metrics;
  };

  // The door (engine_door.cc).

  template <typename Request, typename Result>
  CancelHandle SubmitStep(sched::WorkItem item, Request request,
                          Callback<StepReply<Result>> done);
  // Reads a checkpoint into an adapter that does not exist yet.
  void LoadNewAdapter(LoadCheckpointRequest request,
                      Callback<StepReply<AdapterInfo>> done);
  // Queues `task` for the engine thread, before its next plan.
  void PostControl(std::function<void()> task);
  [[nodiscard]] absl::Status CheckOpen() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The work in flight under this number, which the replay table knows.
  StepWork& FindStep(const std::string& adapter_id, uint64_t step,
                     uint64_t* work_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Forgets the adapter and fails its work; engine thread. False: unknown.
  bool Forget(const std::string& adapter_id);
  // The adapter is on the device, unless `status` says why not.
  void ExportNow(const ExportAdapterRequest& request,
                 const Callback<PeftFiles>& done, absl::Status status);
  // UNAVAILABLE to `done` and false when draining.
  template <typename Result>
  [[nodiscard]] bool Admit(const Callback<Result>& done);
  // Runs `task` on the I/O thread; a drain waits for it.
  void PostIo(std::function<void()> task);
  void CancelStep(uint64_t work_id, uint64_t waiter_id);
  void CancelSample(uint64_t work_id);

  // The engine thread (engine_loop.cc).

  void Loop();
  // As RunGuarded. After an error gives back memory that nobody uses, and asks
  // the device whether it still computes: if not, this and all that computes
  // from now on is UNAVAILABLE.
  [[nodiscard]] absl::Status Guarded(const char* what,
                                     const std::function<void()>& body);
  // As Guarded, with a body that computes. UNAVAILABLE, likewise, when another
  // rank is gone.
  [[nodiscard]] absl::Status Compute(const char* what,
                                     const std::function<void()>& body);
  // Nothing can be computed any more: sets failure(), and returns it.
  absl::Status Fail(const char* what, const absl::Status& reason,
                    std::string_view message);
  void ShowDevice();
  // Between other work: are the other ranks there still?
  void Ping();
  // Waits for something to do. False: stop.
  bool WaitForWork(std::deque<std::function<void()>>* control,
                   sched::Plan* plan);
  void ExpireWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunPlan(const sched::Plan& plan);
  void RunExclusive(uint64_t work_id);

  // Micro-batches (engine_train.cc).

  void RunTrain(const sched::Plan& plan);
  // A plan's slices, ready to run.
  struct MicroBatch;
  [[nodiscard]] MicroBatch MakeMicroBatch(
      const sched::Plan& plan, const std::vector<const StepWork*>& works);
  [[nodiscard]] absl::Status RunTrainPieces(
      const sched::Plan& plan, const std::vector<const StepWork*>& works);
  // One attempt, up to the adapters' scratch.
  [[nodiscard]] absl::StatusOr<TrainOutcome> TryBatch(MicroBatch& batch,
                                                      Recompute recompute);
  // Adapters of a plan cannot go before it has ended: deleting runs between.
  void CountTenantTokens(const sched::Plan& plan,
                         const std::vector<const StepWork*>& works);
  // After a slice that is not the request's last one.
  void FinishSlice(uint64_t work_id);

  // Samples (engine_samples.cc).

  void RunDecode();
  void AdmitSamples();
  void CountTenantTokens(const SampleWork& work, const SampleResult& result);

  // The end of work (engine_complete.cc).

  // Gives the result to all who wait, tells scheduler and replay table.
  void CompleteStep(uint64_t work_id, absl::StatusOr<ErasedResult> result);
  // Fails work that left the scheduler without having run.
  void DropStep(uint64_t work_id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropSample(uint64_t work_id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AnswerDrainWhenIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Steps that run alone (engine_ops.cc). They complete the work themselves.

  void RunOptim(uint64_t work_id, const OptimStepRequest& request);
  void RunSave(uint64_t work_id, const SaveCheckpointRequest& request);
  void RunLoad(uint64_t work_id, const LoadCheckpointRequest& request);
  void InstallCheckpoint(uint64_t work_id, const LoadCheckpointRequest& request,
                         absl::StatusOr<LoadedCheckpoint> loaded);
  // True when the work's adapter was deleted while it ran.
  [[nodiscard]] bool IsOrphaned(uint64_t work_id);
  // After a load: numbers go on from the checkpoint's, for the work that waits
  // as for the replay table.
  void RestartNumbers(uint64_t work_id, const std::string& adapter_id,
                      uint64_t last_step);
  void RunPublishSnapshot(uint64_t work_id,
                          const PublishSnapshotRequest& request);
  // The largest rank that an adapter of this model would have.
  [[nodiscard]] int MaxRank(const LoraConfig& config) const;

  // Moves between device, host and disk (engine_residency.cc); engine thread.

  // Runs when there is room on the device, or with the error that says why
  // there will be none.
  using RoomTask = std::function<void(const absl::Status&)>;

  void WantAdapter(const std::string& adapter_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  [[nodiscard]] sched::Demand DemandOf(const std::string& adapter_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<sched::Move> NextMove() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Once the adapter is on the device, if it exists; at once if it is.
  void WhenOnDevice(const std::string& adapter_id, RoomTask task);
  void RunMove(const sched::Move& move);
  void MoveToHost(const sched::Move& move);
  void MoveToDisk(const sched::Move& move);
  void MoveFromHost(const sched::Move& move);
  void MoveFromDisk(const sched::Move& move);
  void FinishMove(const sched::Move& move, uint64_t bytes,
                  const absl::Status& status);
  // Fails what waits for it, and gives back the tasks to tell.
  [[nodiscard]] std::vector<RoomTask> DropWaiter(
      const sched::SlotWaiter& waiter, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  [[nodiscard]] std::vector<RoomTask> TakeTasks(const std::string& adapter_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RemoveSpillFile(std::string file);
  void ShowAdapters();

  // Once there is a slot for a new adapter, which the task then has to use or
  // return; at once with an error when there can be none.
  void WhenSlot(const CreateAdapterRequest& request, RoomTask task);
  void LoadWhenRoom(const LoadCheckpointRequest& request,
                    const Callback<AdapterInfo>& done);
  // Makes the adapter of a checkpoint in the slot that it was given.
  void FinishLoad(const LoadCheckpointRequest& request,
                  absl::StatusOr<LoadedCheckpoint> loaded,
                  const Callback<AdapterInfo>& done);
  // Creates an adapter once there is room for it. `state` empty: a fresh one.
  void CreateWhenRoom(CreateAdapterRequest request,
                      std::optional<lora::AdapterState> state,
                      uint64_t last_step, Callback<AdapterInfo> done);
  // Creates an adapter in the slot that it was given.
  absl::StatusOr<AdapterInfo> Create(const CreateAdapterRequest& request,
                                     const lora::AdapterState* state,
                                     uint64_t last_step);

  EngineParts parts_;
  EngineProbe probe_;
  group::Group group_;
  AdapterTable adapters_;
  AdapterIo adapter_io_;
  TrainRunner train_runner_;
  SampleLoop sample_loop_;
  std::unordered_map<uint64_t, TrainProgress> progress_;  // Engine thread.
  absl::Time last_ping_ = absl::InfinitePast();           // Likewise.

  mutable Mutex mu_;
  CondVar changed_;
  sched::Scheduler scheduler_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, ReplayTable> replays_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<uint64_t, std::unique_ptr<StepWork>> steps_
      ABSL_GUARDED_BY(mu_);
  std::unordered_map<uint64_t, std::unique_ptr<SampleWork>> samples_
      ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> cancelled_samples_ ABSL_GUARDED_BY(mu_);
  sched::Residency residency_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, absl::Time> wanted_at_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::vector<RoomTask>> adapter_tasks_
      ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, RoomTask> slot_tasks_ ABSL_GUARDED_BY(mu_);  // By ticket.
  std::deque<std::function<void()>> control_ ABSL_GUARDED_BY(mu_);
  std::vector<Callback<bool>> drain_waiters_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  int64_t pending_io_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // Declared last: they stop first.
  Worker completions_;
  Worker io_;
  std::thread thread_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_IMPL_H_
