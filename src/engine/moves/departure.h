// The sender's side of moves (move_parts.h): takes this log's units to others,
// one at a time. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_
#define WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/engine/moves/move_parts.h"
#include "src/log/record.h"
#include "src/request/reply.h"

namespace weft::engine {

class Departure {
 public:
  // `parts` outlives the object.
  explicit Departure(MoveParts* parts) : parts_(*parts) {}

  // Begins the move when earlier ones have ended. Runs `done` when the unit is
  // the other log's, or has stayed. Errors: NOT_FOUND (unit), INVALID_ARGUMENT
  // (log), FAILED_PRECONDITION (an adapter is of Durability::kMemory; the
  // receiver has refused the unit), UNAVAILABLE (work does not end, the log has
  // no owner, or the store does not answer), ABORTED (the receiver has not
  // taken the unit in time).
  void Start(const std::string& unit, int to, Callback<bool> done);
  // Adds `done` to the move of this unit to this log. Returns false if there is
  // none.
  bool Join(const std::string& unit, int to, const Callback<bool>& done);
  // Ends a move of an earlier process.
  void Resume(const log::MoveRecord& record);
  // Begins the next move if none is under way. Call it between two pieces of
  // work.
  void GoOn();
  // Gives all callers the error. Call it after the last GoOn.
  void Close(const absl::Status& status);

 private:
  struct Move {
    std::string unit;
    log::MoveRecord leaving;
    bool held = false;
    std::vector<AdapterKey> keys;  // Of its adapters, when it is held.
    std::vector<Callback<bool>> waiters;
    // The entry is not taken back before `deadline`, which is `patience` after
    // the message could be sent.
    absl::Duration patience;
    absl::Time deadline = absl::InfinitePast();
    absl::Status reason;  // Why the unit must stay.
    // What the receiver gets. Those images are written for this move.
    log::ArrivingRecord sent;
    std::vector<std::string> new_images;
    bool resumed = false;
  };
  // What the directory says.
  struct Verdict {
    enum { kWaits, kLeft, kStayed } what = kWaits;
    std::string refused;  // The receiver's reason; may be empty.
  };

  // Returns the unit's adapters, by their ids: the tenants.
  absl::StatusOr<std::map<std::string, std::string>> Check(
      const std::string& unit, int to) const;
  void Begin();
  // Holds the unit when no accepted step waits for others to come. `begin` is
  // when it began to wait.
  void Hold(absl::Time begin);
  void SetKeys();
  // Waits for the unit's work to end, and ends its samples after a while.
  void WaitForQuiet(absl::Time begin);
  void ReadEntry();
  // Records that the unit leaves. From here on only Leave and Stay end it.
  void Record(const std::string& entry);
  // Writes images of the adapters that have none yet, one after another.
  void WriteImages();
  void Send();
  // Asks what has become of the unit, until that is decided.
  void Judge();
  // Threads: the I/O thread.
  absl::StatusOr<Verdict> Decide(const log::MoveRecord& leaving,
                                 bool is_over) const;
  bool IsOver() const {
    return !move_->reason.ok() || SteadyNow() >= move_->deadline;
  }
  void Leave();
  void Stay();
  // Lets clients use the unit, or find it elsewhere, and gives the callers
  // `result`.
  void End(const absl::StatusOr<bool>& result);

  MoveParts& parts_;
  std::deque<Move> waiting_;
  std::optional<Move> move_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_
