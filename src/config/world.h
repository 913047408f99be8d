// The processes that serve one model together, and which of them this is.
#ifndef WEFT_SRC_CONFIG_WORLD_H_
#define WEFT_SRC_CONFIG_WORLD_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace weft {

struct World {
  int rank = 0;
  int size = 1;
  // The rank among those of this machine, and the number of its CUDA device.
  int local_rank = 0;
  int local_size = 1;
  // Where rank 0 is met.
  std::string host = "127.0.0.1";
  int port = 0;
  int listen_fd = -1;  // Rank 0: bound to that port already; -1: not yet.
  // torchrun's agent serves that address already.
  bool has_agent = false;
  // Which start of the group this is, where an agent restarts it. Ranks of
  // different attempts do not meet.
  std::string attempt;

  [[nodiscard]] bool local() const { return local_size == size; }
};

// The value of an environment variable, none when it is not set.
using Environment =
    std::function<std::optional<std::string>(const std::string& name)>;

// From RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT, as torchrun sets them, and TORCHELASTIC_USE_AGENT_STORE and
// TORCHELASTIC_RESTART_COUNT, which it adds; none without RANK. Without
// LOCAL_WORLD_SIZE all ranks are on this machine.
// Errors: INVALID_ARGUMENT naming the variable, its value and the range.
[[nodiscard]] absl::StatusOr<std::optional<World>> WorldFromEnvironment(
    const Environment& read);

// INVALID_ARGUMENT unless the world has `tensor_size` times `data_size` ranks.
[[nodiscard]] absl::Status CheckWorldSize(const World& world, int tensor_size,
                                          int data_size);

}  // namespace weft

#endif  // WEFT_SRC_CONFIG_WORLD_H_
