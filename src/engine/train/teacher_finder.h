// Finds the weights of a step's teacher (Teacher in src/request/train.h).
#ifndef WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_
#define WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/dispatch/work.h"
#include "src/engine/adapters/adapter_mover.h"
#include "src/engine/engine_context.h"
#include "src/lora/adapter.h"

namespace weft::engine {

// Threads: engine thread only.
class TeacherFinder {
 public:
  // `context` and `mover` outlive the finder.
  TeacherFinder(const EngineContext* context, const AdapterMover* mover)
      : context_(*context), mover_(*mover) {}

  // Returns the weights of the teacher of this ForwardBackward or Forward; null
  // for the base model. If another adapter is the teacher and is not on the
  // device, returns a copy and leaves the adapter where it is: a step waits for
  // the slot of one adapter, never for two. From disk this blocks for a read.
  // Errors: NOT_FOUND (the adapter or its snapshot), FAILED_PRECONDITION (a
  // replay of the log could not run the step again), RESOURCE_EXHAUSTED (with a
  // copy, all copies would take more than the memory budget), and those of the
  // read and the copy. If `shared_only`, a copy that takes memory of its own is
  // RESOURCE_EXHAUSTED, too.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Find(
      const dispatch::StepTask& step, bool shared_only);
  // Returns whether the weights, which may be null, are one of the copies.
  [[nodiscard]] bool IsCopy(const lora::AdapterVersionPtr& version) const;
  // Returns the bytes of all copies that live, which the memory budget of the
  // micro-batches has to spare. A replay of the log counts none: what it runs
  // has fitted once, perhaps without a copy.
  [[nodiscard]] int64_t CopiedBytes() const;

 private:
  // Makes a copy of an adapter that is not on the device. Errors: as for Find.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Copy(
      AdapterKey key, const Teacher& teacher, bool shared_only);
  // Returns RESOURCE_EXHAUSTED unless there is room for a copy.
  [[nodiscard]] absl::Status CheckRoom(AdapterKey key, const Teacher& teacher,
                                       bool shared_only) const;

  const EngineContext& context_;
  const AdapterMover& mover_;
  std::vector<std::weak_ptr<const lora::AdapterVersion>> copies_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_
