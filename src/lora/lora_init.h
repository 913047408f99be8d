// Initial weights of a new adapter. Torch-free.
#ifndef WEFT_SRC_LORA_LORA_INIT_H_
#define WEFT_SRC_LORA_LORA_INIT_H_

#include <cstdint>
#include <vector>

#include "src/peft/adapter_layout.h"

namespace weft::lora {

// Weights as PEFT draws them: A from U(-1/sqrt(in), 1/sqrt(in)), which is its
// kaiming_uniform(sqrt(5)), and B zero. The embedding has A zero and B from
// N(0, 1). Each matrix has its own stream keyed by (seed, layer, module), so
// that an adapter with fewer targets or layers draws the same numbers for those
// it has.
[[nodiscard]] std::vector<float> InitialWeights(const AdapterLayout& layout,
                                                uint64_t seed);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_INIT_H_
