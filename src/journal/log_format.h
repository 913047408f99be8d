// The bytes of a segment of the log; all numbers are little-endian.
//
//   segment  "WEFTLOG1" | salt u64 | first sequence u64 | CRC32C u32 | 0 u32
//   record   CRC32C of the rest of this header u32 | place in its group u32 |
//            sequence u64 | length u64 | CRC32C of the bytes u32 | bytes
//
// A group is written by one write and one sync. Everything before a group was
// on disk when the group was written. So each record of a group proves that all
// records before the group were on disk. The sum of a record's header starts
// with the segment's random salt. So neither old bytes on the disk nor a
// client's bytes inside a record can pass for a record of this segment.
#ifndef WEFT_SRC_JOURNAL_LOG_FORMAT_H_
#define WEFT_SRC_JOURNAL_LOG_FORMAT_H_

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
// Returns none unless the bytes are a header. REQUIRES: kBytes bytes.
[[nodiscard]] std::optional<SegmentHeader> DecodeSegmentHeader(
    std::string_view bytes);

// Appends a record, header and bytes, to `out`.
void AppendRecord(uint64_t salt, uint64_t sequence, uint32_t place,
                  std::string_view bytes, std::string* out);
// Returns none unless the bytes are the header of a record of this segment. The
// caller checks the record's bytes against `crc`. REQUIRES: kBytes bytes.
[[nodiscard]] std::optional<RecordHeader> DecodeRecordHeader(
    uint64_t salt, std::string_view bytes);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_LOG_FORMAT_H_
