// Says which of the logs in an object store has an adapter. A name is that of
// at most one adapter in all logs.
//
//   adapters/<adapter id>    the log of the adapter
//
// An entry comes before the adapter, and goes after it. So after a crash an
// entry may name a log without the adapter: the name is free then, for the
// owner of that log alone.
#ifndef WEFT_SRC_DIRECTORY_DIRECTORY_H_
#define WEFT_SRC_DIRECTORY_DIRECTORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/threads/mutex.h"
#include "src/store/object_store.h"

namespace weft::directory {

// What a directory knows about the process that has it, and about the others.
struct Logs {
  int own = 0;    // The log of this process.
  int count = 1;  // Of all logs; `own` is one of 0 to count - 1.
  // Returns HOST:PORT of a log's owner: empty if none is known, nullopt if the
  // log has never had one. Blocks on the store.
  std::function<absl::StatusOr<std::optional<std::string>>(int log)> owner;
  // Returns ABORTED if another process has taken `own`. Blocks on the store.
  std::function<absl::Status()> confirm_own;
};

// Errors of all functions that block on the store: UNAVAILABLE if it does not
// answer, or if another process has this log, and others of object_store.h.
// "Moved" is the error MovedTo (reason.h) with the address of another log's
// owner.
// Threads: EndClaim any; the others the I/O thread.
class Directory {
 public:
  // `store` outlives the object.
  Directory(store::ObjectStore* store, Logs logs)
      : store_(*store), logs_(std::move(logs)) {}

  int log() const { return logs_.own; }
  bool has_others() const { return logs_.count > 1; }

  // Returns OK if this log has the name, or none does: then what this process
  // knows about the adapter is right. Errors: moved, if another log has it.
  absl::Status Find(const std::string& adapter_id) const;

  // Gives the name to this log. On success the caller makes the adapter, or
  // does not, and then calls EndClaim. Errors: moved.
  absl::Status Claim(const std::string& adapter_id);
  void EndClaim(const std::string& adapter_id) ABSL_LOCKS_EXCLUDED(mu_);

  // Frees the name, unless it has a claim or `exists` returns true. `exists`
  // says whether this log has the adapter.
  absl::Status Free(const std::string& adapter_id,
                    const std::function<bool()>& exists);

  // Gives this log the names of its adapters that have no entry, as after the
  // restoration of a backup. Logs those that another log has.
  absl::Status Restore(const std::vector<std::string>& adapter_ids);

  // Returns the addresses of the owners of all other logs. Errors: UNAVAILABLE
  // if one has no owner now.
  absl::StatusOr<std::vector<std::string>> OtherOwners() const;

 private:
  // Returns the log that has the name. Errors: NOT_FOUND, DATA_LOSS.
  absl::StatusOr<int> LogOf(const std::string& adapter_id) const;
  // Returns OK if this log has the name. Errors: those of LogOf, and moved.
  absl::Status CheckOwn(const std::string& adapter_id) const;

  store::ObjectStore& store_;
  const Logs logs_;
  Mutex mu_;
  // How many claims of a name have not ended.
  std::map<std::string, int> claims_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::directory

#endif  // WEFT_SRC_DIRECTORY_DIRECTORY_H_
