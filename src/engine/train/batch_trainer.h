// Runs training micro-batches and gives the results to the requests. A
// micro-batch consists of slices; each slice is consecutive data of a request.
#ifndef WEFT_SRC_ENGINE_TRAIN_BATCH_TRAINER_H_
#define WEFT_SRC_ENGINE_TRAIN_BATCH_TRAINER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/dispatch/work.h"
#include "src/engine/adapters/adapter_mover.h"
#include "src/engine/engine_context.h"
#include "src/engine/train/teacher_finder.h"
#include "src/engine/train/train_runner.h"
#include "src/loss/token_losses.h"

namespace weft::engine {

// Threads: engine thread only.
class BatchTrainer {
 public:
  // `context`, `executor` and `mover` outlive the trainer.
  BatchTrainer(const EngineContext* context, executor::Executor* executor,
               const AdapterMover* mover);

  // Runs one micro-batch. Completes the requests that have their last slice in
  // it. On a GPU with GradientCheckpointing::kAuto, a micro-batch that runs out
  // of memory runs once more, with all layers recomputed. A micro-batch of
  // several slices that still runs out, or does not fit the memory budget with
  // the copies of its teachers, runs in parts. If a micro-batch or a part
  // fails, returns the error: all its requests fail, and their adapters stay as
  // they were. But if the custom loss of a request fails, only this request
  // does, and the others run again.
  absl::Status Run(const dispatch::RunTrain& train);
  // Drops the progress of a request that will not complete.
  void Forget(uint64_t step_id);

  // Returns whether the step needs a teacher that is in the store of --state.
  // Run gets it first and then runs the step, but not in a replay of the log.
  bool NeedsTeacher(const StepTask& step) const;
  // Gets this teacher (TeacherFinder::Fetch), for Run.
  void FetchTeacher(const StepTask& step,
                    const std::function<void(const absl::Status&)>& done);

 private:
  // The results that a request's finished slices have produced so far.
  struct Progress {
    TrainResult result;
    loss::MetricSums metrics;
    // The teacher, from the request's first slice on, so that all its data have
    // the same one. None if the loss has none.
    std::optional<FoundTeacher> teacher;
    lora::AdapterVersionPtr fetched;  // Of FetchTeacher.
  };
  // The slices of a micro-batch, ready to run.
  struct MicroBatch;

  // Fails the requests whose weights or teachers no longer exist, and lets wait
  // those that need a teacher from the store. Returns the slices of the other
  // requests.
  dispatch::RunTrain Runnable(const dispatch::RunTrain& train);
  // Runs slices of one adapter when the first one has its teacher.
  void RunWithTeacher(dispatch::RunTrain train);
  // Returns the weights with which a request runs; null for the base model
  // without an adapter. Errors: NOT_FOUND if the adapter no longer exists, or
  // lacks the snapshot that the request names.
  absl::StatusOr<lora::AdapterVersionPtr> VersionOf(const StepTask& step) const;
  // Finds the request's teacher if its loss has one and this is its first
  // slice. Errors: those of TeacherFinder::Find.
  absl::Status FindTeacher(const StepSlice& slice);
  MicroBatch MakeMicroBatch(const dispatch::RunTrain& train);
  // Why requests of a micro-batch failed by themselves.
  using Failures = std::map<const TrainRequest*, absl::Status>;
  // Sets *fits to whether there was memory for the slices together. If not, or
  // if requests have failed by themselves, gradients are as they were.
  absl::Status RunSlices(const dispatch::RunTrain& train, bool* fits,
                         Failures* failed);
  // Fails the requests that have failed by themselves. Returns the slices of
  // the others.
  dispatch::RunTrain Others(const dispatch::RunTrain& train,
                            const Failures& failed);
  // Runs the batch, and once more with all layers recomputed if that may help.
  // If there is no memory for it, sets *fits to false and undoes what the
  // attempts have left.
  absl::StatusOr<TrainOutcome> RunWithinMemory(MicroBatch& batch, bool* fits);
  // Runs the batch once. The backward pass adds gradients to each adapter's
  // scratch, which holds the gradients of an unfinished request.
  absl::StatusOr<TrainOutcome> TryBatch(MicroBatch& batch, Recompute recompute);
  // Puts the weights of the batch's teachers on the device, for this batch.
  void CopyTeachers(MicroBatch& batch) const;
  void FinishRequest(const StepTask& step);
  // Ends a request that has failed, and records the failure as its result.
  void Fail(const StepTask& step, const absl::Status& status);

  const EngineContext& context_;
  TeacherFinder teachers_;
  TrainRunner runner_;
  std::unordered_map<uint64_t, Progress> progress_;  // Keys: step id.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_BATCH_TRAINER_H_
