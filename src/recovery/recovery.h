// Restores the state folder: first the adapters of the newest snapshot, then
// all later changes in the order of the log.
//
// Recovery runs on the engine thread as a chain of tasks, one record after
// another, so that adapters move to and from the device as usual. Nothing else
// uses the dispatcher during it.
//
// If the folder is damaged, the start fails and names the adapters that are hit
// (records/damage.h). Those that the operator gives up are left out, and their
// files are set aside. Then micro-batches that they shared run without them, so
// others' numbers may have other last bits.
//
// A step that runs again must end as it did, otherwise the start fails. Its
// results are compared with the recorded ones. With the same build, processor
// and settings they have the same bits, except from CUDA kernels that are not
// deterministic. A difference is logged as a warning and counted in
// RecoveryReport.
#ifndef WEFT_SRC_RECOVERY_RECOVERY_H_
#define WEFT_SRC_RECOVERY_RECOVERY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "src/adapters/adapter_manager.h"
#include "src/adapters/engine_context.h"
#include "src/base/progress.h"
#include "src/dispatch/work.h"
#include "src/journal/log_reader.h"
#include "src/journal/state_folder.h"
#include "src/lora/adapter.h"
#include "src/records/damage.h"
#include "src/records/record.h"
#include "src/records/recorder.h"
#include "src/records/restore_points.h"
#include "src/recovery/snapshotter.h"
#include "src/request/adapter_key.h"
#include "src/train/batch_trainer.h"
#include "src/train/step_executor.h"

namespace weft::engine {

struct RecoveryReport {
  uint64_t adapters = 0;
  uint64_t records = 0;
  uint64_t mismatches = 0;  // Number of results that differ.
  uint64_t torn_bytes = 0;  // Bytes cut off the log's end; no client got a
                            // reply for them.
  uint64_t log_bytes = 0;   // Read.
  uint64_t next_sequence = 0;
  // Requests that had begun but not completed when the process ended.
  std::vector<uint64_t> given_up;
  records::Marks marks;             // All adapters at the log's end.
  records::RestorePoints restores;  // Adapters that the caller loads.
  // If true, the folder needs a new snapshot, because the log has a hole or
  // names an adapter that was set aside.
  bool damaged = false;
  uint64_t thinned = 0;  // Batches that ran without an adapter set aside.
};

class Recovery {
 public:
  // The arguments outlive the object. `settings` are those of this process
  // (SettingsRecord).
  Recovery(const EngineContext* context, AdapterManager* manager,
           BatchTrainer* trainer, StepExecutor* steps, Snapshotter* snapshots,
           std::string settings)
      : context_(*context),
        manager_(*manager),
        trainer_(*trainer),
        steps_(*steps),
        snapshots_(*snapshots),
        settings_(std::move(settings)) {}

  // Posts the first task. `done` runs once, on the engine thread. Errors:
  // DATA_LOSS, naming what is damaged.
  void Start(std::function<void(absl::StatusOr<RecoveryReport>)> done);

 private:
  using Next = std::function<void(const absl::Status&)>;

  // Looks for damage, and sets aside the adapters that the operator gives up.
  [[nodiscard]] absl::Status CheckFolder();
  [[nodiscard]] absl::Status SetAside(const records::Damage& damage);
  [[nodiscard]] absl::Status ReadSnapshot();
  // Restores an adapter whose tensors are in an image.
  [[nodiscard]] absl::Status Restore(const records::AdapterRecord& adapter);
  // Reads the next record. The chain continues when Apply calls `next`.
  void Advance();
  // Goes on behind a hole of the log.
  [[nodiscard]] absl::Status PassHole();
  void ApplyRecord(const journal::LogReader::Record& bytes);
  // Notes that the record with this sequence changes the adapter.
  void Note(AdapterKey key, uint64_t sequence);
  void Finish(const absl::Status& status);
  [[nodiscard]] absl::Status FinishLog();

  void Apply(records::AdapterRecord& adapter, const Next& next);
  void Apply(records::RemovedRecord& removed, const Next& next);
  void Apply(records::BeginRecord& begin, const Next& next);
  void Apply(records::GivenUpRecord& given_up, const Next& next);
  void Apply(records::BatchRecord& batch, const Next& next);
  void Apply(records::DoneRecord& done, const Next& next);
  void Apply(records::LoadedRecord& loaded, const Next& next);
  void Apply(records::ReleaseRecord& release, const Next& next);
  void Apply(records::SettingsRecord& record, const Next& next);

  [[nodiscard]] absl::Status RunBatch(const records::BatchRecord& batch);
  [[nodiscard]] absl::Status RunAgain(const records::DoneRecord& done);
  [[nodiscard]] absl::StatusOr<lora::AdapterState> ReadLoaded(
      const records::LoadedRecord& loaded, const lora::Adapter& adapter) const;
  [[nodiscard]] absl::Status Install(const records::LoadedRecord& loaded,
                                     const lora::AdapterState& state);
  [[nodiscard]] std::string NameOf(AdapterKey key) const;
  // Returns FAILED_PRECONDITION if these adapters and the pinned ones do not
  // all fit on the device.
  [[nodiscard]] absl::Status CheckSlots(
      const std::vector<AdapterKey>& keys) const;
  // Brings these adapters to the device, runs `body`, then `next`.
  void WithAdapters(const std::vector<AdapterKey>& keys,
                    const std::function<absl::Status()>& body,
                    const Next& next);
  void BringIn(const std::vector<AdapterKey>& keys, size_t first,
               const Next& ready);

  const EngineContext& context_;
  AdapterManager& manager_;
  BatchTrainer& trainer_;
  StepExecutor& steps_;
  Snapshotter& snapshots_;
  const std::string settings_;
  std::string other_settings_;  // Settings about which a warning was logged.
  std::function<void(absl::StatusOr<RecoveryReport>)> done_;
  std::optional<journal::LogReader> reader_;
  std::set<AdapterKey> skipped_;  // Adapters whose records are left out.
  RecoveryReport report_;
  struct Begun {
    dispatch::StepTask step;
    bool between_slices = false;  // The request's gradients are on the device.
  };
  using BegunRequests = std::map<uint64_t, Begun>;

  void GiveUp(BegunRequests::iterator begun);
  // Unpins an adapter, which was pinned while its gradients were not complete.
  void Unpin(AdapterKey key);

  // Requests that have begun and not completed. Keys are their `work` in the
  // log.
  BegunRequests begun_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RECOVERY_RECOVERY_H_
