#include "src/log/folder/segment_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/status_macros.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr size_t kScanBytes = 1 << 20;

absl::StatusOr<UniqueFd> OpenLog(int dir, const std::string& name, int mode) {
  UniqueFd fd;
  if (!Failpoint("journal.open_log")) {
    fd = UniqueFd(::openat(dir, name.c_str(),
                           mode | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  }
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SegmentReader>> SegmentReader::Open(
    const StateFolder& folder, uint64_t first_sequence) {
  WEFT_ASSIGN_OR_RETURN(std::vector<uint64_t> segments, folder.Segments());
  const auto after =
      std::upper_bound(segments.begin(), segments.end(), first_sequence);
  // If any segment holds record `first_sequence`, it is the one before `after`.
  if (after != segments.begin()) segments.erase(segments.begin(), after - 1);
  std::unique_ptr<SegmentReader> reader(
      new SegmentReader(&folder, std::move(segments), first_sequence));
  WEFT_RETURN_IF_ERROR(reader->SyncLastAndSumSizes());
  return reader;
}

absl::Status SegmentReader::SyncLastAndSumSizes() {
  for (const uint64_t first : segments_) {
    const std::string name = StateFolder::SegmentName(first);
    WEFT_ASSIGN_OR_RETURN(const UniqueFd fd,
                          OpenLog(folder_->log_directory(), name, O_RDONLY));
    WEFT_ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get(), name));
    total_bytes_ += size;
    if (first != segments_.back()) continue;
    // A killed process may have left records that it did not sync. Once read,
    // they count as durable, so they are synced first.
    if (Failpoint("journal.sync_tail") || ::fdatasync(fd.get()) != 0) {
      return ErrnoStatus(errno, "syncing " + name);
    }
    // After a failed sync in an earlier process, the page cache may differ from
    // the disk. The cache is dropped, so that reads come from the disk.
    ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<SegmentReader::Record>> SegmentReader::Next() {
  while (!at_end_) {
    if (segment_.offset == segment_.size) {
      if (IsLast()) break;
      WEFT_RETURN_IF_ERROR(OpenSegment());
      continue;
    }
    RecordHeader header;
    WEFT_ASSIGN_OR_RETURN(std::optional<std::string> bytes,
                          ReadRecord(segment_.offset, &header));
    if (!bytes || header.sequence != expected_) {
      WEFT_RETURN_IF_ERROR(EndOrDamage());
      continue;
    }
    const uint64_t size = RecordHeader::kBytes + header.length;
    segment_.offset += size;
    read_bytes_ += size;
    ++expected_;
    if (header.sequence < first_sequence_) continue;
    next_sequence_ = expected_;
    return Record{.sequence = header.sequence, .bytes = *std::move(bytes)};
  }
  at_end_ = true;
  return std::nullopt;
}

absl::Status SegmentReader::OpenSegment() {
  const uint64_t first = segments_[opened_];
  if (first > expected_ || (opened_ > 0 && first != expected_)) {
    return absl::DataLossError(absl::StrCat(
        "the log lacks the records from ", expected_, " to ", first - 1,
        ", those before ", StateFolder::SegmentName(first)));
  }
  ++opened_;
  expected_ = first;
  segment_ = {.name = StateFolder::SegmentName(first), .first_sequence = first};
  WEFT_ASSIGN_OR_RETURN(
      segment_.fd, OpenLog(folder_->log_directory(), segment_.name, O_RDONLY));
  WEFT_ASSIGN_OR_RETURN(segment_.size,
                        FileSize(segment_.fd.get(), segment_.name));
  return ReadSegmentHeader();
}

absl::Status SegmentReader::ReadSegmentHeader() {
  std::string bytes(SegmentHeader::kBytes, '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t size,
                        ReadAt(segment_.fd.get(), 0, bytes, segment_.name));
  const std::optional<SegmentHeader> header = DecodeSegmentHeader(bytes);
  if (size < bytes.size() || !header ||
      header->first_sequence != segment_.first_sequence) {
    return Damaged("the segment's header is bad");
  }
  segment_.salt = header->salt;
  segment_.offset = size;
  read_bytes_ += size;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> SegmentReader::ReadRecord(
    uint64_t offset, RecordHeader* header) const {
  char head[RecordHeader::kBytes];
  WEFT_ASSIGN_OR_RETURN(const size_t size,
                        ReadAt(segment_.fd.get(), offset, head, segment_.name));
  if (size < sizeof(head)) return std::nullopt;
  const std::optional<RecordHeader> decoded =
      DecodeRecordHeader(segment_.salt, {head, size});
  // The length is checked before memory for the record is allocated.
  if (!decoded || decoded->length > segment_.size - offset - size) {
    return std::nullopt;
  }
  std::string bytes(decoded->length, '\0');
  WEFT_ASSIGN_OR_RETURN(
      const size_t read,
      ReadAt(segment_.fd.get(), offset + size, bytes, segment_.name));
  if (read < bytes.size() || Crc32c(bytes) != decoded->crc) {
    return std::nullopt;
  }
  *header = *decoded;
  return bytes;
}

// Decides whether the bad record at segment_.offset is damaged or begins the
// torn tail. The record is damaged if it is in an earlier segment than the
// last, or if a later group follows. Returns DATA_LOSS for a damaged record.
// Otherwise the log ends before the record.
absl::Status SegmentReader::EndOrDamage() {
  if (!IsLast()) return Damaged("a record is bad");
  WEFT_ASSIGN_OR_RETURN(const bool later, LaterGroupFollows());
  if (later) return Damaged("a record is bad, and good ones follow");
  torn_bytes_ = segment_.size - segment_.offset;
  at_end_ = true;
  return absl::OkStatus();
}

absl::StatusOr<bool> SegmentReader::LaterGroupFollows() const {
  std::string window;
  for (uint64_t start = segment_.offset; start < segment_.size;
       start += kScanBytes) {
    window.resize(kScanBytes + RecordHeader::kBytes - 1);
    WEFT_ASSIGN_OR_RETURN(const size_t size, ReadAt(segment_.fd.get(), start,
                                                    window, segment_.name));
    window.resize(size);
    for (size_t i = 0; i + RecordHeader::kBytes <= size; ++i) {
      const std::optional<RecordHeader> header =
          DecodeRecordHeader(segment_.salt, std::string_view(window).substr(i));
      if (!header || header->sequence - header->place <= expected_) continue;
      RecordHeader same;
      WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> record,
                            ReadRecord(start + i, &same));
      if (record) return true;
    }
  }
  return false;
}

absl::Status SegmentReader::Damaged(const std::string& how) const {
  return absl::DataLossError(
      absl::StrCat("segment ", segment_.name, " of the log, offset ",
                   segment_.offset, ": ", how, " (record ", expected_, ")"));
}

absl::Status SegmentReader::Repair() {
  if (torn_bytes_ == 0) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenLog(folder_->log_directory(),
                                                   segment_.name, O_WRONLY));
  if (Failpoint("journal.repair") ||
      ::ftruncate(fd.get(), static_cast<off_t>(segment_.offset)) != 0) {
    return ErrnoStatus(errno, "cutting " + segment_.name);
  }
  if (Failpoint("journal.sync_repair") || ::fsync(fd.get()) != 0) {
    return ErrnoStatus(errno, "syncing " + segment_.name);
  }
  torn_bytes_ = 0;
  return absl::OkStatus();
}

}  // namespace weft::log
