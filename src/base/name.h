// The rule for names that clients and operators choose.
#ifndef WEFT_SRC_BASE_NAME_H_
#define WEFT_SRC_BASE_NAME_H_

#include "absl/strings/string_view.h"

namespace weft {

// Names of adapters, tenants, checkpoints, snapshots and imported files:
// [A-Za-z0-9][A-Za-z0-9._-]{0,127}, not ending in a dot. The empty string is
// not a name.
[[nodiscard]] bool IsName(absl::string_view name);

}  // namespace weft

#endif  // WEFT_SRC_BASE_NAME_H_
