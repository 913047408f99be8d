// Keeps the adapters with Durability::kCheckpoint. For each adapter, keeps the
// load that a server makes when it starts. This load reads the checkpoint that
// the adapter most recently loaded, or saved with kind train.
//
// Threads: not thread-safe.
#ifndef WEFT_SRC_LOG_RESTORE_POINTS_H_
#define WEFT_SRC_LOG_RESTORE_POINTS_H_

#include <map>

#include "src/log/record.h"
#include "src/request/adapter_key.h"

namespace weft::records {

class RestorePoints {
 public:
  // Updates the adapters from the next record of the log. Returns true if the
  // record concerns an adapter with Durability::kCheckpoint. A replay then does
  // nothing else with the record.
  bool Follow(const Record& record);

  [[nodiscard]] bool contains(AdapterKey key) const {
    return adapters_.contains(key);
  }
  // Returns the record of each adapter. StoredAdapter::restore is the load that
  // a server makes when it starts, or none if there is no checkpoint.
  [[nodiscard]] const std::map<AdapterKey, StoredAdapter>& adapters() const {
    return adapters_;
  }

 private:
  std::map<AdapterKey, StoredAdapter> adapters_;
};

}  // namespace weft::records

#endif  // WEFT_SRC_LOG_RESTORE_POINTS_H_
