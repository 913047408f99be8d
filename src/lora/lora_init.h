// Initial weights of a new adapter. Torch-free.
#ifndef WEFT_SRC_LORA_LORA_INIT_H_
#define WEFT_SRC_LORA_LORA_INIT_H_

#include <cstdint>
#include <vector>

#include "src/lora/adapter_layout.h"

namespace weft::lora {

// Returns weights with PEFT's distributions. A is from U(-1/sqrt(in),
// 1/sqrt(in)), which equals kaiming_uniform(sqrt(5)), and B is zero. For the
// embedding, A is zero and B is from N(0, 1). Each factor draws from its own
// stream, whose key is (seed, expert, layer, module). So an adapter with fewer
// targets gets the same numbers for the targets that it has.
[[nodiscard]] std::vector<float> InitialWeights(const AdapterLayout& layout,
                                                uint64_t seed);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_INIT_H_
