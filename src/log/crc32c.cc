#include "src/log/crc32c.h"

#include <algorithm>
#include <cstddef>

#include "isa-l/crc.h"

namespace weft::journal {

uint32_t Crc32c(std::string_view bytes, uint32_t crc) {
  // The library counts bytes in an int.
  constexpr size_t kMost = size_t{1} << 30;
  uint32_t state = ~crc;
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.size(), kMost);
    // The library takes a non-const pointer but only reads.
    auto* const data = reinterpret_cast<unsigned char*>(
        const_cast<char*>(bytes.data()));  // NOLINT
    state = ::crc32_iscsi(data, static_cast<int>(size), state);
    bytes.remove_prefix(size);
  }
  return ~state;
}

}  // namespace weft::journal
