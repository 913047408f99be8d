// Remembers for a while which other log has an adapter, and who has a log, so
// that a call can be sent there without waiting for the store. What it says may
// be old: whoever gets the call judges anew who has the adapter.
#ifndef WEFT_SRC_DIRECTORY_OWNER_MEMORY_H_
#define WEFT_SRC_DIRECTORY_OWNER_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"

namespace weft::directory {

// Values that are learned again when they are used. Threads: any.
template <typename Key, typename Value>
class RecentValues {
 public:
  // A value that is older than `fresh` is to be learned again, one that is
  // older than `good` is forgotten. At most `max` values are kept.
  RecentValues(absl::Duration fresh, absl::Duration good, size_t max)
      : fresh_(fresh), good_(good), max_(max) {}

  void Put(const Key& key, Value value, absl::Time now) {
    MutexLock lock(&mu_);
    if (values_.size() >= max_ && !values_.contains(key)) {
      std::erase_if(values_, [&](const auto& entry) {
        return now - entry.second.learned >= good_;
      });
      if (values_.size() >= max_) return;
    }
    values_[key] = {
        .value = std::move(value), .learned = now, .asked_again = now};
  }
  void Erase(const Key& key) {
    MutexLock lock(&mu_);
    values_.erase(key);
  }
  // Returns the value, and sets `*again` if the caller is to learn it again:
  // one caller in each time `fresh`.
  std::optional<Value> Get(const Key& key, absl::Time now, bool* again) {
    MutexLock lock(&mu_);
    *again = false;
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    Entry& entry = found->second;
    if (now - entry.learned >= good_) {
      values_.erase(found);
      return std::nullopt;
    }
    *again = now - entry.asked_again >= fresh_;
    if (*again) entry.asked_again = now;
    return entry.value;
  }

 private:
  struct Entry {
    Value value;
    absl::Time learned;
    absl::Time asked_again;
  };
  const absl::Duration fresh_;
  const absl::Duration good_;
  const size_t max_;
  Mutex mu_;
  std::map<Key, Entry> values_ ABSL_GUARDED_BY(mu_);
};

// Threads: any.
class OwnerMemory {
 public:
  // Reads who has a log: HOST:PORT, empty if nobody has. Blocks on the store.
  using ReadOwner = std::function<absl::StatusOr<std::string>(int log)>;
  // Looks up which log has an adapter, and calls Note or Forget. Blocks on the
  // store.
  using Find = std::function<void(const std::string& adapter_id)>;
  // Reads which other log has a unit. Blocks on the store.
  using ReadLog = std::function<absl::StatusOr<int>()>;

  // The functions run on the object's own thread.
  OwnerMemory(ReadOwner read_owner, Find find);

  // What the store has said about an adapter of another log.
  void Note(const std::string& adapter_id, int log, const std::string& owner);
  // The adapter is in this log, or nowhere.
  void Forget(const std::string& adapter_id) { logs_.Erase(adapter_id); }

  // Returns HOST:PORT of the other log's owner that has the adapter, as far as
  // is known; empty otherwise. Never waits.
  std::string OwnerOf(const std::string& adapter_id);
  // Gives `done` HOST:PORT of the owner of the log that has the unit: at once
  // if it is known, else when it is read, on the object's own thread. Errors:
  // UNAVAILABLE if nobody has the log, or many wait, and those of the reads.
  void FindOwner(const std::string& unit, const ReadLog& read_log,
                 std::function<void(const absl::StatusOr<std::string>&)> done);

  // Ends the thread. Callbacks that wait do not run then.
  void Stop() { reads_.Discard(); }

 private:
  // Returns the owner that is remembered. Has an old one read again.
  std::string Remembered(int log);
  absl::StatusOr<std::string> Read(int log);
  // Runs `read` on the object's own thread. Returns false if many wait there.
  bool Learn(std::function<void()> read);
  void NoteOwner(int log, const std::string& owner);

  const ReadOwner read_owner_;
  const Find find_;
  RecentValues<std::string, int> logs_;
  RecentValues<int, std::string> owners_;
  std::atomic<int> num_waiting_{0};
  Worker reads_;  // Ends before what it uses.
};

}  // namespace weft::directory

#endif  // WEFT_SRC_DIRECTORY_OWNER_MEMORY_H_
