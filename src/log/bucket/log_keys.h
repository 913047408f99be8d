// The keys of one log of a state in an object store. A state has logs 0, 1, ...
//
//   owners/<log>                  the manifest (manifest.h)
//   logs/<log>/records/<place>    the log, object by object (log_object.h)
//   logs/<log>/groups/<name>      groups too large for the log
//   logs/<log>/snapshots/<name>   state after a part of the log
//   logs/<log>/images/<name>      blocks of floats (image.h)
#ifndef WEFT_SRC_LOG_BUCKET_LOG_KEYS_H_
#define WEFT_SRC_LOG_BUCKET_LOG_KEYS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace weft::log {

inline constexpr char kOwnersPrefix[] = "owners/";

struct LogKeys {
  int log = 0;

  std::string Manifest() const { return absl::StrCat(kOwnersPrefix, log); }
  std::string Records() const { return Below("records/"); }
  std::string Groups() const { return Below("groups/"); }
  std::string Snapshots() const { return Below("snapshots/"); }
  std::string Images() const { return Below("images/"); }

  std::string OfPlace(uint64_t place) const;
  // Returns the place of a key that OfPlace has made; 0 for other keys.
  uint64_t PlaceOf(const std::string& key) const;

 private:
  std::string Below(const char* folder) const {
    return absl::StrCat("logs/", log, "/", folder);
  }
};

// Returns the log whose manifest has the key; none if no manifest has it.
std::optional<int> LogOfManifest(const std::string& key);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_LOG_KEYS_H_
