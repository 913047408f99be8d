// Chooses the moves after which all logs of a state have about as many
// adapters.
#ifndef WEFT_CLIENT_WEFTCTL_BALANCE_H_
#define WEFT_CLIENT_WEFTCTL_BALANCE_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "weft/v1/adapters.pb.h"

namespace weft::client::weftctl {

// What moves as a whole (src/request/move_unit.h).
struct MovableUnit {
  std::string adapter_id;  // Of one of its adapters.
  size_t num_adapters = 1;
};

struct LogLoad {
  int log = 0;
  size_t num_adapters = 0;
  std::vector<MovableUnit> movable;  // The last one is the first to leave.
  bool takes = true;                 // Others may be moved here.
};

// Returns what a log has. A unit whose work came longest ago leaves first. One
// with an adapter that does not survive a restart, or is being restored, stays.
LogLoad LoadOf(int log, const v1::ListAdaptersResponse& list);

// `from` and `to` are places in the vector.
struct BalanceMove {
  std::string adapter_id;
  size_t from = 0;
  size_t to = 0;
};

// Removes a unit from `movable` of the log that has most, and returns its move
// to the one that has least. Returns nullopt if the two differ by one, or by a
// tenth of the mean, or if no unit may move, after which they differ by less.
std::optional<BalanceMove> NextMove(std::vector<LogLoad>& logs);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_BALANCE_H_
