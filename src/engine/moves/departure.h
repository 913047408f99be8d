// The sender's side of moves (move_parts.h): takes this log's adapters to
// others, one at a time. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_
#define WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_

#include <deque>
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

  // Begins the move when earlier ones have ended. Runs `done` when the adapter
  // is the other log's, or has stayed. Errors: NOT_FOUND (adapter),
  // INVALID_ARGUMENT (log), FAILED_PRECONDITION (the adapter is of
  // Durability::kMemory; the receiver has refused it), UNAVAILABLE (the log has
  // no owner, or the store does not answer), ABORTED (the receiver has not
  // taken the adapter in time).
  void Start(const std::string& adapter_id, int to, Callback<bool> done);
  // Adds `done` to the move of this adapter to this log. Returns false if there
  // is none.
  bool Join(const std::string& adapter_id, int to, const Callback<bool>& done);
  // Ends a move of an earlier process.
  void Resume(const log::MoveRecord& record);
  // Begins the next move if none is under way. Call it between two pieces of
  // work.
  void GoOn();
  // Gives all callers the error. Call it after the last GoOn.
  void Close(const absl::Status& status);

 private:
  struct Move {
    std::string adapter_id;
    log::MoveRecord leaving;  // No key: the adapter is not held yet.
    std::vector<Callback<bool>> waiters;
    // The entry is not taken back before `deadline`, which is `patience` after
    // the message could be sent.
    absl::Duration patience;
    absl::Time deadline = absl::InfinitePast();
    absl::Status reason;    // Why the adapter must stay.
    std::string new_image;  // Written for this move; may be empty.
    std::string record;     // For the receiver.
    bool resumed = false;
  };
  // What the directory says.
  struct Verdict {
    enum { kWaits, kLeft, kStayed } what = kWaits;
    std::string refused;  // The receiver's reason; may be empty.
  };

  absl::StatusOr<AdapterKey> Check(const std::string& adapter_id, int to) const;
  void Begin();
  // Waits for the adapter's work to end, and ends its samples after a while.
  // `begin` is when it began to wait.
  void WaitForQuiet(absl::Time begin);
  void ReadEntry();
  // Records that the adapter leaves. From here on only Leave and Stay end it.
  void Record(const std::string& entry);
  void WriteImage();
  void Send();
  // Asks what has become of the adapter, until that is decided.
  void Judge();
  // Threads: the I/O thread.
  absl::StatusOr<Verdict> Decide(const std::string& adapter_id,
                                 const log::MoveRecord& leaving,
                                 bool is_over) const;
  bool IsOver() const {
    return !move_->reason.ok() || SteadyNow() >= move_->deadline;
  }
  void Leave();
  void Stay();
  // Lets clients use the adapter, or find it elsewhere, and gives the callers
  // `result`.
  void End(const absl::StatusOr<bool>& result);

  MoveParts& parts_;
  std::deque<Move> waiting_;
  std::optional<Move> move_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_DEPARTURE_H_
