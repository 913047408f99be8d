// Assigns the rows of a batch to adapter versions.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_ROUTING_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_ROUTING_H_

#include <cstdint>

#include "src/lora/lora_linear.h"

namespace weft::engine {

// Adds rows [begin, end) of `version` to the routing, and merges them with
// adjacent rows of the same version. Adds nothing if `version` is null, which
// means the base model.
inline void AddRows(lora::LoraRouting& routing,
                    const lora::AdapterVersionPtr& version, int64_t begin,
                    int64_t end) {
  if (version == nullptr) return;
  if (!routing.empty() && routing.back().version == version &&
      routing.back().end == begin) {
    routing.back().end = end;
    return;
  }
  routing.push_back({.begin = begin, .end = end, .version = version});
}

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_ROUTING_H_
