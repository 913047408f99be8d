// Computes CRC32C (Castagnoli) with the ISA-L library.
#ifndef WEFT_SRC_LOG_CRC32C_H_
#define WEFT_SRC_LOG_CRC32C_H_

#include <cstdint>
#include <string_view>

namespace weft::journal {

// Returns the CRC of `bytes`. If `crc` is the CRC of the text that precedes
// `bytes`, returns the CRC of the whole text.
[[nodiscard]] uint32_t Crc32c(std::string_view bytes, uint32_t crc = 0);

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_CRC32C_H_
