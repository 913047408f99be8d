// The scheduler's input and output: units of work and plans, as plain values.
// The caller chooses the ids of work.
#ifndef WEFT_SRC_DISPATCH_SCHEDULED_WORK_H_
#define WEFT_SRC_DISPATCH_SCHEDULED_WORK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/request/adapter_key.h"
#include "src/request/step_task.h"

namespace weft::dispatch {

// kTrain (ForwardBackward, Forward) may share micro-batches with other kTrain.
// kOptim and kAdapterOp are barriers: no other step of their adapter runs at
// the same time. kSample waits for decoding (Scheduler::TakeSamples).
enum class WorkKind : uint8_t { kTrain, kOptim, kAdapterOp, kSample };
inline constexpr int kNumWorkKinds = 4;

// A set of kinds of work, one bit each.
using WorkKinds = uint8_t;
inline constexpr WorkKinds kTraining = 1;
inline constexpr WorkKinds kSampling = 2;
inline constexpr WorkKinds kTask = 4;  // A task on an adapter's tensors.

// The adapter that teaches a kTrain, and its snapshot; empty: its latest
// weights.
struct TeacherName {
  AdapterKey adapter = AdapterKey::kBaseModel;
  std::string snapshot;

  friend bool operator==(const TeacherName&, const TeacherName&) = default;
};

struct WorkItem {
  uint64_t id = 0;  // Unique among the work that the scheduler holds.
  WorkKind kind = WorkKind::kTrain;
  // Work on the base model has no step number.
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t step = 0;      // If > 0, the work's place in the adapter's order.
  bool backward = false;  // kTrain: computes gradients.
  // kTrain without backward: the work has no step number and does not wait for
  // missing numbers.
  bool unnumbered = false;
  // kAdapterOp: the work does nothing, so it does not wait for the device.
  bool empty = false;
  // kAdapterOp: the work changes what the adapter computes, so it takes a
  // number even if its caller chose none. Another client, which does not expect
  // the change, then finds its next number taken.
  bool numbered = false;
  // kTrain with backward: the log of --state-dir records the step. Recorded and
  // unrecorded ForwardBackwards never share a micro-batch, so that a replay of
  // the log can run the same micro-batch again.
  bool recorded = false;
  // kTrain: the work shares no micro-batch with other work.
  bool alone = false;
  // kTrain: the base model if the work has no teacher.
  TeacherName teacher;
  // kTrain: the cost of each datum in tokens, >= 1, without its datum_prefix.
  std::vector<int64_t> datum_tokens;
  // kTrain: length of the prefix that each datum shares with the previous
  // datum. If both are in one slice, the prefix costs nothing. The first datum
  // of a slice pays for its prefix again. Empty if there are no common
  // prefixes.
  std::vector<int64_t> datum_prefix;
  // The cost that counts for fairness. kTrain: Enqueue sets it to the sum of
  // datum_tokens. kSample: prompt tokens plus tokens that may be drawn.
  int64_t tokens = 0;
  absl::Time deadline = absl::InfiniteFuture();
};

// What the device does next.
struct Plan {
  enum class Kind : uint8_t {
    kNone,       // No work can run now, or a batch waits for adapters.
    kTrain,      // One micro-batch, `slices`: all with backward or all without.
    kExclusive,  // One kOptim or kAdapterOp, which is `work_id`.
    kDecode,     // Admits samples (TakeSamples), then decodes once.
  };
  Kind kind = Kind::kNone;
  bool backward = false;
  // The slices of one adapter are adjacent. An adapter has either whole
  // requests here, or one slice of a request that exceeds a micro-batch.
  std::vector<TrainSlice> slices;
  int64_t tokens = 0;  // The cost of the slices.
  uint64_t work_id = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SCHEDULED_WORK_H_
