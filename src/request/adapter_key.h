// AdapterKey is the daemon's own name for an adapter, from the adapter's
// creation on.
#ifndef WEFT_SRC_REQUEST_ADAPTER_KEY_H_
#define WEFT_SRC_REQUEST_ADAPTER_KEY_H_

#include <cstdint>

namespace weft {

// A client may delete an adapter and reuse its name. Keys ascend and are never
// reused within a process. So work of a deleted adapter is never mistaken for
// work of a new adapter with the same name.
enum class AdapterKey : uint64_t { kBaseModel = 0 };

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ADAPTER_KEY_H_
