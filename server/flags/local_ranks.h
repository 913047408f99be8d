// Starts the ranks other than 0 on this machine. A rank is one of the processes
// that serve a model together.
#ifndef WEFT_SERVER_FLAGS_LOCAL_RANKS_H_
#define WEFT_SERVER_FLAGS_LOCAL_RANKS_H_

#include <sys/types.h>

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/options/world.h"

namespace weft::server {

// Threads: the main thread.
class LocalRanks {
 public:
  // Makes an object without processes.
  LocalRanks() = default;
  // Forks ranks 1 to size - 1, which have what this process has loaded. Returns
  // in each rank, without processes in ranks other than 0, and sets `world` to
  // the rank's. The ranks end with this process, even if it crashes. Threads:
  // call it before any other thread is created. Errors: UNAVAILABLE if there is
  // another thread, a socket cannot be bound or a process cannot be created.
  static absl::StatusOr<LocalRanks> Spawn(int size, World* world);
  // Waits up to 10 s for the ranks to end by themselves, and kills those that
  // still run.
  ~LocalRanks();
  // Kills the ranks that still run, without waiting.
  void Kill();
  LocalRanks(LocalRanks&& other) noexcept;
  LocalRanks& operator=(LocalRanks&& other) noexcept;

  // Returns UNAVAILABLE if a rank has ended. The message says which rank ended
  // and how. Each rank is reported once.
  absl::Status Check();

 private:
  struct Process {
    int rank = 0;
    pid_t pid = 0;
  };

  std::vector<Process> processes_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_LOCAL_RANKS_H_
