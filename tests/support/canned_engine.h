// An Engine without a model: the real dispatcher, an engine thread, an I/O
// thread and a reply thread, and canned results (canned_results.h) instead of
// computed ones. For tests of the server and of the clients.
//
// The real dispatcher handles order of steps, replays, gaps, deadlines,
// cancellation, drain, and moves of adapters. A test may refuse calls, hold
// work and stop the heartbeat.
#ifndef WEFT_TESTS_SUPPORT_CANNED_ENGINE_H_
#define WEFT_TESTS_SUPPORT_CANNED_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "prometheus/registry.h"
#include "src/base/clock.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"
#include "src/dispatch/dispatcher.h"
#include "src/engine/device/engine_profile.h"
#include "src/engine/engine.h"
#include "tests/support/canned_adapters.h"
#include "tests/support/canned_results.h"

namespace weft {

class CannedEngine final : public engine::Engine {
 public:
  // An RPC's name, and its step number or 0 if the RPC has no step number.
  using Call = std::pair<std::string, uint64_t>;

  explicit CannedEngine(EngineInfo info = CannedInfo());
  ~CannedEngine() override;

  // Change the info only before the first call.
  EngineInfo* mutable_info() { return &info_; }

  // Refuses the next call of this RPC, or of any RPC if the name is empty.
  // Refusals queue, and a call gets the first refusal that fits.
  void FailNext(absl::Status status, std::string rpc = "");
  // Fails the next step of this RPC that runs, or the next sample from a
  // checkpoint.
  void FailNextRun(absl::Status status, std::string rpc);
  // Sets the notes, as if an earlier process had left them.
  void SetNotes(Notes notes);
  // Sets the files that the next export sends.
  void ExportNext(PeftFiles files);
  // Between Hold and Release, the engine thread does no work.
  void Hold();
  void Release();
  // Sets the result of ReplayBytes.
  void SetReplayBytes(int64_t bytes) { replay_bytes_ = bytes; }
  // Stops the heartbeat at `since`, or starts it again if `since` is nullopt.
  void HangSince(std::optional<absl::Time> since);
  // Between the two, downloads of checkpoints get no answer.
  void HoldDownloads();
  void ReleaseDownloads();
  void FailForGood(absl::Status status);
  // Sets who has the other logs and their adapters, by number and by name.
  void SetOwners(std::map<int, std::string> logs,
                 std::map<std::string, std::string> adapters);
  // Sets the result of ChooseSampler.
  void SetSampler(std::string address);
  // Sets the unit that is on its way to another log.
  void SetHeld(const std::string& unit);
  // Sets what the other logs have agreed on, whatever its name.
  void SetAgreed(std::string bytes);

  // What the engine has been asked for and has done.
  struct Seen {
    // The calls of Train, OptimStep and Sample without an answer, and those
    // whose answer was CANCELLED.
    size_t num_waiting = 0;
    size_t num_cancelled = 0;
    // The calls in the order of arrival, including refused ones, and the steps
    // in the order in which they ran.
    std::vector<Call> arrived;
    std::vector<Call> applied;
    // The request of the last call of each kind.
    TrainRequest last_train;
    OptimStepRequest last_optim;
    SampleRequest last_sample;
    // The thread of the last call of Train.
    std::thread::id train_thread;
  };
  Seen seen() const;

  const EngineInfo& info() const override { return info_; }
  CancelHandle Submit(StepRequest request, KeepStep keep,
                      StepCallback done) override;
  // No step is on disk.
  std::vector<KeptStep> TakeResumed() override { return {}; }
  int64_t ReplayBytes(const TrainRequest& /*request*/) const override {
    return replay_bytes_;
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
  // Says that the adapter is there already.
  void MoveAdapter(MoveAdapterRequest request, Callback<bool> done) override;
  void ListCheckpoints(std::string adapter_id,
                       Callback<std::vector<CheckpointInfo>> done) override;
  void DeleteCheckpoint(std::string adapter_id, std::string name,
                        Callback<bool> done) override;
  void SetCheckpointTtl(SetCheckpointTtlRequest request,
                        Callback<CheckpointInfo> done) override;
  void Retrieve(std::string adapter_id, uint64_t step,
                Callback<StepResultPtr> done) override {
    dispatcher_.steps().Retrieve(adapter_id, step, std::move(done));
  }
  void PutNote(const std::string& name, std::string value,
               std::function<void(const absl::Status&)> done) override;
  void EraseNote(const std::string& name) override;
  Notes NotesWith(const std::string& prefix) const override;
  std::string OwnerOf(const std::string& adapter_id) const override;
  std::string ChooseSampler() override;
  void FindOwner(const std::string& unit, int home,
                 Callback<std::string> done) override;
  absl::Status CheckHeld(const std::string& unit) const override;
  void Agree(const std::string& name, const std::string& bytes,
             Callback<std::string> done) override;
  void ReleaseSnapshot(ReleaseSnapshotRequest request,
                       Callback<bool> done) override;
  void DownloadCheckpoint(std::string adapter_id, std::string name,
                          Callback<std::vector<FileSource>> done) override;
  void UploadCheckpoint(UploadCheckpointRequest request,
                        Callback<CheckpointInfo> done) override;
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
  void ExcuseRunning() override {}
  absl::Time last_heartbeat() const override;

 private:
  // Refusals with the RPC's name. An empty name fits every RPC.
  using Refusals = std::deque<std::pair<std::string, absl::Status>>;

  // A running sample.
  struct Running {
    dispatch::SampleTask task;
    SampleResult result;
    int position = 0;
  };

  // Records the call. If it is refused, answers `done` and returns false.
  template <typename Result>
  bool Admit(const char* rpc, uint64_t step, const Callback<Result>& done);
  // If the server drains, answers `done` with UNAVAILABLE and returns false.
  template <typename Result>
  bool CheckOpen(const Callback<Result>& done) const;
  // Removes and returns the first refusal that fits `rpc`, or returns OK.
  static absl::Status Take(Refusals& refusals, const std::string& rpc);
  // Counts the call in num_waiting until the call is answered.
  template <typename... Args>
  std::function<void(Args...)> Counted(std::function<void(Args...)> done);
  // Keeps the request for last_train and last_optim.
  void Keep(const StepRequest& request);
  static const char* RpcOf(const StepRequest& request);

  // Draws the base model's canned tokens if there is such a checkpoint.
  void SampleFrom(SampleRequest request,
                  std::function<void(SampleDelta)> on_delta,
                  Callback<SampleResult> done);

  // The engine thread runs the functions below.
  void Loop();
  std::optional<dispatch::Work> NextWork();
  void Run(dispatch::Work& work);
  void RunBatch(const dispatch::RunTrain& train);
  void Decode();
  void Draw(Running& running);
  // Records the step. If it must fail, ends it and returns false.
  bool Start(const StepTask& step);

  EngineInfo info_;
  std::atomic<int64_t> replay_bytes_{0};
  prometheus::Registry registry_;
  dispatch::DispatchMetrics metrics_;
  const RealClock clock_;
  dispatch::Dispatcher dispatcher_;
  CannedAdapters adapters_;
  std::vector<Running> running_;  // Used by the engine thread.
  engine::EngineProfile profile_{&io_, &replies_};

  mutable Mutex mu_;
  CondVar changed_;
  Refusals refusals_ ABSL_GUARDED_BY(mu_);
  Refusals run_failures_ ABSL_GUARDED_BY(mu_);
  std::optional<PeftFiles> next_export_ ABSL_GUARDED_BY(mu_);
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  // Set between HoldDownloads and ReleaseDownloads.
  std::optional<std::vector<std::function<void()>>> downloads_
      ABSL_GUARDED_BY(mu_);
  bool parked_ ABSL_GUARDED_BY(mu_) = false;  // Hold has stopped the engine
                                              // thread.
  Seen seen_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  absl::Time heartbeat_ ABSL_GUARDED_BY(mu_) = clock_.Now();
  std::optional<absl::Time> hangs_since_ ABSL_GUARDED_BY(mu_);
  Notes notes_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::string> log_owners_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::string> adapter_owners_ ABSL_GUARDED_BY(mu_);
  std::string sampler_ ABSL_GUARDED_BY(mu_);
  std::string held_unit_ ABSL_GUARDED_BY(mu_);
  std::string agreed_ ABSL_GUARDED_BY(mu_);

  // The workers are declared last, so that they stop first.
  Worker replies_;
  Worker io_;
  std::thread thread_;
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_CANNED_ENGINE_H_
