// The names of pickle's opcodes, protocols 0 to 5, for messages. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_
#define WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_

#include <cstdint>
#include <string>

namespace weft::weights {

// "GLOBAL", or "0xff" for a byte that is no opcode.
[[nodiscard]] std::string PickleOpcodeName(uint8_t opcode);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_
