#include "src/log/bucket/log_object.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr std::string_view kGroup = "WEFTGRP1";
constexpr std::string_view kReference = "WEFTREF1";
constexpr size_t kEpochAt = 8;
constexpr size_t kSequenceAt = 16;
constexpr size_t kCountAt = 24;
constexpr size_t kSumAt = 32;

// Returns the header of an object, without `rest`, which its sum covers.
std::string Header(std::string_view magic, uint64_t epoch,
                   uint64_t first_sequence, uint64_t count,
                   std::string_view rest = "") {
  std::string header(magic);
  AppendNumber(epoch, &header);
  AppendNumber(first_sequence, &header);
  AppendNumber(count, &header);
  AppendNumber(Crc32c(rest, Crc32c(header)), &header);
  return header;
}

// Returns whether the bytes begin with a header of this kind.
bool HasHeader(std::string_view bytes, std::string_view magic,
               std::string_view rest = "") {
  return bytes.size() >= LogObject::kSealBytes && bytes.starts_with(magic) &&
         NumberAt<uint32_t>(bytes, kSumAt) ==
             Crc32c(rest, Crc32c(bytes.substr(0, kSumAt)));
}

}  // namespace

std::string EncodeLogObject(uint64_t epoch, uint64_t first_sequence,
                            const std::vector<std::string>& records) {
  return absl::StrCat(Header(kGroup, epoch, first_sequence, records.size()),
                      EncodeGroup(epoch, first_sequence, records));
}

std::string EncodeReference(uint64_t epoch, uint64_t first_sequence,
                            const std::string& key) {
  return absl::StrCat(
      Header(kReference, epoch, first_sequence, key.size(), key), key);
}

std::string EncodeSeal(uint64_t epoch) { return Header(kGroup, epoch, 0, 0); }

absl::StatusOr<LogObject> DecodeLogObject(std::string_view bytes,
                                          const std::string& name) {
  const absl::Status damaged =
      absl::DataLossError(absl::StrCat(name, " of the log is damaged"));
  const std::string_view rest =
      bytes.substr(std::min(bytes.size(), LogObject::kSealBytes));
  const bool refers = HasHeader(bytes, kReference, rest);
  if (!refers && !HasHeader(bytes, kGroup)) return damaged;
  LogObject object{.epoch = NumberAt<uint64_t>(bytes, kEpochAt),
                   .first_sequence = NumberAt<uint64_t>(bytes, kSequenceAt)};
  const auto count = NumberAt<uint64_t>(bytes, kCountAt);
  if (refers) {
    object.reference = rest;
    return count == rest.size() ? absl::StatusOr<LogObject>(std::move(object))
                                : damaged;
  }
  bytes = rest;
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
