// What each tenant has used and done through this front. The ledger keeps it.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ACCOUNTS_H_
#define WEFT_SERVER_TINKER_ACCOUNTS_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/call/caller.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/ledger.h"

namespace weft::server::tinker {

// What each tenant uses is counted by the hour and the session. The ledger
// keeps the counts, as of the last minute. A count is forgotten after this
// time.
inline constexpr absl::Duration kUsageTime = absl::Hours(30 * 24);
// The most counts of one owner. Beyond that, more sessions of an hour count as
// work without a session.
inline constexpr int64_t kMaxUsageRows = 4096;

// The newest events of each owner's checkpoints that are kept, also across
// restarts. weftd's log has an audit line for each call that changes something,
// over gRPC, too.
inline constexpr size_t kMaxEvents = 1000;

// What was used in an hour.
struct UsageCounts {
  int64_t train_tokens = 0;
  int64_t prompt_tokens = 0;  // Without cached_tokens.
  int64_t cached_tokens = 0;
  int64_t sampled_tokens = 0;
  int64_t checkpoints = 0;
};
struct UsageKey {
  std::string owner;
  int64_t hour = 0;  // In hours since the epoch.
  std::string session;

  friend auto operator<=>(const UsageKey&, const UsageKey&) = default;
};

class Accounts {
 public:
  // `ledger` outlives this object.
  explicit Accounts(const Ledger* ledger) : ledger_(*ledger) {}

  // Adds to the counts of the hour. `session` may be empty.
  void Count(const std::string& owner, const std::string& session,
             const UsageCounts& counts);
  // Keeps an event of a checkpoint. `action` is what was done: "create",
  // "copy", "read" or "delete". `purpose` says why it was read; else empty.
  void Note(const Caller& caller, const char* action,
            const CheckpointPath& path, const char* purpose = "");
  // Notes that a sample without a sampling session has read the checkpoint, at
  // most once an hour.
  void NoteSample(const Caller& caller, const CheckpointPath& path);
  // Writes the counts that have changed to the ledger, and forgets old ones.
  void Sweep(absl::Time now);
  // Reads counts and events from the ledger.
  void Restore();

  // Passes the counts of the hours [begin, end) to `use`, those of one owner
  // together. A caller that sees all adapters gets those of all owners.
  void ForEachCount(const Caller& caller, int64_t begin, int64_t end,
                    const std::function<void(const UsageKey&,
                                             const UsageCounts&)>& use) const;
  // Returns the events of the nanoseconds [begin, end) since the epoch, oldest
  // first, with their times; those of all owners for a caller that sees all
  // adapters.
  std::vector<std::pair<int64_t, Json>> Events(const Caller& caller,
                                               int64_t begin,
                                               int64_t end) const;

 private:
  struct UsageRow {
    UsageCounts counts;
    bool changed = false;          // The ledger has not these counts yet.
    std::shared_ptr<void> charge;  // Ledger::ChargeIfRoom.
  };
  // What a client did to a checkpoint.
  struct KeptEvent {
    Json event;
    std::shared_ptr<void> charge;  // Ledger::ChargeIfRoom.
  };

  // Returns the row, which is made and charged if there is none.
  UsageRow& RowOf(const UsageKey& key);
  void Put(const UsageKey& key, const UsageCounts& counts);

  const Ledger& ledger_;
  std::map<UsageKey, UsageRow> usage_;
  // The events of each owner by their times, in nanoseconds.
  std::map<std::string, std::map<int64_t, KeptEvent>> events_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ACCOUNTS_H_
