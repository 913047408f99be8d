// Reads the directory of a zip archive with uncompressed entries, as torch.save
// writes it. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_ZIP_DIRECTORY_H_
#define WEFT_SRC_WEIGHTS_ZIP_DIRECTORY_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/weights/regular_file.h"

namespace weft::weights {

inline constexpr size_t kMaxZipEntries = 200'000;
inline constexpr size_t kMaxZipDirectoryBytes = size_t{64} << 20;

// The place and the checksum of an entry's bytes.
struct ZipEntry {
  uint64_t header_offset = 0;
  uint64_t data_offset = 0;
  uint64_t size_bytes = 0;
  uint32_t crc32 = 0;
};

using ZipDirectory = absl::btree_map<std::string, ZipEntry>;

// Reads the central directory and every local header, including zip64. This
// reader is stricter than the format, so that all readers see the same archive.
// The directory ends the file (no comment), and every local header agrees with
// the directory. Entries do not overlap, names are distinct, and nothing is
// compressed, encrypted or split. Errors: DATA_LOSS if the archive seems cut
// short, those of RegularFile::ReadAt, otherwise INVALID_ARGUMENT. Messages
// name the rule and, if there is one, the entry.
absl::StatusOr<ZipDirectory> ReadZipDirectory(const RegularFile& file);

// Returns the CRC-32 of the bytes, the checksum that zip directories store.
uint32_t Crc32(absl::string_view bytes);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_ZIP_DIRECTORY_H_
