// The names of pickle's opcodes, protocols 0 to 5, for messages. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_
#define WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_

#include <cstdint>
#include <string>

namespace weft::weights {

// Returns the opcode's name, such as "GLOBAL", or a number such as "0xff" for a
// byte that is not an opcode.
[[nodiscard]] std::string PickleOpcodeName(uint8_t opcode);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_PICKLE_OPCODES_H_
