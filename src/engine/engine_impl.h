// The engine: methods that any thread may call, and one thread that owns the
// device.
//
// A method passes its request on, usually to the dispatcher, and returns. The
// engine thread asks the dispatcher for work, runs it, and gives the result
// back to the dispatcher. The I/O thread reads and writes files. The reply
// thread runs callbacks.
#ifndef WEFT_SRC_ENGINE_ENGINE_IMPL_H_
#define WEFT_SRC_ENGINE_ENGINE_IMPL_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/base/files/disk_room.h"
#include "src/base/files/spill_folder.h"
#include "src/base/options/options.h"
#include "src/base/threads/worker.h"
#include "src/checkpoint/checkpoint_files.h"
#include "src/directory/directory.h"
#include "src/dispatch/dispatcher.h"
#include "src/engine/adapters/adapter_io.h"
#include "src/engine/adapters/adapter_manager.h"
#include "src/engine/adapters/adapter_mover.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/decode/sample_loop.h"
#include "src/engine/decode/sample_runner.h"
#include "src/engine/device/compute_device.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/device/engine_probe.h"
#include "src/engine/device/engine_profile.h"
#include "src/engine/engine.h"
#include "src/engine/engine_context.h"
#include "src/engine/moves/moves.h"
#include "src/engine/recovery/recovery.h"
#include "src/engine/recovery/snapshotter.h"
#include "src/engine/samplers/samplers.h"
#include "src/engine/start/memory_metrics.h"
#include "src/engine/start/memory_split.h"
#include "src/engine/start/open_state.h"
#include "src/engine/store_wait.h"
#include "src/engine/train/batch_trainer.h"
#include "src/engine/train/step_executor.h"
#include "src/executor/executor.h"
#include "src/log/bucket/members.h"
#include "src/log/log_writer.h"
#include "src/log/recorder.h"
#include "src/log/running_steps.h"
#include "src/log/state.h"
#include "src/lora/checkpoint_fields.h"
#include "src/model/decoder.h"
#include "src/request/engine_info.h"
#include "src/sampling/stop_matcher.h"

namespace weft::engine {

// What StartEngine loads and passes to the engine.
struct EngineParts {
  EngineOptions options;
  EngineInfo info;
  parallel::Links links;  // The communicators of rank 0.
  std::unique_ptr<ComputeDevice> device;
  std::unique_ptr<model::Decoder> decoder;
  // Null if the model's tokenizer files do not give the bytes of tokens.
  std::unique_ptr<sampling::TokenBytes> token_bytes;
  lora::BaseModel base;
  std::unique_ptr<DiskMetrics> disks;
  std::unique_ptr<SpillFolder> spill;
  std::optional<MemorySplit> memory;  // Set on CUDA only.
  // Null without --state-dir and --state.
  std::unique_ptr<BucketMetrics> bucket_metrics;
  std::unique_ptr<log::State> state;
  std::unique_ptr<directory::Directory> directory;  // Null without --state.
  std::unique_ptr<log::Members> members;            // Null without --state.
  std::unique_ptr<log::RunningSteps> running;
  std::unique_ptr<checkpoint::CheckpointFiles> checkpoints;
};

class EngineImpl final : public Engine {
 public:
  EngineImpl(EngineParts parts, prometheus::Registry* registry);
  ~EngineImpl() override;

  // Restores the state in --state-dir and records changes from then on. Does
  // nothing without --state-dir. Call it before any other method. Returns when
  // clients may use the engine; adapters may become ready later (recovery.h).
  // Errors, among others: DATA_LOSS (damaged files).
  absl::Status Recover();

  const EngineInfo& info() const override { return parts_.info; }

  CancelHandle Submit(StepRequest request, KeepStep keep,
                      StepCallback done) override;
  std::vector<KeptStep> TakeResumed() override {
    MutexLock lock(&resumed_mu_);
    return std::exchange(resumed_, {});
  }
  int64_t ReplayBytes(const TrainRequest& request) const override {
    return sample_records_.ReplayBytes(request);
  }
  uint64_t Ahead(const std::string& adapter_id, uint64_t step) const override {
    return dispatcher_.adapters().Ahead(adapter_id, step);
  }
  CancelHandle Sample(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done) override;
  void CreateAdapter(CreateAdapterRequest request,
                     Callback<AdapterInfo> done) override;
  void GetAdapter(std::string adapter_id, Callback<AdapterInfo> done) override;
  void ListAdapters(ListAdaptersRequest request,
                    Callback<AdapterPage> done) override;
  void ReportMetrics(MetricReport report, Callback<bool> done) override;
  size_t num_adapters() const override;
  Activity activity(const ActivityQuery& query) const override;
  void DeleteAdapter(std::string adapter_id, Callback<bool> done) override;
  void MoveAdapter(MoveAdapterRequest request, Callback<bool> done) override;
  void ListCheckpoints(std::string adapter_id,
                       Callback<std::vector<CheckpointInfo>> done) override;
  void DeleteCheckpoint(std::string adapter_id, std::string name,
                        Callback<bool> done) override;
  void SetCheckpointTtl(SetCheckpointTtlRequest request,
                        Callback<CheckpointInfo> done) override;
  void DownloadCheckpoint(std::string adapter_id, std::string name,
                          Callback<std::vector<FileSource>> done) override;
  void UploadCheckpoint(UploadCheckpointRequest request,
                        Callback<CheckpointInfo> done) override;
  void Retrieve(std::string adapter_id, uint64_t step,
                Callback<StepResultPtr> done) override;
  void PutNote(const std::string& name, std::string value,
               std::function<void(const absl::Status&)> done) override;
  void EraseNote(const std::string& name) override;
  Notes NotesWith(const std::string& prefix) const override {
    return recorder_.NotesWith(prefix);
  }
  std::string OwnerOf(const std::string& adapter_id) const override;
  std::string ChooseSampler() override;
  void FindOwner(const std::string& unit, int home,
                 Callback<std::string> done) override;
  absl::Status CheckHeld(const std::string& unit) const override {
    return dispatcher_.adapters().CheckReady(unit);
  }
  void Agree(const std::string& name, const std::string& bytes,
             Callback<std::string> done) override;
  void ReleaseSnapshot(ReleaseSnapshotRequest request,
                       Callback<bool> done) override;
  void ExportAdapter(ExportAdapterRequest request,
                     Callback<PeftFiles> done) override;
  void ImportAdapter(ImportAdapterRequest request,
                     Callback<AdapterInfo> done) override;
  CancelHandle Profile(const ProfileRequest& request,
                       Callback<std::string> done) override;
  void Drain(Callback<bool> done) override;
  void Finish(Callback<bool> done) override;
  void Undrain() override;
  void DrainLog(Callback<bool> done) override;
  void WriteSnapshot(Callback<bool> done) override;
  absl::Status failure() const override;
  void ExcuseRunning() override;
  absl::Time last_heartbeat() const override { return probe_.last_heartbeat(); }

 private:
  // Tells other processes whether this one takes samples.
  void SetTakesSamples(bool takes);
  // Sets what only this object knows of parts_.info.
  void FillInfo();
  // Ends all threads of the engine, after their last tasks. Only the destructor
  // calls it.
  void Stop();
  // Returns true if the adapter exists and clients may use it. Otherwise gives
  // the error to `done`. If there is no such adapter, the error lists its
  // checkpoints.
  template <typename Result>
  bool Finds(const std::string& adapter_id, const Callback<Result>& done) const;
  // Returns true if the engine is open. Otherwise gives the error to `done`.
  template <typename Result>
  bool IsOpenFor(const Callback<Result>& done) const;
  // Like IsOpenFor, but also refuses if the log has no room for new work.
  template <typename Result>
  bool Admit(const Callback<Result>& done) const;
  // Runs `work` on the I/O thread, and gives its result to `done`.
  template <typename Result, typename Work>
  void RunOnDisk(const std::string& adapter_id, Callback<Result> done,
                 Work work);
  // Unless the call repeats a step, does what CheckSuspect does, and what
  // SampleRecords::Replay does. Any thread may call the two.
  absl::Status CheckStep(StepRequest* request, bool* alone);
  // Returns FAILED_PRECONDITION if the step has ended several processes. Sets
  // `alone` if it must share no micro-batch, so that nothing else is a suspect.
  absl::Status CheckSuspect(AdapterKey key, uint64_t step,
                            const std::string& digest, bool* alone);

  // The engine thread calls the methods below.

  void Loop();
  // Waits for work, but not for longer than a snapshot or a move can.
  std::optional<dispatch::Work> NextWork();
  // Runs a kept step of an earlier process.
  void Resume(log::AcceptedRecord& step);
  void Run(dispatch::Work& work);
  // If the process ends before Run returns, the step becomes a suspect.
  void NoteRunning(const StepTask& step);
  void MeterDeviceMemory();

  EngineParts parts_;
  EngineProbe probe_;
  dispatch::DispatchMetrics dispatch_metrics_;
  const RealClock clock_;
  SampleRecords sample_records_;
  executor::Executor executor_;
  ComputeGuard guard_;
  AdapterTable adapters_;
  AdapterIo adapter_io_;
  SampleLoop sample_loop_;
  dispatch::Dispatcher dispatcher_;
  StoreWait store_wait_;
  const EngineContext context_;
  AdapterMover mover_;
  BatchTrainer trainer_;
  StepExecutor step_executor_;
  SampleRunner sample_runner_;
  AdapterManager manager_;
  Samplers samplers_;
  Snapshotter snapshots_;
  Moves moves_;
  Recovery recovery_;
  std::optional<log::LogMetrics> log_metrics_;
  EngineProfile profile_{&io_, &replies_};
  Mutex resumed_mu_;
  std::vector<KeptStep> resumed_ ABSL_GUARDED_BY(resumed_mu_);
  // Stop() ends what runs on these threads before any member is destroyed.
  Worker replies_;
  log::Recorder recorder_;
  Worker io_;
  std::thread thread_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_IMPL_H_
