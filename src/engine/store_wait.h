// Tasks of the engine thread that wait until the store of --state answers.
#ifndef WEFT_SRC_ENGINE_STORE_WAIT_H_
#define WEFT_SRC_ENGINE_STORE_WAIT_H_

#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/dispatch/work.h"

namespace weft::engine {

// What the store did not do is tried again after a pause, and not before the
// store answers. The pause grows while the store answers, but never does what
// it should, because each try holds up the I/O thread.
// Threads: engine thread, but for Close.
class StoreWait {
 public:
  // `answers` is log::State::answers.
  explicit StoreWait(std::function<bool()> answers)
      : answers_(std::move(answers)) {}

  // Takes a task, which GoOn then runs. `now` is SteadyNow().
  void Add(absl::Time now, dispatch::EngineTask task);
  // Runs what waited long enough. Call it between two pieces of work.
  void GoOn(absl::Time now);
  // Gives all tasks an error. Call it when the engine thread has ended.
  void Close(const absl::Status& status);

 private:
  const std::function<bool()> answers_;
  std::vector<dispatch::EngineTask> tasks_;
  absl::Time due_;
  absl::Time ran_ = absl::InfinitePast();
  absl::Duration pause_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_STORE_WAIT_H_
