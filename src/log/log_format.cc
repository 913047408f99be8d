#include "src/log/log_format.h"

#include <algorithm>

#include "isa-l/crc.h"

namespace weft::log {
namespace {

constexpr std::string_view kLogMagic = "WEFTLOG1";

// Offsets of fields. The first line is for the header of a segment, the second
// for the header of a record.
constexpr size_t kSalt = 8, kFirstSequence = 16;
constexpr size_t kPlace = 4, kSequence = 8, kLength = 16, kBytesSum = 24;

uint32_t HeaderSum(uint64_t salt, std::string_view header) {
  std::string salted;
  AppendNumber(salt, &salted);
  return Crc32c(header.substr(kPlace, RecordHeader::kBytes - kPlace),
                Crc32c(salted));
}

}  // namespace

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

std::string EncodeSegmentHeader(const SegmentHeader& header) {
  std::string bytes(kLogMagic);
  AppendNumber(header.salt, &bytes);
  AppendNumber(header.first_sequence, &bytes);
  AppendNumber(Crc32c(bytes), &bytes);
  AppendNumber(uint32_t{0}, &bytes);
  return bytes;
}

std::optional<SegmentHeader> DecodeSegmentHeader(std::string_view bytes) {
  const SegmentHeader header{
      .salt = NumberAt<uint64_t>(bytes, kSalt),
      .first_sequence = NumberAt<uint64_t>(bytes, kFirstSequence)};
  if (bytes.substr(0, SegmentHeader::kBytes) != EncodeSegmentHeader(header)) {
    return std::nullopt;
  }
  return header;
}

void AppendRecord(uint64_t salt, uint64_t sequence, uint32_t place,
                  std::string_view bytes, std::string* out) {
  std::string header(sizeof(uint32_t), '\0');
  AppendNumber(place, &header);
  AppendNumber(sequence, &header);
  AppendNumber(uint64_t{bytes.size()}, &header);
  AppendNumber(Crc32c(bytes), &header);
  AppendNumber(HeaderSum(salt, header), out);
  out->append(header, kPlace);
  out->append(bytes);
}

std::string EncodeGroup(uint64_t salt, uint64_t first_sequence,
                        const std::vector<std::string>& records) {
  std::string bytes;
  for (uint32_t place = 0; place < records.size(); ++place) {
    AppendRecord(salt, first_sequence + place, place, records[place], &bytes);
  }
  return bytes;
}

std::optional<RecordHeader> DecodeRecordHeader(uint64_t salt,
                                               std::string_view bytes) {
  if (NumberAt<uint32_t>(bytes, 0) != HeaderSum(salt, bytes)) {
    return std::nullopt;
  }
  return RecordHeader{.place = NumberAt<uint32_t>(bytes, kPlace),
                      .sequence = NumberAt<uint64_t>(bytes, kSequence),
                      .length = NumberAt<uint64_t>(bytes, kLength),
                      .crc = NumberAt<uint32_t>(bytes, kBytesSum)};
}

}  // namespace weft::log
