// The rule for names that clients and operators choose.
#ifndef WEFT_SRC_BASE_NAME_H_
#define WEFT_SRC_BASE_NAME_H_

#include "absl/strings/string_view.h"

namespace weft {

// Returns whether `name` may name an adapter, tenant, token, checkpoint,
// snapshot, metadata key or file. A name matches
// [A-Za-z0-9][A-Za-z0-9._-]{0,127} and does not end in a dot.
bool IsName(absl::string_view name);

}  // namespace weft

#endif  // WEFT_SRC_BASE_NAME_H_
