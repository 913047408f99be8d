// Knows which steps ran when earlier processes ended, so that a step that ends
// its process, for example because memory runs out, does not run again at every
// start.
//
//   <dir>/RUNNING   the suspects (steps that ran at such an end) and the steps
//                   that run now
//
// The file is mapped into memory. So it costs no system call to note a step,
// and the note survives the end of the process. After the end of the machine
// the file may have any earlier content, so an innocent step may be a suspect.
//
// A suspect whose process was the only one to end so, and that did not run at
// the end of the next one, is none any more.
#ifndef WEFT_SRC_LOG_RUNNING_STEPS_H_
#define WEFT_SRC_LOG_RUNNING_STEPS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "src/request/adapter_key.h"

namespace weft::log {

// The name of the file in a state folder.
inline constexpr char kRunningSteps[] = "RUNNING";

class RunningSteps {
 public:
  // Reads the suspects, to which the file adds the steps that ran at the end of
  // the latest process. A file of another size counts as empty. Errors: those
  // of file_io.h.
  static absl::StatusOr<std::unique_ptr<RunningSteps>> Open(
      int directory, const std::string& file_name);
  ~RunningSteps();
  RunningSteps(const RunningSteps&) = delete;
  RunningSteps& operator=(const RunningSteps&) = delete;

  bool has_suspects() const { return !suspects_.empty(); }
  // Returns how many processes have ended while the step ran. `digest` is that
  // of the step's payload. Any thread may call it.
  uint64_t EndsOf(AdapterKey key, uint64_t step,
                  const std::string& digest) const;

  // Note that the step runs, too, and that no step runs. Threads: one at a
  // time.
  void Begin(AdapterKey key, uint64_t step, const std::string& digest);
  void End();
  // Notes that no step runs, and ignores Begin from now on. Any thread may call
  // it.
  void Excuse();

 private:
  struct File;
  using Suspects = std::map<uint64_t, uint64_t>;  // The ends of each step.

  RunningSteps(Suspects suspects, File* file)
      : suspects_(std::move(suspects)), file_(file) {}

  const Suspects suspects_;
  File* const file_;
  std::atomic<bool> excused_ = false;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_RUNNING_STEPS_H_
