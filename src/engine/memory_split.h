// How a device's memory is shared out at the start: adapters, key/value cache,
// activations, and a reserve. Arithmetic only; who asks the device and the
// model is memory_plan.h.
#ifndef WEFT_SRC_ENGINE_MEMORY_SPLIT_H_
#define WEFT_SRC_ENGINE_MEMORY_SPLIT_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace weft::engine {

// Bytes, but for numbers of adapters.
struct MemoryNeeds {
  int64_t available = 0;      // What the model has left of the device.
  int64_t adapter = 0;        // Of one of the largest rank, in training.
  int64_t context = 0;        // Keys and values of the longest sequence.
  int64_t activations = 0;    // Of the least micro-batch, with a head's chunk.
  int64_t full_batch = 0;     // Likewise of one that is long enough.
  int64_t most_adapters = 1;  // No use for more.
  int64_t most_cache = 0;     // Likewise.
  // What the operator has set, which is neither lowered nor raised; 0: nothing.
  int64_t wanted_adapters = 0;
  int64_t wanted_cache = 0;
  int64_t wanted_activations = 0;
};

struct MemorySplit {
  int64_t num_adapters = 0;
  int64_t adapters = 0;  // For fewer of the largest if the operator wants more.
  int64_t cache = 0;
  int64_t activations = 0;
  int64_t reserve = 0;
};

// Everybody gets what it needs: one adapter, one context, the least
// micro-batch. Then what is left goes to the activations of a full micro-batch,
// to the cache up to a quarter of what is there without the reserve, to further
// adapters, and the rest again to the activations. The reserve is for
// libraries' workspaces, further versions of adapters and fragmentation.
// Adapters that the operator wants are rarely of the largest rank on every
// layer: all of them are taken, with the memory that there is for them.
// Errors: RESOURCE_EXHAUSTED with the bytes of each and the flags that change
// them.
[[nodiscard]] absl::StatusOr<MemorySplit> SplitMemory(const MemoryNeeds& needs);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MEMORY_SPLIT_H_
