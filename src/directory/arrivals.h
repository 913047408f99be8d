// The mailbox of each log in an object store: the unit that another log sends
// to it, one at a time. What happens to the unit is decided by its entry in the
// directory alone, so a message may come late, and get lost.
//
//   arrivals/<log>    where the unit comes from, and its record
#ifndef WEFT_SRC_DIRECTORY_ARRIVALS_H_
#define WEFT_SRC_DIRECTORY_ARRIVALS_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/store/object_store.h"

namespace weft::directory {

inline constexpr char kStoreAway[] =
    "the store of the adapters' names does not answer";

// Returns an error of the store as an answer to a call, which repeats after
// UNAVAILABLE: so also if another process has changed what the call needs.
absl::Status AsAnswer(const absl::Status& status);

struct Arrival {
  int from = 0;  // The log that has sent it.
  std::string unit;
  // The version of the unit's entry in the directory. Another unit, or the same
  // one again, has another version.
  std::string entry;
  std::string record;   // For the log that gets it.
  std::string refused;  // Why that log does not take it; else empty.
};

struct FoundArrival {
  Arrival arrival;
  std::string etag;  // Of the message.
};

// Errors of all functions that block on the store: UNAVAILABLE if it does not
// answer, and others of object_store.h. Threads: the I/O thread.
class Arrivals {
 public:
  // `store` outlives the object. `own` is the log of this process. `answers`
  // returns false while the store does not answer, as far as is known.
  Arrivals(store::ObjectStore* store, int own, std::function<bool()> answers)
      : store_(*store), own_(own), answers_(std::move(answers)) {}

  // Sends a unit to log `to`, unless it is on its way already. Errors:
  // ALREADY_EXISTS if another one is; RESOURCE_EXHAUSTED if the record is too
  // large.
  absl::Status Send(int to, const Arrival& arrival);
  // Returns what is on its way to the log. Errors: NOT_FOUND; DATA_LOSS if the
  // message is damaged.
  absl::StatusOr<FoundArrival> Find(int log) const;
  // Tells the sender of a message to this log that its unit must stay.
  absl::Status Refuse(const FoundArrival& found, const std::string& reason);
  // Removes this message to this log, if it is still there.
  absl::Status Remove(const FoundArrival& found) {
    return RemoveFrom(own_, found);
  }
  // Removes this log's message to log `to`, if it is still there.
  absl::Status Recall(int to, const std::string& entry);

 private:
  absl::Status RemoveFrom(int log, const FoundArrival& found);

  store::ObjectStore& store_;
  const int own_;
  const std::function<bool()> answers_;
};

}  // namespace weft::directory

#endif  // WEFT_SRC_DIRECTORY_ARRIVALS_H_
