// Finds which adapters of a state folder cannot be restored, because records of
// the log or image files are damaged.
//
// A lost record cannot say whose it was, but the trails of later records tell
// (record.h). An adapter without any later trail may have lost records, too, so
// it counts as damaged.
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
  std::string how;
  std::set<std::string> images;  // The image files that the state names for it.
};

struct Damage {
  std::vector<std::string> places;  // Where the log is damaged.
  std::map<AdapterKey, DamagedAdapter> adapters;
  // Adapters with lost records that do not exist any more at the log's end.
  std::set<AdapterKey> gone;
  // Is greater than the key of every adapter, also of those whose records are
  // lost.
  uint64_t next_key = 1;
};

// Returns whether a record of the log is damaged. Reads the log and decodes
// nothing.
[[nodiscard]] absl::StatusOr<bool> LogIsDamaged(
    const journal::StateFolder& folder);

// Reads the snapshot and the log. Checks all bytes of the images of `suspects`,
// which are adapters' ids, and only the tables of other images; none: all bytes
// of all images. Errors: DATA_LOSS if the damage affects all adapters (the
// snapshot, the end of the log), those of StateFolder. Blocks on the disk.
// Threads: one at a time.
[[nodiscard]] absl::StatusOr<Damage> FindDamage(
    const journal::StateFolder& folder,
    const std::optional<std::set<std::string>>& suspects);

// Returns DATA_LOSS, which names the places, each damaged adapter that is not
// in `given_up` and what the operator can do. Returns OK if there is none.
[[nodiscard]] absl::Status RefusalOf(const Damage& damage,
                                     const std::set<std::string>& given_up);

// Returns the same for one adapter whose image could not be read for this
// reason. Returns the reason itself if it says nothing about the file
// (RESOURCE_EXHAUSTED).
[[nodiscard]] absl::Status ImageRefusal(const std::string& adapter_id,
                                        const absl::Status& reason);

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_DAMAGE_H_
