// Finds which adapters of a state folder cannot be restored, because records of
// the log or image files are damaged.
//
// A lost record cannot show which adapter it changed. But each later record has
// a mark: the sequence number of its adapter's previous record. Some later
// records have the marks of all adapters (Trail in record.h). An adapter counts
// as damaged if one of its marks names a lost record, or if no readable record
// after the damage has a mark of the adapter.
#ifndef WEFT_SRC_LOG_DAMAGE_H_
#define WEFT_SRC_LOG_DAMAGE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/log/log_reader.h"
#include "src/log/state_folder.h"
#include "src/request/adapter_key.h"

namespace weft::records {

struct DamagedAdapter {
  std::string name;  // The adapter's id, or "#KEY" if its id is lost.
  std::string how;   // What is damaged, for a message.
  std::set<std::string> images;  // Names of the adapter's image files.
};

struct Damage {
  std::vector<std::string> places;  // Where the log is damaged.
  std::map<AdapterKey, DamagedAdapter> adapters;
  // Adapters that have or may have lost records, and that do not exist any more
  // at the end of the log.
  std::set<AdapterKey> gone;
  // A key above the keys of all adapters, including adapters whose records are
  // lost.
  uint64_t next_key = 1;
};

// Returns whether LogReader finds damage in the log after the newest snapshot.
// Does not decode the records.
[[nodiscard]] absl::StatusOr<bool> LogIsDamaged(
    const journal::StateFolder& folder);

// Reads the snapshot and the log, and checks the adapters' image files.
// `suspects` are adapter ids. The function checks all bytes of the suspects'
// images, but only the tables and sizes of other images. Without `suspects`, it
// checks all bytes of all images. Errors: DATA_LOSS if the damage affects all
// adapters (a damaged snapshot, or damage that LogReader cannot skip), and
// those of StateFolder. Blocks on the disk. Threads: one at a time.
[[nodiscard]] absl::StatusOr<Damage> FindDamage(
    const journal::StateFolder& folder,
    const std::optional<std::set<std::string>>& suspects);

// Returns OK if `given_up` has the names of all damaged adapters. Otherwise
// returns DATA_LOSS. Its message names the damaged places, every damaged
// adapter that is not in `given_up`, and what the operator can do.
[[nodiscard]] absl::Status RefusalOf(const Damage& damage,
                                     const std::set<std::string>& given_up);

// Returns the error of RefusalOf for one adapter, whose image could not be read
// because of the error `reason`. Returns `reason` itself if it is
// RESOURCE_EXHAUSTED, which is no sign of damage.
[[nodiscard]] absl::Status ImageRefusal(const std::string& adapter_id,
                                        const absl::Status& reason);

}  // namespace weft::records

#endif  // WEFT_SRC_LOG_DAMAGE_H_
