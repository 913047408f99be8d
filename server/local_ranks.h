// Starts the other ranks of a group on this machine.
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
  // No other ranks.
  LocalRanks() = default;
  // Starts this program again with the same arguments, as ranks 1 to size - 1.
  // The environment gives them their world. They end with this process, even if
  // it crashes. `world` becomes that of rank 0. Threads: call it before any
  // other thread is created, because it forks. Errors: UNAVAILABLE if a socket
  // or a process cannot be created.
  [[nodiscard]] static absl::StatusOr<LocalRanks> Spawn(char** argv, int size,
                                                        World* world);
  // Gives ranks that still run some seconds to end by themselves.
  ~LocalRanks();
  // Kills the ranks now.
  void Kill();
  LocalRanks(LocalRanks&& other) noexcept;
  LocalRanks& operator=(LocalRanks&& other) noexcept;

  // Returns UNAVAILABLE naming a rank that has ended, and how.
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
