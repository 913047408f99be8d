// CRC32C (Castagnoli). The library uses the processor's own instructions.
#ifndef WEFT_SRC_JOURNAL_CRC32C_H_
#define WEFT_SRC_JOURNAL_CRC32C_H_

#include <cstdint>
#include <string_view>

namespace weft::journal {

// Returns the CRC of earlier bytes, whose CRC is `crc`, followed by `bytes`.
[[nodiscard]] uint32_t Crc32c(std::string_view bytes, uint32_t crc = 0);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_CRC32C_H_
