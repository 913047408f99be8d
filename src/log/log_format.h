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

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft::journal {

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

[[nodiscard]] std::string EncodeSegmentHeader(const SegmentHeader& header);
// Returns none if the bytes are not a header. REQUIRES: `bytes` has at least
// SegmentHeader::kBytes bytes.
[[nodiscard]] std::optional<SegmentHeader> DecodeSegmentHeader(
    std::string_view bytes);

// Appends a record, which is its header and its bytes, to `out`.
void AppendRecord(uint64_t salt, uint64_t sequence, uint32_t place,
                  std::string_view bytes, std::string* out);
// Returns none if the bytes are not the header of a record of this segment. The
// caller checks the record's bytes against `crc`. REQUIRES: `bytes` has at
// least RecordHeader::kBytes bytes.
[[nodiscard]] std::optional<RecordHeader> DecodeRecordHeader(
    uint64_t salt, std::string_view bytes);

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_LOG_FORMAT_H_
