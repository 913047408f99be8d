// The bytes of a segment of the log; all numbers are little-endian.
//
//   segment  "WEFTLOG1" | salt u64 | first sequence u64 | CRC32C u32 | 0 u32
//   record   CRC32C u32 | place in its group u32 | sequence u64 | length u64 |
//            bytes
//
// A group is what was written by one write and one sync. When a record's group
// was written, everything before that group was on disk: so a record proves
// that those before its group were there.
// A record's sum is over its header, its bytes and the segment's salt, which is
// random: no other segment's record, nor a client's bytes inside of a record,
// pass for a record of this one.
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
  static constexpr size_t kBytes = 24;
  uint32_t crc = 0;
  uint32_t place = 0;
  uint64_t sequence = 0;
  uint64_t length = 0;
};

[[nodiscard]] std::string EncodeSegmentHeader(const SegmentHeader& header);
// None unless the bytes are those of a header. REQUIRES: kBytes bytes.
[[nodiscard]] std::optional<SegmentHeader> DecodeSegmentHeader(
    std::string_view bytes);

// Appends header and bytes of a record to `out`.
void AppendRecord(uint64_t salt, uint64_t sequence, uint32_t place,
                  std::string_view bytes, std::string* out);
// REQUIRES: kBytes bytes. Says nothing about whether the record is good.
[[nodiscard]] RecordHeader DecodeRecordHeader(std::string_view bytes);
// Whether the header's sum is that of the record.
[[nodiscard]] bool SumIsGood(uint64_t salt, const RecordHeader& header,
                             std::string_view bytes);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_LOG_FORMAT_H_
