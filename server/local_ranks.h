// The other ranks of a group that one command starts on one machine.
#ifndef WEFT_SERVER_LOCAL_RANKS_H_
#define WEFT_SERVER_LOCAL_RANKS_H_

#include <sys/types.h>

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/config/world.h"

namespace weft {

// Threads: the main thread.
class LocalRanks {
 public:
  // None.
  LocalRanks() = default;
  // Starts this program again with the same arguments as ranks 1 to size - 1 of
  // a world that is told to them through the environment. They end with this
  // process, however it ends. `world` becomes that of rank 0.
  // Threads: before any other is made, for it forks.
  // Errors: UNAVAILABLE when a socket or a process cannot be had.
  [[nodiscard]] static absl::StatusOr<LocalRanks> Spawn(char** argv, int size,
                                                        World* world);
  // Gives those that still run some seconds to end by themselves.
  ~LocalRanks();
  // Ends them now.
  void Kill();
  LocalRanks(LocalRanks&& other) noexcept;
  LocalRanks& operator=(LocalRanks&& other) noexcept;

  // UNAVAILABLE naming one that has ended, and how.
  [[nodiscard]] absl::Status Check();

 private:
  struct Process {
    int rank = 0;
    pid_t pid = 0;
  };

  std::vector<Process> processes_;
};

}  // namespace weft

#endif  // WEFT_SERVER_LOCAL_RANKS_H_
