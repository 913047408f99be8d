// Finds the weights of a step's teacher (Teacher in src/request/train.h).
#ifndef WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_
#define WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/dispatch/work.h"
#include "src/engine/adapters/adapter_mover.h"
#include "src/engine/engine_context.h"
#include "src/lora/adapter.h"

namespace weft::engine {

// The weights of a step's teacher.
struct FoundTeacher {
  // Null for the base model. On the host if the adapter is not on the device.
  lora::AdapterVersionPtr version;
  // What a micro-batch takes of the memory budget for a copy of the weights. A
  // replay of the log counts none: what it runs has fitted once, perhaps
  // without a copy.
  int64_t copy_bytes = 0;
};

// Threads: engine thread only.
class TeacherFinder {
 public:
  // `context` and `mover` outlive the finder.
  TeacherFinder(const EngineContext* context, const AdapterMover* mover)
      : context_(*context), mover_(*mover) {}

  // Returns the weights of the teacher of this ForwardBackward or Forward. If
  // another adapter is the teacher and is not on the device, it stays where it
  // is: a step waits for the slot of one adapter, never for two. From disk this
  // blocks for a read, and without Fetch also from a store. Errors: NOT_FOUND
  // (the adapter or its snapshot), FAILED_PRECONDITION (a replay of the log
  // could not run the step again), RESOURCE_EXHAUSTED (a copy takes more than
  // the memory budget), and those of the read.
  absl::StatusOr<FoundTeacher> Find(const StepTask& step) const;

  // Returns whether Find would read the teacher from the store of --state.
  bool NeedsFetch(const StepTask& step) const;
  // Reads the teacher on the I/O thread, again and again if the store does not
  // answer. Then gives `done` the weights, which Find finds as long as someone
  // has them; null if the teacher has moved or gone; or an error. REQUIRES:
  // NeedsFetch.
  using Fetched = std::function<void(absl::StatusOr<lora::AdapterVersionPtr>)>;
  void Fetch(const StepTask& step, const Fetched& done) const;

 private:
  struct Source {
    AdapterKey key = AdapterKey::kBaseModel;
    std::string snapshot;
    ImageFile file;
  };
  // Returns where Find would read the teacher in the store, or none.
  std::optional<Source> InStore(const StepTask& step) const;
  void Read(const Source& source, const Fetched& done) const;

  // Finds the weights of an adapter that is not on the device.
  absl::StatusOr<FoundTeacher> Borrow(AdapterKey key,
                                      const Teacher& teacher) const;

  const EngineContext& context_;
  const AdapterMover& mover_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_TEACHER_FINDER_H_
