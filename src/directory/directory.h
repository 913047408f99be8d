// Says which of the logs in an object store has an adapter. A name is that of
// at most one adapter in all logs. The adapters of one unit
// (src/request/move_unit.h) are in one log, and share an entry.
//
//   adapters/<unit>    the log of the unit, and which claim it is
//   arrivals/<log>     a unit on its way to the log (arrivals.h)
//   shared/<name>      what all logs use (Agree)
//
// No two entries are equal, so that a late deletion spares a newer one, and
// each has a version. While a unit goes from one log to another, both logs may
// replace the entry of one version (Take), and one can.
// An entry comes before the adapter, and goes after it. So after a crash an
// entry may name a log without the adapter: the name is free then, for the
// owner of that log alone. All functions take the name of an adapter, or of its
// unit.
#ifndef WEFT_SRC_DIRECTORY_DIRECTORY_H_
#define WEFT_SRC_DIRECTORY_DIRECTORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/threads/mutex.h"
#include "src/directory/arrivals.h"
#include "src/directory/owner_memory.h"
#include "src/store/object_store.h"

namespace weft::directory {

// HOST:PORT of a log's owner: empty if none is known, nullopt if the log has no
// adapters, because nobody has had it or it is drained.
using OwnerAddress = std::optional<std::string>;

// What a directory knows about the process that has it, and about the others.
struct Logs {
  int own = 0;         // The log of this process.
  uint64_t epoch = 0;  // Of this process, as the owner of `own`.
  int count = 1;       // Of all logs; `own` is one of 0 to count - 1.
  // These two block on the store.
  std::function<absl::StatusOr<OwnerAddress>(int log)> owner;
  std::function<std::vector<absl::StatusOr<OwnerAddress>>()> owners;
  // Returns ABORTED if another process has taken `own`. Blocks on the store.
  std::function<absl::Status()> confirm_own;
  // Returns false while the store does not answer, as far as is known.
  std::function<bool()> answers;
};

// Errors of all functions that block on the store: UNAVAILABLE if it does not
// answer, or if another process has this log, and others of object_store.h.
// "Moved" is the error MovedTo (reason.h) with the address of another log's
// owner.
// Threads: EndClaim and Find any; the others the I/O thread.
class Directory {
 public:
  struct Entry {
    std::optional<int> log;  // None: the entry is damaged.
    std::string etag;
    // The first claim of the name since it was free. All later entries keep it.
    std::string born;
    std::string bytes;

    // Says which entry it is.
    std::string version() const { return absl::StrCat(born, "@", etag); }
    // Returns whether the entry with this version is of the same adapter.
    bool IsOf(std::string_view version) const {
      return born == version.substr(0, version.find('@'));
    }
  };

  // `store` outlives the object.
  Directory(store::ObjectStore* store, Logs logs);

  bool has_others() const { return logs_.count > 1; }
  int own() const { return logs_.own; }
  int num_logs() const { return logs_.count; }

  // What earlier calls have learned, for those who cannot wait for the store.
  // Any thread may use it.
  OwnerMemory& memory() const { return *memory_; }
  Arrivals& arrivals() { return arrivals_; }

  // Returns OK if this log has the name, or none does: then what this process
  // knows about the adapter is right. Errors: moved, if another log has it.
  absl::Status Find(const std::string& adapter_id) const;

  // Gives `done` HOST:PORT of the owner of another log that has the unit, or of
  // the log `home` if the unit has no entry or is empty. `done` runs at once if
  // that is remembered, else on the memory's thread. Errors: NOT_FOUND, if no
  // other log has it. Threads: any.
  void FindOwner(const std::string& unit, int home,
                 std::function<void(const absl::StatusOr<std::string>&)> done);

  // Returns "moved" with the address of the name's log, or of any other one's.
  absl::Status SendElsewhere(const std::string& adapter_id) const;

  // Gives the name to this log. On success the caller makes the adapter, or
  // does not, and then calls EndClaim. Errors: moved.
  absl::Status Claim(const std::string& adapter_id);
  void EndClaim(const std::string& adapter_id) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether a claim of the unit has not ended. Threads: any.
  bool HasClaim(const std::string& unit) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return claims_.contains(unit);
  }

  // Frees the name, unless it has a claim or `exists` returns true. `exists`
  // says whether this log has anything of the unit.
  absl::Status Free(const std::string& adapter_id,
                    const std::function<bool()>& exists);

  // Gives this log the names of its adapters that have no entry, as after the
  // restoration of a backup. Logs those that another log has.
  absl::Status Restore(const std::set<std::string>& adapter_ids);

  // Errors: NOT_FOUND.
  absl::StatusOr<Entry> Read(const std::string& adapter_id) const;
  // Replaces the entry with this version by one of this log. Returns whether
  // the log has the adapter so, perhaps by an earlier call, or of an earlier
  // process. If it returns false, none of this log's calls can replace that
  // entry any more.
  absl::StatusOr<bool> Take(const std::string& adapter_id,
                            const std::string& version);
  // Returns UNAVAILABLE if the log has no owner now.
  absl::Status CheckOwned(int log) const;

  // Returns the other logs that have an owner.
  absl::StatusOr<std::vector<int>> OtherLogs() const;
  // Returns the addresses of the owners of all other logs. Errors: UNAVAILABLE
  // if one has no owner now.
  absl::StatusOr<std::vector<std::string>> OtherOwners() const;

  // Returns the bytes that all logs use under a name: `bytes`, if no process
  // has given others before.
  absl::StatusOr<std::string> Agree(const std::string& name,
                                    const std::string& bytes);

 private:
  // Returns the bytes of a new entry of this log. An empty `born` begins one.
  std::string NewEntry(const std::string& born);
  // Returns OK for an entry of this log, else "moved", or DATA_LOSS.
  absl::Status CheckOwn(const std::string& adapter_id,
                        const Entry& entry) const;
  // Writes an entry of this log, in place of one of this log that is there.
  absl::Status Write(const std::string& adapter_id);

  store::ObjectStore& store_;
  const Logs logs_;
  Arrivals arrivals_;
  uint64_t num_claims_ = 0;
  Mutex mu_;
  // How many claims of a name have not ended.
  std::map<std::string, int> claims_ ABSL_GUARDED_BY(mu_);
  const std::unique_ptr<OwnerMemory> memory_;  // Ends first: it calls Find.
};

}  // namespace weft::directory

#endif  // WEFT_SRC_DIRECTORY_DIRECTORY_H_
