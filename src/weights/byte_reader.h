// Reads little-endian fields from the bytes of an untrusted file. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_BYTE_READER_H_
#define WEFT_SRC_WEIGHTS_BYTE_READER_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace weft::weights {

// Reads from front to back. A read past the end returns zeros or no bytes and
// clears ok() for good. So a caller reads a whole record and checks ok() once.
class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : bytes_(bytes) {}

  // Reads an unsigned integer of `num_bytes` <= 8 bytes.
  uint64_t Uint(size_t num_bytes) {
    uint64_t value = 0;
    const absl::string_view bytes = Bytes(num_bytes);
    for (size_t i = bytes.size(); i > 0; --i) {
      value = (value << 8) | static_cast<unsigned char>(bytes[i - 1]);
    }
    return value;
  }
  uint8_t U8() { return static_cast<uint8_t>(Uint(1)); }
  uint16_t U16() { return static_cast<uint16_t>(Uint(2)); }
  uint32_t U32() { return static_cast<uint32_t>(Uint(4)); }
  uint64_t U64() { return Uint(8); }

  // Reads the next `num_bytes` bytes. Returns no bytes if fewer remain.
  absl::string_view Bytes(uint64_t num_bytes) {
    if (!ok_ || num_bytes > remaining()) {
      ok_ = false;
      return {};
    }
    const absl::string_view bytes = bytes_.substr(position_, num_bytes);
    position_ += num_bytes;
    return bytes;
  }

  // Reads the bytes before the next newline, and skips the newline. Without a
  // newline returns no bytes and clears ok().
  absl::string_view Line() {
    const size_t end = bytes_.find('\n', position_);
    if (end == absl::string_view::npos) {
      ok_ = false;
      return {};
    }
    const absl::string_view line = Bytes(end - position_);
    (void)Bytes(1);
    return line;
  }

  bool ok() const { return ok_; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }

 private:
  absl::string_view bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_BYTE_READER_H_
