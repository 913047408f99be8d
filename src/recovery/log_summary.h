// Reads the log of --state-dir to its end before it is replayed, so that new
// work can be recorded while the replay runs.
#ifndef WEFT_SRC_RECOVERY_LOG_SUMMARY_H_
#define WEFT_SRC_RECOVERY_LOG_SUMMARY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/journal/log_reader.h"
#include "src/journal/state_folder.h"
#include "src/records/record.h"
#include "src/records/recorder.h"
#include "src/records/restore_points.h"
#include "src/request/adapter_key.h"

namespace weft::engine {

// An adapter's id whose adapters the log changes.
struct LoggedAdapter {
  uint64_t last = 0;  // The sequence of the last record that changes one.
  std::string tenant;
};

struct LogSummary {
  uint64_t num_records = 0;
  uint64_t next_sequence = 1;  // That of the first record to write.
  uint64_t num_bytes = 0;
  uint64_t torn_bytes = 0;  // Bytes cut off the log's end; no client got a
                            // reply for them.
  uint64_t next_key = 1;    // Is greater than every key.
  uint64_t last_epoch = 0;  // No epoch is later.
  records::Marks marks;     // All adapters at the log's end.
  records::RestorePoints restores;  // Adapters of durability checkpoint.
  // Those of durability step, by id. Ids of adapters that the log removes are
  // included.
  std::map<std::string, LoggedAdapter> changed;
  // Requests that had begun but not completed when the process ended.
  std::vector<uint64_t> given_up;
};

struct LogReading {
  uint64_t first_sequence = 1;
  std::set<AdapterKey> skipped;  // Adapters whose records are left out.
  bool damaged = false;          // The log may have holes.
  size_t max_resident = 1;       // Adapters on the device together.
};

// Reads the log behind the snapshot and cuts off its torn tail. Errors:
// DATA_LOSS (what no start can replay, a missing image), FAILED_PRECONDITION (a
// batch has more adapters than the device has room for). Blocks on the disk.
[[nodiscard]] absl::StatusOr<LogSummary> ReadLog(
    const journal::StateFolder& folder, const records::Snapshot& snapshot,
    const LogReading& reading);

// Makes the reader go on behind a hole of the log. Returns whether a process
// began in the hole: then requests that had begun before it were given up.
// REQUIRES: Next has returned DATA_LOSS. Errors: those of SkipDamage.
[[nodiscard]] absl::StatusOr<bool> PassHole(const journal::StateFolder& folder,
                                            journal::LogReader* reader);

}  // namespace weft::engine

#endif  // WEFT_SRC_RECOVERY_LOG_SUMMARY_H_
