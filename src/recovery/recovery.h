// Restores the state folder: first the adapters of the newest snapshot, then
// all later changes in the order of the log.
//
// Recovery runs on the engine thread as a chain of tasks, one record after
// another, so that adapters move to and from the device as usual. It first
// reads the log to its end (log_summary.h). From then on clients may use an
// adapter when the replay has passed its last record. So records and clients
// never change the same adapters.
//
// If the folder is damaged, the start fails and names the adapters that are hit
// (records/damage.h). Those that the operator gives up are left out, and their
// files are set aside. Then micro-batches that they shared run without them, so
// others' numbers may have other last bits.
//
// A step that runs again must end as it did, otherwise recovery fails. With the
// same build, processor and settings its results have the same bits, except
// from CUDA kernels that are not deterministic. A difference is logged as a
// warning and counted in RecoveryReport.
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
#include "absl/synchronization/notification.h"
#include "src/adapters/adapter_manager.h"
#include "src/adapters/engine_context.h"
#include "src/base/progress.h"
#include "src/dispatch/work.h"
#include "src/journal/log_reader.h"
#include "src/journal/state_folder.h"
#include "src/lora/adapter.h"
#include "src/records/damage.h"
#include "src/records/record.h"
#include "src/records/restore_points.h"
#include "src/recovery/recovery_report.h"
#include "src/recovery/snapshotter.h"
#include "src/request/adapter_key.h"
#include "src/train/batch_trainer.h"
#include "src/train/step_executor.h"

namespace weft::engine {

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

  // Runs when the log is read, on the engine thread. Gets the error of reading,
  // DATA_LOSS, which names the damage. If it returns an error, nothing is
  // replayed.
  using Opened = std::function<absl::Status(const absl::Status& read)>;
  // The same when the log is replayed. Its error fails the recovery.
  using Replayed = std::function<absl::Status()>;
  // Posts the first task.
  void Start(Opened opened, Replayed replayed);

  // The fields `log` and `damaged` do not change after Opened, the others until
  // the end.
  [[nodiscard]] const RecoveryReport& report() const { return report_; }

  // Any thread may call the methods below.

  [[nodiscard]] bool ended() const { return ended_.HasBeenNotified(); }
  // Blocks until the end and returns the error.
  [[nodiscard]] absl::Status Wait() const;
  // Returns OK before the end.
  [[nodiscard]] absl::Status failure() const;

 private:
  using Next = std::function<void(const absl::Status&)>;

  // Reads everything and restores the adapters of the snapshot.
  [[nodiscard]] absl::Status Read();
  // Looks for damage, and sets aside the adapters that the operator gives up.
  [[nodiscard]] absl::Status CheckFolder();
  [[nodiscard]] absl::Status SetAside(const records::Damage& damage);
  [[nodiscard]] absl::Status RestoreSnapshot(const records::Snapshot& snapshot);
  // Restores an adapter whose tensors are in an image.
  [[nodiscard]] absl::Status Restore(const records::AdapterRecord& adapter);
  // Reads the next record. The chain continues when Apply calls `next`.
  void Advance();
  // Goes on behind a hole of the log.
  [[nodiscard]] absl::Status SkipHole();
  void ApplyRecord(const journal::LogReader::Record& bytes);
  // Lets clients use the adapters whose last record has this sequence.
  void EndRecord(uint64_t sequence);
  void Finish(absl::Status status);

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
  Opened opened_;
  Replayed replayed_;
  std::optional<journal::LogReader> reader_;
  std::set<AdapterKey> skipped_;  // Adapters whose records are left out.
  // Adapters of durability checkpoint at the present place of the log.
  records::RestorePoints restores_;
  // The ids of adapters to make ready, by their last records.
  std::multimap<uint64_t, std::string> last_records_;
  RecoveryReport report_;
  absl::Status status_;  // Set before ended_ is notified.
  absl::Notification ended_;
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
