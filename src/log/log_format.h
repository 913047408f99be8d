// Encodes and decodes the bytes of a segment, which is one file of the log. All
// numbers are little-endian.
//
//   segment  "WEFTLOG1" | u64 salt | u64 first sequence | u32 CRC32C of all
//            before | u32 0
//   record   u32 CRC32C of the salt and the rest of this header | u32 place in
//            its group | u64 sequence | u64 length | u32 CRC32C of the bytes |
//            bytes
//
// Records go to the disk in groups, each by one write and one sync. A group is
// written only when all earlier groups are on disk. So a record of a group
// proves that all records before the group were once on disk.
//
// The checksum of a record's header also covers the segment's random salt. So
// neither old bytes on the disk nor a client's bytes inside a record pass for a
// record of this segment.
#ifndef WEFT_SRC_LOG_LOG_FORMAT_H_
#define WEFT_SRC_LOG_LOG_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace weft::log {

// Write and read numbers in the bytes of a file. The numbers are little-endian,
// as in the memory of every processor on which Weft runs.
static_assert(std::endian::native == std::endian::little);

template <typename T>
requires std::is_unsigned_v<T>
void AppendNumber(T number, std::string* out) {
  out->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// REQUIRES: `bytes` has sizeof(T) bytes from `offset` on.
template <typename T>
requires std::is_unsigned_v<T> T NumberAt(std::string_view bytes,
                                          size_t offset) {
  T number;
  std::memcpy(&number, bytes.data() + offset, sizeof(number));
  return number;
}

// Returns the CRC32C (Castagnoli) of `bytes`. If `crc` is the CRC of the text
// that precedes `bytes`, returns the CRC of the whole text.
uint32_t Crc32c(std::string_view bytes, uint32_t crc = 0);

struct SegmentHeader {
  static constexpr size_t kBytes = 32;
  uint64_t salt = 0;
  uint64_t first_sequence = 0;
};

struct RecordHeader {
  static constexpr size_t kBytes = 28;
  uint32_t place = 0;
  uint64_t sequence = 0;
  uint64_t length = 0;
  uint32_t crc = 0;
};

std::string EncodeSegmentHeader(const SegmentHeader& header);
// Returns none if the bytes are not a header. REQUIRES: `bytes` has at least
// SegmentHeader::kBytes bytes.
std::optional<SegmentHeader> DecodeSegmentHeader(std::string_view bytes);

// Appends a record, which is its header and its bytes, to `out`.
void AppendRecord(uint64_t salt, uint64_t sequence, uint32_t place,
                  std::string_view bytes, std::string* out);
// Returns consecutive records as one group.
std::string EncodeGroup(uint64_t salt, uint64_t first_sequence,
                        const std::vector<std::string>& records);
// Returns none if the bytes are not the header of a record of this segment. The
// caller checks the record's bytes against `crc`. REQUIRES: `bytes` has at
// least RecordHeader::kBytes bytes.
std::optional<RecordHeader> DecodeRecordHeader(uint64_t salt,
                                               std::string_view bytes);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_LOG_FORMAT_H_
