// Applies the records of the log, one after another. The replay and clients'
// work take turns on the engine thread. A turn of the replay applies records
// until one of them needs the device. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_RECOVERY_LOG_REPLAY_H_
#define WEFT_SRC_ENGINE_RECOVERY_LOG_REPLAY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/observe/progress.h"
#include "src/dispatch/work.h"
#include "src/engine/adapters/adapter_manager.h"
#include "src/engine/engine_context.h"
#include "src/engine/recovery/snapshotter.h"
#include "src/engine/train/batch_trainer.h"
#include "src/engine/train/step_executor.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "src/log/state.h"
#include "src/request/adapter_key.h"

namespace weft::engine {

// Reports what a recovery has found and done.
struct RecoveryReport {
  log::LogSummary log;
  uint64_t adapters = 0;       // Adapters restored, even if removed later.
  uint64_t mismatches = 0;     // Optimizer steps that differ from the log.
  absl::Duration device_time;  // Time of the batches, steps and loads replayed.
};

// The moves that the log has begun and not ended.
struct OpenMoves {
  std::map<std::string, log::MoveRecord> leaving;  // By units.
  std::map<std::string, log::ArrivingRecord> arriving;
};

class LogReplay {
 public:
  using Resume = std::function<void(log::AcceptedRecord&)>;
  using ResumeMoves = std::function<void(OpenMoves)>;

  // The objects behind the pointers outlive this object. `settings` are the
  // settings of this process, in the form of a SettingsRecord. `resume` runs a
  // step that was accepted and has not ended. `resume_moves` ends the moves,
  // after which clients may use their adapters.
  LogReplay(const EngineContext* context, AdapterManager* manager,
            BatchTrainer* trainer, StepExecutor* steps, Snapshotter* snapshots,
            std::string settings, Resume resume, ResumeMoves resume_moves,
            RecoveryReport* report)
      : context_(*context),
        manager_(*manager),
        trainer_(*trainer),
        steps_(*steps),
        snapshots_(*snapshots),
        settings_(std::move(settings)),
        resume_(std::move(resume)),
        resume_moves_(std::move(resume_moves)),
        report_(*report) {}

  // Replays the reader's records before report->log.next_sequence. `accepted`
  // are those of the snapshot. When the log is at its end, resumes all steps
  // that were accepted and have not ended. Then, or after the first error, runs
  // `done` with the status.
  void Start(std::unique_ptr<log::LogReader> reader,
             std::vector<log::AcceptedRecord> accepted,
             std::function<void(const absl::Status&)> done);

 private:
  using Next = std::function<void(const absl::Status&)>;

  // Goes on to the next record, in this turn or in a new one.
  void Advance();
  void RunTurn();
  void ReadRecord();
  // If the status says that the store does not answer, runs `again` when it
  // does, otherwise `next` with the status.
  void Pass(const absl::Status& status, const std::function<void()>& again,
            const Next& next);
  void ApplyRecord(const log::LogReader::Record& bytes);
  // Lets clients use the adapters whose last record has this sequence number.
  // But an adapter that has accepted steps waits for the end of the replay:
  // their teachers may be other adapters.
  void EndRecord(uint64_t sequence);
  bool HasAccepted(const std::string& adapter_id) const;
  bool IsMoving(const std::string& adapter_id) const;
  // Begins the request of a batch, if it was accepted and has not begun.
  void BeginAccepted(uint64_t work);
  void ResumeSteps();
  void Finish(const absl::Status& status);

  void Apply(log::StoredAdapter& adapter, const Next& next);
  void Apply(log::RemovedRecord& removed, const Next& next);
  void Apply(log::BeginRecord& begin, const Next& next);
  void Apply(log::AcceptedRecord& accepted, const Next& next);
  void Apply(log::GivenUpRecord& given_up, const Next& next);
  void Apply(log::BatchRecord& batch, const Next& next);
  void Apply(log::DoneRecord& done, const Next& next);
  void Apply(log::LoadedRecord& loaded, const Next& next);
  void Apply(log::ReleaseRecord& release, const Next& next);
  void Apply(log::SettingsRecord& record, const Next& next);
  void Apply(log::NoteRecord& note, const Next& next);
  void Apply(log::ArrivingRecord& arriving, const Next& next);
  void Apply(log::MoveRecord& move, const Next& next);
  // Applies the records of arrived adapters from the last to the first.
  void Arrive(std::vector<log::StoredAdapter> adapters, const Next& next);

  absl::Status RunBatch(const log::BatchRecord& batch);
  absl::Status RunAgain(const log::DoneRecord& done);
  std::string NameOf(AdapterKey key) const;
  // Brings these adapters to the device and runs `body`. Then runs `next` with
  // the status of `body`. If an adapter cannot come to the device, runs only
  // `next`, with the error.
  void WithAdapters(const std::vector<AdapterKey>& keys,
                    const std::function<absl::Status()>& body,
                    const Next& next);
  void BringIn(const std::vector<AdapterKey>& keys, size_t first,
               const Next& ready);
  // Gets the teachers of the batch that are in the store.
  void FetchTeachers(const log::BatchRecord& batch, size_t first,
                     const Next& ready);

  const EngineContext& context_;
  AdapterManager& manager_;
  BatchTrainer& trainer_;
  StepExecutor& steps_;
  Snapshotter& snapshots_;
  const std::string settings_;
  const Resume resume_;
  const ResumeMoves resume_moves_;
  std::string other_settings_;  // The log's settings in the last warning.
  RecoveryReport& report_;
  std::function<void(const absl::Status&)> done_;
  std::unique_ptr<log::LogReader> reader_;
  // Maps the sequence number of an adapter's last record to the adapter's id.
  std::multimap<uint64_t, std::string> last_records_;
  bool in_turn_ = false;      // RunTurn is running.
  bool advances_ = false;     // The turn's latest record is done.
  bool used_device_ = false;  // A record of this turn used the device.
  struct Begun {
    StepTask step;
    bool between_slices = false;  // The request's gradients are on the device.
  };
  using BegunRequests = std::map<uint64_t, Begun>;

  void GiveUp(BegunRequests::iterator begun);
  void GiveUpIf(const std::function<bool(AdapterKey)>& applies);
  // Lets the adapter leave the device, unless one of its requests is between
  // two slices (parts in micro-batches).
  void Unpin(AdapterKey key);

  // Requests that have begun and not ended, by BeginRecord::work.
  BegunRequests begun_;
  // Accepted steps that have not ended, by AcceptedRecord::work. Those that
  // have begun are in begun_, too.
  std::map<uint64_t, log::AcceptedRecord> accepted_;
  OpenMoves moves_;
  std::vector<std::string> late_;  // Adapters that wait for the end.
  std::unique_ptr<Progress> progress_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_LOG_REPLAY_H_
