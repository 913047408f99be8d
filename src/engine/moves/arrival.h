// The receiver's side of moves (move_parts.h): takes in what other logs send,
// one unit at a time. Threads: engine thread.
#ifndef WEFT_SRC_ENGINE_MOVES_ARRIVAL_H_
#define WEFT_SRC_ENGINE_MOVES_ARRIVAL_H_

#include <deque>
#include <optional>
#include <string>
#include <vector>

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
  // Looks now and then for a unit that another log sends. Call it between two
  // pieces of work.
  void GoOn(absl::Time now);

 private:
  // Returns the message to this log if its unit may be taken. Removes one that
  // is obsolete. Threads: the I/O thread.
  absl::StatusOr<std::optional<directory::FoundArrival>> Look() const;
  void Consider(const directory::FoundArrival& found);
  // Returns why the unit can never be taken, or UNAVAILABLE if it may be taken
  // later.
  absl::Status Check(const log::ArrivingRecord& sent) const;
  void Refuse(const directory::FoundArrival& found, const absl::Status& reason);
  // Copies the other log's `images` to those of arriving_.
  void CopyImages(const directory::FoundArrival& found,
                  const std::vector<std::string>& images);
  // Records that the unit arrives. From here on only Own and Drop end it.
  void Record();
  // Asks whose the unit is, until that is decided.
  void Take();
  void Own();
  void Drop();
  void DropImages() const;
  // Lets clients use the unit, or find it elsewhere.
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
