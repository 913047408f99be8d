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
  // Makes an object without other ranks.
  LocalRanks() = default;
  // Starts this program again with the same arguments, as ranks 1 to size - 1.
  // The environment gives them their world. They end with this process, even if
  // it crashes. `world` becomes the world of rank 0. Threads: call it before
  // any other thread is created, because it forks. Errors: UNAVAILABLE if a
  // socket or a process cannot be created.
  [[nodiscard]] static absl::StatusOr<LocalRanks> Spawn(char** argv, int size,
                                                        World* world);
  // Waits some seconds for ranks that still run, so that they can end by
  // themselves.
  ~LocalRanks();
  // Kills the ranks now.
  void Kill();
  LocalRanks(LocalRanks&& other) noexcept;
  LocalRanks& operator=(LocalRanks&& other) noexcept;

  // Returns UNAVAILABLE if a rank has ended, with the rank and how it ended.
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
