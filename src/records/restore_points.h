// The adapters of durability checkpoint, and from what a start loads each: the
// last checkpoint of kind train that was saved or loaded.
//
// Threads: not thread-safe.
#ifndef WEFT_SRC_RECORDS_RESTORE_POINTS_H_
#define WEFT_SRC_RECORDS_RESTORE_POINTS_H_

#include <map>

#include "src/records/record.h"
#include "src/request/adapter_key.h"

namespace weft::records {

class RestorePoints {
 public:
  // Follows the log. Returns true if the record is one of such an adapter, so
  // that there is nothing else to do with it.
  bool Follow(const Record& record);

  [[nodiscard]] bool contains(AdapterKey key) const {
    return adapters_.contains(key);
  }
  // Returns the adapters' records, each with the present load.
  [[nodiscard]] const std::map<AdapterKey, AdapterRecord>& adapters() const {
    return adapters_;
  }

 private:
  std::map<AdapterKey, AdapterRecord> adapters_;
};

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_RESTORE_POINTS_H_
