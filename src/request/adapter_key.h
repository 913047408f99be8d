// AdapterKey is the daemon's own name of an adapter, from its creation on.
#ifndef WEFT_SRC_REQUEST_ADAPTER_KEY_H_
#define WEFT_SRC_REQUEST_ADAPTER_KEY_H_

#include <cstdint>

namespace weft {

// A client may delete an adapter and give its name to another one. Keys ascend
// and are never used twice in the life of a process. So the work of a deleted
// adapter is never taken for work of its successor.
enum class AdapterKey : uint64_t { kBaseModel = 0 };

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ADAPTER_KEY_H_
