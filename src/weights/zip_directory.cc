#include "src/weights/zip_directory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "isa-l/crc.h"
#include "src/base/status_macros.h"
#include "src/weights/byte_reader.h"

namespace weft::weights {
namespace {

constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocator64Signature = 0x07064b50;
constexpr size_t kLocalBytes = 30;
constexpr size_t kEndBytes = 22;
constexpr size_t kEnd64Bytes = 56;
constexpr size_t kLocator64Bytes = 20;
constexpr uint16_t kZip64Extra = 1;
// Bits of an entry's flags. Two are accepted: kDeferredSizes (sizes only in the
// directory) and bit 11 (names in UTF-8).
constexpr uint16_t kDeferredSizes = 1u << 3;
constexpr uint16_t kEncrypted = 1u << 0;
constexpr uint16_t kKnownFlags = kDeferredSizes | (1u << 11);
// If a field of 4 or 2 bytes has this value, a zip64 record has the true value.
constexpr uint32_t kIn64 = 0xffffffff;
constexpr uint16_t kIn64Short = 0xffff;

absl::Status Invalid(absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat("zip archive ", rule));
}

std::string EntryMessage(absl::string_view name, absl::string_view rule) {
  return absl::StrCat("zip entry '", absl::CHexEscape(name.substr(0, 128)),
                      "' ", rule);
}

absl::Status InvalidEntry(absl::string_view name, absl::string_view rule) {
  return absl::InvalidArgumentError(EntryMessage(name, rule));
}

absl::Status CutEntry(absl::string_view name, absl::string_view rule) {
  return absl::DataLossError(EntryMessage(name, rule));
}

// The place of the central directory, and the number of its entries.
struct DirectoryRange {
  uint64_t num_entries = 0;
  uint64_t size_bytes = 0;
  uint64_t offset = 0;
};

// Returns whether a field of the end record agrees with the zip64 end record.
// A field equal to `saturated` agrees, too: its value is only in the zip64 end
// record.
bool Agree(uint64_t field, uint64_t saturated, uint64_t field64) {
  return field == saturated || field == field64;
}

// Reads the zip64 end record, which must be directly before `locator`.
absl::Status ReadEnd64(const RegularFile& file, ByteReader locator,
                       uint64_t locator_offset, DirectoryRange& range) {
  const uint32_t disk = locator.U32();
  const uint64_t offset = locator.U64();
  const uint32_t num_disks = locator.U32();
  if (disk != 0 || num_disks != 1) return Invalid("is split over disks");
  if (locator_offset < kEnd64Bytes || offset != locator_offset - kEnd64Bytes) {
    return Invalid("has its zip64 end record out of place");
  }
  WEFT_ASSIGN_OR_RETURN(const std::string bytes,
                        file.ReadBytes(offset, kEnd64Bytes));
  ByteReader end(bytes);
  const uint32_t signature = end.U32();
  const uint64_t record_bytes = end.U64();
  if (signature != kEnd64Signature || record_bytes != kEnd64Bytes - 12) {
    return Invalid("has a damaged zip64 end record");
  }
  (void)end.U32();  // Skips versions.
  const uint64_t disks = end.U64();
  const uint64_t entries_here = end.U64();
  const DirectoryRange range64 = {
      .num_entries = end.U64(), .size_bytes = end.U64(), .offset = end.U64()};
  if (disks != 0 || entries_here != range64.num_entries) {
    return Invalid("is split over disks");
  }
  if (!Agree(range.num_entries, kIn64Short, range64.num_entries) ||
      !Agree(range.size_bytes, kIn64, range64.size_bytes) ||
      !Agree(range.offset, kIn64, range64.offset)) {
    return Invalid("has two end records that disagree");
  }
  range = range64;
  return absl::OkStatus();
}

// Finds the central directory, which must be directly before the end records.
absl::StatusOr<DirectoryRange> FindDirectory(const RegularFile& file) {
  const uint64_t file_bytes = file.size_bytes();
  const uint64_t tail_bytes =
      std::min<uint64_t>(file_bytes, kEndBytes + kLocator64Bytes);
  WEFT_ASSIGN_OR_RETURN(const std::string tail,
                        file.ReadBytes(file_bytes - tail_bytes, tail_bytes));
  if (tail_bytes < kEndBytes) return absl::DataLossError("zip archive is cut");
  ByteReader end(absl::string_view(tail).substr(tail_bytes - kEndBytes));
  const uint32_t signature = end.U32();
  const uint32_t disks = end.U32();
  const uint16_t entries_here = end.U16();
  DirectoryRange range = {
      .num_entries = end.U16(), .size_bytes = end.U32(), .offset = end.U32()};
  if (signature != kEndSignature || end.U16() != 0) {
    return absl::DataLossError(
        "zip archive does not end with its directory: cut short, or commented");
  }
  if (disks != 0 || entries_here != range.num_entries) {
    return Invalid("is split over disks");
  }
  uint64_t end_offset = file_bytes - kEndBytes;
  ByteReader locator(tail);
  if (tail_bytes > kEndBytes && locator.U32() == kLocator64Signature) {
    end_offset -= kLocator64Bytes;
    WEFT_RETURN_IF_ERROR(ReadEnd64(file, locator, end_offset, range));
    end_offset -= kEnd64Bytes;
  }
  if (range.size_bytes > end_offset ||
      range.offset != end_offset - range.size_bytes) {
    return Invalid(absl::StrCat("has a directory of ", range.size_bytes,
                                " bytes at byte ", range.offset,
                                ", which does not end at byte ", end_offset));
  }
  if (range.size_bytes > kMaxZipDirectoryBytes ||
      range.num_entries > kMaxZipEntries) {
    return Invalid(absl::StrCat("has ", range.num_entries, " entries in ",
                                range.size_bytes, " bytes > limit ",
                                kMaxZipEntries, " in ", kMaxZipDirectoryBytes));
  }
  return range;
}

// An entry of the central directory.
struct CentralEntry {
  std::string name;
  uint16_t flags = 0;
  uint64_t stored_bytes = 0;  // Size of the entry in the archive.
  ZipEntry entry;
};

// Replaces each size or offset that is kIn64 with the value in the entry's
// zip64 extra field.
absl::Status ReadExtra(absl::string_view extra, CentralEntry& central) {
  uint64_t* const fields[] = {&central.entry.size_bytes, &central.stored_bytes,
                              &central.entry.header_offset};
  ByteReader reader(extra);
  while (reader.ok() && reader.remaining() > 0) {
    const uint16_t id = reader.U16();
    ByteReader body(reader.Bytes(reader.U16()));
    if (id != kZip64Extra) continue;
    for (uint64_t* field : fields) {
      if (*field == kIn64) *field = body.U64();
    }
    if (body.ok()) return absl::OkStatus();
    return InvalidEntry(central.name, "has a zip64 field that is too short");
  }
  const bool missing = std::ranges::any_of(
      fields, [](const uint64_t* field) { return *field == kIn64; });
  if (!reader.ok() || missing) {
    return InvalidEntry(central.name, "has a damaged extra field");
  }
  return absl::OkStatus();
}

absl::StatusOr<CentralEntry> ReadCentral(ByteReader& reader) {
  CentralEntry central;
  const uint32_t signature = reader.U32();
  (void)reader.U32();  // Skips versions.
  central.flags = reader.U16();
  const uint16_t method = reader.U16();
  (void)reader.U32();  // Skips time and date.
  central.entry.crc32 = reader.U32();
  central.stored_bytes = reader.U32();
  central.entry.size_bytes = reader.U32();
  const uint16_t name_bytes = reader.U16();
  const uint16_t extra_bytes = reader.U16();
  const uint16_t comment_bytes = reader.U16();
  const uint16_t disk = reader.U16();
  (void)reader.Uint(6);  // Skips attributes.
  central.entry.header_offset = reader.U32();
  central.name = std::string(reader.Bytes(name_bytes));
  const absl::string_view extra = reader.Bytes(extra_bytes);
  (void)reader.Bytes(comment_bytes);
  if (!reader.ok() || signature != kCentralSignature) {
    return Invalid("has a damaged directory");
  }
  if ((central.flags & kEncrypted) != 0) {
    return InvalidEntry(central.name, "is encrypted");
  }
  if ((central.flags & ~kKnownFlags) != 0) {
    return InvalidEntry(central.name,
                        absl::StrCat("has the unknown flags ", central.flags));
  }
  if (disk != 0) return InvalidEntry(central.name, "is on another disk");
  WEFT_RETURN_IF_ERROR(ReadExtra(extra, central));
  if (method != 0 || central.stored_bytes != central.entry.size_bytes) {
    return InvalidEntry(central.name, absl::StrCat("is compressed (method ",
                                                   method, "); torch stores"));
  }
  return central;
}

// Returns whether a local header agrees with the directory. With kDeferredSizes
// the header may have zeros for checksum and sizes. Sets `extra_bytes` to the
// number of bytes between the header and the data.
bool LocalAgrees(ByteReader local, const CentralEntry& central,
                 uint16_t& extra_bytes) {
  const uint32_t signature = local.U32();
  (void)local.U16();  // Version.
  const uint16_t flags = local.U16();
  const uint16_t method = local.U16();
  (void)local.U32();  // Skips time and date.
  const uint32_t crc32 = local.U32();
  const uint32_t stored_bytes = local.U32();
  const uint32_t size_bytes = local.U32();
  const uint16_t name_bytes = local.U16();
  extra_bytes = local.U16();
  const bool deferred = (flags & kDeferredSizes) != 0;
  const auto agrees = [deferred](uint32_t here, uint64_t there) {
    return here == there || (deferred && here == 0);
  };
  const uint64_t size = central.entry.size_bytes;
  return signature == kLocalSignature && flags == central.flags &&
         method == 0 && name_bytes == central.name.size() &&
         local.Bytes(name_bytes) == central.name &&
         agrees(crc32, central.entry.crc32) &&
         (stored_bytes == kIn64 || agrees(stored_bytes, size)) &&
         (size_bytes == kIn64 || agrees(size_bytes, size));
}

// Checks the local header and sets the offset of the data behind it.
absl::Status ReadLocal(const RegularFile& file, uint64_t directory_offset,
                       CentralEntry& central) {
  ZipEntry& entry = central.entry;
  const uint64_t header_bytes = kLocalBytes + central.name.size();
  if (entry.header_offset > directory_offset ||
      header_bytes > directory_offset - entry.header_offset) {
    return CutEntry(central.name,
                    absl::StrCat("starts at byte ", entry.header_offset,
                                 ", beyond the data"));
  }
  WEFT_ASSIGN_OR_RETURN(const std::string bytes,
                        file.ReadBytes(entry.header_offset, header_bytes));
  uint16_t extra_bytes = 0;
  if (!LocalAgrees(ByteReader(bytes), central, extra_bytes)) {
    return InvalidEntry(central.name,
                        "has a local header that disagrees with the directory");
  }
  entry.data_offset = entry.header_offset + header_bytes + extra_bytes;
  if (entry.data_offset > directory_offset ||
      entry.size_bytes > directory_offset - entry.data_offset) {
    return CutEntry(central.name,
                    absl::StrCat("has ", entry.size_bytes,
                                 " bytes, which do not fit before the "
                                 "directory"));
  }
  return absl::OkStatus();
}

absl::Status CheckDisjoint(const ZipDirectory& directory) {
  std::vector<const ZipDirectory::value_type*> order;
  order.reserve(directory.size());
  for (const auto& entry : directory) order.push_back(&entry);
  std::ranges::sort(
      order, {}, [](const auto* item) { return item->second.header_offset; });
  uint64_t next = 0;
  for (const auto* item : order) {
    const auto& [name, entry] = *item;
    if (entry.header_offset < next) {
      return InvalidEntry(name, "overlaps the entry before it");
    }
    next = entry.data_offset + entry.size_bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ZipDirectory> ReadZipDirectory(const RegularFile& file) {
  WEFT_ASSIGN_OR_RETURN(const DirectoryRange range, FindDirectory(file));
  WEFT_ASSIGN_OR_RETURN(const std::string bytes,
                        file.ReadBytes(range.offset, range.size_bytes));
  ByteReader reader(bytes);
  ZipDirectory directory;
  for (uint64_t i = 0; i < range.num_entries; ++i) {
    WEFT_ASSIGN_OR_RETURN(CentralEntry central, ReadCentral(reader));
    WEFT_RETURN_IF_ERROR(ReadLocal(file, range.offset, central));
    if (!directory.emplace(central.name, central.entry).second) {
      return InvalidEntry(central.name, "is there twice");
    }
  }
  if (reader.remaining() != 0) {
    return Invalid(absl::StrCat("has ", reader.remaining(),
                                " bytes after its last directory entry"));
  }
  WEFT_RETURN_IF_ERROR(CheckDisjoint(directory));
  return directory;
}

uint32_t Crc32(absl::string_view bytes) {
  return ::crc32_gzip_refl(
      0, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

}  // namespace weft::weights
