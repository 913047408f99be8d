// Writes and reads numbers in the bytes of a file. The numbers are
// little-endian, as in the memory of every processor on which Weft runs.
#ifndef WEFT_SRC_LOG_LITTLE_ENDIAN_H_
#define WEFT_SRC_LOG_LITTLE_ENDIAN_H_

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace weft::journal {

static_assert(std::endian::native == std::endian::little);

template <typename T>
requires std::is_unsigned_v<T>
void AppendNumber(T number, std::string* out) {
  out->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// REQUIRES: `bytes` has sizeof(T) bytes from `offset` on.
template <typename T>
requires std::is_unsigned_v<T>
[[nodiscard]] T NumberAt(std::string_view bytes, size_t offset) {
  T number;
  std::memcpy(&number, bytes.data() + offset, sizeof(number));
  return number;
}

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_LITTLE_ENDIAN_H_
