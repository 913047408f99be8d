#include "src/log/bucket/log_object.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr std::string_view kMagic = "WEFTGRP1";
constexpr size_t kEpochAt = 8;
constexpr size_t kSequenceAt = 16;
constexpr size_t kCountAt = 24;
constexpr size_t kSumAt = 32;

std::string Header(uint64_t epoch, uint64_t first_sequence, uint64_t count) {
  std::string header(kMagic);
  AppendNumber(epoch, &header);
  AppendNumber(first_sequence, &header);
  AppendNumber(count, &header);
  AppendNumber(Crc32c(header), &header);
  return header;
}

}  // namespace

std::string EncodeLogObject(uint64_t epoch, uint64_t first_sequence,
                            const std::vector<std::string>& records) {
  return absl::StrCat(Header(epoch, first_sequence, records.size()),
                      EncodeGroup(epoch, first_sequence, records));
}

std::string EncodeSeal(uint64_t epoch) { return Header(epoch, 0, 0); }

absl::StatusOr<LogObject> DecodeLogObject(std::string_view bytes,
                                          const std::string& name) {
  const absl::Status damaged =
      absl::DataLossError(absl::StrCat(name, " of the log is damaged"));
  if (bytes.size() < LogObject::kSealBytes || !bytes.starts_with(kMagic) ||
      NumberAt<uint32_t>(bytes, kSumAt) != Crc32c(bytes.substr(0, kSumAt))) {
    return damaged;
  }
  LogObject object{.epoch = NumberAt<uint64_t>(bytes, kEpochAt),
                   .first_sequence = NumberAt<uint64_t>(bytes, kSequenceAt)};
  const auto count = NumberAt<uint64_t>(bytes, kCountAt);
  bytes.remove_prefix(LogObject::kSealBytes);
  for (uint64_t place = 0; place < count; ++place) {
    if (bytes.size() < RecordHeader::kBytes) return damaged;
    const std::optional<RecordHeader> header =
        DecodeRecordHeader(object.epoch, bytes);
    bytes.remove_prefix(RecordHeader::kBytes);
    if (!header || header->place != place ||
        header->sequence != object.first_sequence + place ||
        header->length > bytes.size() ||
        Crc32c(bytes.substr(0, header->length)) != header->crc) {
      return damaged;
    }
    object.records.emplace_back(bytes.substr(0, header->length));
    bytes.remove_prefix(header->length);
  }
  if (!bytes.empty()) return damaged;
  return object;
}

}  // namespace weft::log
