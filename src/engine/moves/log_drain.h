// Empties this log: takes its units to other logs, one after another, while
// their clients go on. New adapters go to other servers meanwhile. Then the
// process can give the log away. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_MOVES_LOG_DRAIN_H_
#define WEFT_SRC_ENGINE_MOVES_LOG_DRAIN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/engine/moves/departure.h"
#include "src/engine/moves/move_parts.h"
#include "src/request/reply.h"

namespace weft::engine {

class LogDrain {
 public:
  // The pointers outlive the object.
  LogDrain(MoveParts* parts, Departure* departure)
      : parts_(*parts), departure_(*departure) {}

  // Runs `done` when the log has no adapters. Then nothing comes any more, and
  // the process must end. After an error new adapters are made here again.
  // Errors: FAILED_PRECONDITION (an adapter cannot move, or another log refuses
  // it).
  void Start(Callback<bool> done);
  // Takes the next unit away. Call it between two pieces of work.
  void GoOn();
  // Returns whether the log is to stay without adapters.
  bool succeeded() const { return phase_ == Phase::kEmpty; }
  // Returns whether the drain has begun and did not fail. Threads: any.
  bool empties() const { return phase_ != Phase::kOff; }
  // Gives all callers the error. Call it after the last GoOn.
  void Close(const absl::Status& status) { End(status); }

 private:
  enum class Phase : uint8_t { kOff, kMoves, kEmpty };

  // Returns a unit that is to leave; none if there are none.
  std::optional<std::string> Next() const;
  void Move(const std::string& unit);
  void Send(const std::string& unit, const std::vector<int>& logs);
  void End(const absl::StatusOr<bool>& result);

  MoveParts& parts_;
  Departure& departure_;
  std::atomic<Phase> phase_{Phase::kOff};
  bool moving_ = false;
  size_t num_sent_ = 0;
  int num_failed_ = 0;  // In a row.
  std::vector<Callback<bool>> waiters_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_LOG_DRAIN_H_
