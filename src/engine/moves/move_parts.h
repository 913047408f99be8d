// What the two sides of a move share. A unit, which is an adapter or a session
// with all its models (src/request/move_unit.h), moves from the log of one
// process to that of another through the store: neither calls the other.
//
//   sender (departure.h)                 receiver (arrival.h)
//   holds the unit: calls wait
//   record `leaving`, images
//   sends its record           ------->  finds it, checks the limits
//                                        copies the images
//                                        record `arriving`
//                                        takes the directory's entry
//   sees the other's entry               record `own`: calls go on here
//   record `left`: calls are
//   sent to the receiver
//
// Only one entry has the version in the first record. So of the receiver, which
// takes the entry, and the sender, which takes it back when it has waited for
// too long, one succeeds. A process that begins with an open move ends it so.
// What an earlier owner of a log does late fails: its records and its entries.
#ifndef WEFT_SRC_ENGINE_MOVES_MOVE_PARTS_H_
#define WEFT_SRC_ENGINE_MOVES_MOVE_PARTS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/observe/metrics.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_manager.h"
#include "src/engine/decode/sample_runner.h"
#include "src/engine/engine_context.h"
#include "src/engine/recovery/snapshotter.h"

namespace weft::engine {

// Counts the ends of moves.
struct MoveMetrics {
  enum Result { kLeft, kStayed, kArrived, kRefused, kDropped };
  explicit MoveMetrics(prometheus::Registry* registry);

  LabelledCounters results;
};

// Threads: engine thread.
class MoveParts {
 public:
  // All outlive the object. `context` has a directory.
  MoveParts(const EngineContext* context, AdapterManager* manager,
            Snapshotter* snapshots, SampleRunner* samples,
            prometheus::Registry* registry)
      : context_(*context),
        manager_(*manager),
        snapshots_(*snapshots),
        samples_(*samples),
        metrics_(registry) {}

  const EngineContext& context() const { return context_; }
  directory::Directory& directory() const { return *context_.directory; }
  AdapterManager& manager() const { return manager_; }
  Snapshotter& snapshots() const { return snapshots_; }
  SampleRunner& samples() const { return samples_; }
  void Count(MoveMetrics::Result result) {
    metrics_.results[result].Increment();
  }

  // Has calls for a unit with these adapters wait, also those that change its
  // notes, until Release. Errors: those of RecoveryDesk::Hold.
  absl::Status Hold(const std::string& unit,
                    const std::map<std::string, std::string>& tenants) const {
    WEFT_RETURN_IF_ERROR(context_.dispatcher.recovery().Hold(unit, tenants));
    context_.recorder.HoldNotes(unit);
    return absl::OkStatus();
  }
  void Release(const std::string& unit) const {
    context_.recorder.ReleaseNotes(unit);
    context_.dispatcher.recovery().Release(unit);
  }

  // While a move is open, no snapshot begins, and a drain of the process waits.
  void Open() {
    if (holds_.empty()) snapshots_.set_moving(true);
    holds_.push_back(context_.dispatcher.Hold());
  }
  size_t open() const { return holds_.size(); }
  void Close() {
    holds_.pop_back();
    if (holds_.empty()) snapshots_.set_moving(false);
  }

  // Runs `work` on the I/O thread, in the turn of the adapter's tenant, and
  // then `then` with its result. Nothing runs if the engine ends first.
  template <typename Work, typename Then>
  void OnIo(const std::string& adapter_id, Work work, Then then) const {
    context_.PostIo(adapter_id,
                    [this, work = std::move(work), then = std::move(then)] {
                      context_.dispatcher.Post(
                          [then, result = work()](const absl::Status& open) {
                            if (open.ok()) then(result);
                          });
                    });
  }
  // Runs `task` when all earlier records are durable.
  void WhenDurable(std::function<void()> task) const {
    context_.recorder.WhenDurable([this, task = std::move(task)] {
      context_.dispatcher.Post([task](const absl::Status& open) {
        if (open.ok()) task();
      });
    });
  }
  // Runs `task` after an error of the store: when it answers, after a pause.
  void Again(const std::string& adapter_id, const absl::Status& error,
             std::function<void()> task);

  void After(absl::Duration pause, std::function<void()> task) {
    later_.emplace(SteadyNow() + pause, std::move(task));
  }
  // Runs what is due. Call it between two pieces of work.
  void RunDue(absl::Time now);
  // Returns when RunDue has something to do.
  absl::Time next_due() const {
    return later_.empty() ? absl::InfiniteFuture() : later_.begin()->first;
  }

 private:
  const EngineContext& context_;
  AdapterManager& manager_;
  Snapshotter& snapshots_;
  SampleRunner& samples_;
  MoveMetrics metrics_;
  std::vector<std::shared_ptr<void>> holds_;  // One for each open move.
  std::multimap<absl::Time, std::function<void()>> later_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_MOVE_PARTS_H_
