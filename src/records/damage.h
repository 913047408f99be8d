// Finds which adapters of a state folder cannot be restored, because records of
// the log or image files are damaged.
//
// A lost record does not show which adapter it changed, but each later record
// names the adapter's latest record before it (Trail in record.h). If no such
// later record exists, the adapter may have lost records, and counts as
// damaged.
#ifndef WEFT_SRC_RECORDS_DAMAGE_H_
#define WEFT_SRC_RECORDS_DAMAGE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/journal/log_reader.h"
#include "src/journal/state_folder.h"
#include "src/request/adapter_key.h"

namespace weft::records {

struct DamagedAdapter {
  std::string name;  // The adapter's id, or "#KEY" if all its records are lost.
  std::string how;   // What is damaged, for a message.
  std::set<std::string> images;  // The adapter's image files (record.h).
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

// Returns whether a record of the log after the newest snapshot is damaged.
// Checks the records without decoding them.
[[nodiscard]] absl::StatusOr<bool> LogIsDamaged(
    const journal::StateFolder& folder);

// Reads the snapshot and the log, and checks the adapters' image files.
// `suspects` are adapter ids: checks all bytes of their images, but only the
// tables of other images. Without `suspects`, checks all bytes of all images.
// Errors: DATA_LOSS if the damage affects all adapters (a damaged snapshot, or
// a log that cannot be read on), those of StateFolder. Blocks on the disk.
// Threads: one at a time.
[[nodiscard]] absl::StatusOr<Damage> FindDamage(
    const journal::StateFolder& folder,
    const std::optional<std::set<std::string>>& suspects);

// Returns OK if `given_up` has the names of all damaged adapters. Otherwise
// returns DATA_LOSS, which names the damaged places, every other damaged
// adapter and what the operator can do.
[[nodiscard]] absl::Status RefusalOf(const Damage& damage,
                                     const std::set<std::string>& given_up);

// Returns the error of RefusalOf for one adapter, whose image could not be read
// because of `reason`. Returns `reason` itself if it is RESOURCE_EXHAUSTED,
// which is no sign of damage.
[[nodiscard]] absl::Status ImageRefusal(const std::string& adapter_id,
                                        const absl::Status& reason);

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_DAMAGE_H_
