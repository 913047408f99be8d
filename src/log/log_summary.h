// Reads the log of --state-dir to its end before it is replayed, so that new
// work can be recorded while the replay runs.
#ifndef WEFT_SRC_LOG_LOG_SUMMARY_H_
#define WEFT_SRC_LOG_LOG_SUMMARY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/log/record.h"
#include "src/log/recorder.h"
#include "src/log/state.h"
#include "src/request/adapter_key.h"

namespace weft::log {

// What the log says about all adapters with one id. After an adapter is
// removed, a new adapter may get its id.
struct LoggedAdapter {
  // Sequence number of the last record that changes one of these adapters.
  uint64_t last = 0;
  std::string tenant;
};

struct LogSummary {
  uint64_t num_records = 0;
  uint64_t next_sequence = 1;  // Sequence of the first record to write.
  uint64_t num_bytes = 0;
  uint64_t torn_bytes = 0;  // Bytes cut off the log's end; no client got a
                            // reply for them.
  uint64_t next_key = 1;    // Is greater than every key used so far.
  uint64_t last_epoch = 0;  // The latest epoch so far.
  std::set<AdapterKey> adapters;  // Adapters at the log's end.
  // Adapters that the log changes, by id. Adapters that the log removes are
  // included.
  std::map<std::string, LoggedAdapter> changed;
  // The ids of those that are not on their way to another log.
  std::set<std::string> names;
  // The units on their way to or from another log.
  std::set<std::string> moving;
  // The `work` of the requests that have begun and not ended.
  std::vector<uint64_t> given_up;
  uint64_t next_work = 1;  // Is greater than every AcceptedRecord::work.
  Notes notes;
};

struct LogReading {
  size_t max_resident = 1;  // Adapters that the device has room for.
  // Checks an image of so many blocks that the log names. Empty: checks only
  // the image's table (CheckImageTable).
  std::function<absl::Status(const std::string& name, size_t num_blocks)>
      check_image = {};
  bool cuts = true;  // Cut off the log's torn tail (log_reader.h).
};

// Returns the newest snapshot; an empty one if there is none.
// Errors: DATA_LOSS, and those of State. Blocks on the disk.
absl::StatusOr<Snapshot> ReadSnapshot(const State& state);
// Returns the snapshot of a file that State::ReadSnapshot has returned. Errors:
// DATA_LOSS.
absl::StatusOr<Snapshot> ToSnapshot(const std::optional<SnapshotFile>& file);

// Reads the log after the snapshot. Errors: DATA_LOSS (a damaged record or
// image), FAILED_PRECONDITION (a record needs more adapters at once than the
// device has room for), and those of LogReader. Blocks on the disk.
absl::StatusOr<LogSummary> ReadLog(const State& state, const Snapshot& snapshot,
                                   const LogReading& reading);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_LOG_SUMMARY_H_
