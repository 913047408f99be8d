// The ranks that serve one model together, and the rank of this process. A rank
// is one process with one device.
#ifndef WEFT_SRC_BASE_OPTIONS_WORLD_H_
#define WEFT_SRC_BASE_OPTIONS_WORLD_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace weft {

struct World {
  int rank = 0;
  int size = 1;
  // The rank's number on this machine, which is also the number of its CUDA
  // device.
  int local_rank = 0;
  int local_size = 1;
  // The address at which the ranks find rank 0.
  std::string host = "127.0.0.1";
  int port = 0;
  int listen_fd = -1;  // Rank 0's socket on `port`; -1: not bound.
  // True if torchrun's agent already serves a TCP store at host:port.
  bool has_agent = false;
  // torchrun's count of restarts; empty if unknown. Ranks with different counts
  // never join one group.
  std::string attempt;

  bool local() const { return local_size == size; }
};

// Returns the value of an environment variable; nullopt if it is not set.
using Environment =
    std::function<std::optional<std::string>(const std::string& name)>;

// Reads the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE and
// TORCHELASTIC_RESTART_COUNT. Returns nullopt if RANK is not set. If
// LOCAL_WORLD_SIZE is not set, all ranks are on this machine. Errors:
// INVALID_ARGUMENT, which names the variable.
absl::StatusOr<std::optional<World>> WorldFromEnvironment(
    const Environment& read);

// Returns INVALID_ARGUMENT unless the world has tensor_size * data_size ranks.
absl::Status CheckWorldSize(const World& world, int tensor_size, int data_size);

}  // namespace weft

#endif  // WEFT_SRC_BASE_OPTIONS_WORLD_H_
