// The receiver's side of moves (move_parts.h): takes in what other logs send,
// one adapter at a time. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_MOVES_ARRIVAL_H_
#define WEFT_SRC_ENGINE_MOVES_ARRIVAL_H_

#include <deque>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/directory/arrivals.h"
#include "src/engine/moves/move_parts.h"
#include "src/log/record.h"

namespace weft::engine {

class Arrival {
 public:
  // `parts` outlives the object.
  explicit Arrival(MoveParts* parts) : parts_(*parts) {}

  // Ends an arrival of an earlier process.
  void Resume(log::ArrivingRecord record);
  // Looks now and then for an adapter that another log sends. Call it between
  // two pieces of work.
  void GoOn(absl::Time now);

 private:
  // Returns the message to this log if its adapter may be taken. Removes one
  // that is obsolete. Threads: the I/O thread.
  absl::StatusOr<std::optional<directory::FoundArrival>> Look() const;
  void Consider(const directory::FoundArrival& found);
  // Returns why the adapter can never be taken, or UNAVAILABLE if it may be
  // taken later.
  absl::Status Check(const log::StoredAdapter& adapter) const;
  void Refuse(const directory::FoundArrival& found, const absl::Status& reason);
  void CopyImage(const directory::FoundArrival& found,
                 const std::string& image);
  // Records that the adapter arrives. From here on only Own and Drop end it.
  void Record();
  // Asks whose the adapter is, until that is decided.
  void Take();
  void Own();
  void Drop();
  // Lets clients use the adapter, or find it elsewhere.
  void End();

  MoveParts& parts_;
  bool looking_ = false;
  absl::Time next_look_ = absl::InfinitePast();
  absl::Status last_error_;  // That was logged.
  std::deque<log::ArrivingRecord> resumed_;
  std::optional<log::ArrivingRecord> arriving_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_ARRIVAL_H_
