// A deterministic Engine in memory: adapters with steps, canned results,
// injected errors and delays. For tests of server/ and of the clients.
//
// Semantics it keeps: numbered steps are answered once and replayed when
// repeated with the same payload (ALREADY_EXISTS with another); a step that
// leaves a gap waits for its predecessors or its cancellation; Drain refuses
// new work. Results: logprob of a target t is -(t + 1) / 8, its loss -w times
// that; sample i draws the tokens (seed + i + position) mod vocabulary.
#ifndef WEFT_TESTS_SERVER_FAKE_ENGINE_H_
#define WEFT_TESTS_SERVER_FAKE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/mutex.h"
#include "src/engine/engine.h"

namespace weft {

class FakeEngine final : public Engine {
 public:
  FakeEngine();
  ~FakeEngine() override;

  // Set up before the first call.
  EngineInfo* mutable_info() { return &info_; }

  // The next call of any kind fails with this.
  void FailNext(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);

  // While held, Train, OptimStep and Sample wait; they end with CANCELLED when
  // cancelled. Release lets them run, in order of arrival.
  void Hold() ABSL_LOCKS_EXCLUDED(mu_);
  void Release() ABSL_LOCKS_EXCLUDED(mu_);
  // Calls that wait, held or for an earlier step.
  [[nodiscard]] size_t num_waiting() const ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] size_t num_cancelled() const ABSL_LOCKS_EXCLUDED(mu_);

  // What the last call of each kind was given.
  [[nodiscard]] TrainRequest last_train() const ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] OptimStepRequest last_optim() const ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] SampleRequest last_sample() const ABSL_LOCKS_EXCLUDED(mu_);

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
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
  CancelHandle PublishSnapshot(
      PublishSnapshotRequest request,
      Callback<StepReply<PublishedSnapshot>> done) override;
  void ReleaseSnapshot(ReleaseSnapshotRequest request,
                       Callback<bool> done) override;
  void ExportAdapter(ExportAdapterRequest request,
                     Callback<PeftFiles> done) override;
  void ImportAdapter(ImportAdapterRequest request,
                     Callback<AdapterInfo> done) override;
  void Drain(Callback<bool> done) override;
  // OK until FailForGood.
  [[nodiscard]] absl::Status failure() const override ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return lasting_failure_;
  }
  // The present, until HangSince.
  [[nodiscard]] absl::Time last_heartbeat() const override
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return hangs_since_.value_or(absl::Now());
  }
  // Its heartbeat stands still at that time, or beats again.
  void HangSince(std::optional<absl::Time> since) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    hangs_since_ = since;
  }
  void FailForGood(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    lasting_failure_ = std::move(status);
  }

 private:
  struct Adapter {
    AdapterInfo info;
    PeftFiles files;
    std::map<uint64_t, TrainRequest> train_payloads;
    std::map<uint64_t, TrainResult> train_replies;
    std::map<uint64_t, std::pair<AdamWConfig, OptimStepResult>> optim_replies;
  };
  // A call that waits: `run` answers it, `cancel` answers it with CANCELLED.
  struct Waiting {
    uint64_t id = 0;
    std::function<bool()> ready;
    std::function<void()> run;
    std::function<void()> cancel;
  };

  absl::Status TakeFailure() ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Adapter*> Find(const std::string& id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  CancelHandle Enqueue(Waiting waiting) ABSL_LOCKS_EXCLUDED(mu_);
  void RunReady() ABSL_LOCKS_EXCLUDED(mu_);
  bool IsTurn(const std::string& adapter_id, uint64_t step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<StepReply<TrainResult>> RunTrain(const TrainRequest& request)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<StepReply<OptimStepResult>> RunOptim(
      const OptimStepRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  SampleResult RunSample(const SampleRequest& request) const;

  EngineInfo info_;
  mutable Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  size_t num_cancelled_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Adapter> adapters_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, std::string>, CheckpointInfo> checkpoints_
      ABSL_GUARDED_BY(mu_);
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<Callback<bool>> drains_ ABSL_GUARDED_BY(mu_);
  absl::Status lasting_failure_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> hangs_since_ ABSL_GUARDED_BY(mu_);
  TrainRequest last_train_ ABSL_GUARDED_BY(mu_);
  OptimStepRequest last_optim_ ABSL_GUARDED_BY(mu_);
  SampleRequest last_sample_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_TESTS_SERVER_FAKE_ENGINE_H_
