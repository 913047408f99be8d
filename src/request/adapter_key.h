// AdapterKey: what the daemon calls an adapter from the moment it exists.
#ifndef WEFT_SRC_REQUEST_ADAPTER_KEY_H_
#define WEFT_SRC_REQUEST_ADAPTER_KEY_H_

#include <cstdint>

namespace weft {

// A client's name for an adapter may be deleted and given to another one. A key
// is given out once in the life of the process, in ascending order, so work
// that outlives its adapter can never be taken for work of its successor.
enum class AdapterKey : uint64_t { kBaseModel = 0 };

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ADAPTER_KEY_H_
