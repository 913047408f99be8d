// The manifest of a folder that is whole or absent: its files with their sizes
// and sums, and fields of its caller.
#ifndef WEFT_SRC_BASE_FILES_FOLDER_MANIFEST_H_
#define WEFT_SRC_BASE_FILES_FOLDER_MANIFEST_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "src/base/files/file_source.h"

namespace weft {

inline constexpr char kManifestFile[] = "MANIFEST.json";

struct FolderManifest {
  struct File {
    std::string name;
    uint64_t size = 0;
    std::string sha256;  // Hexadecimal.
  };
  nlohmann::json fields;
  std::vector<File> files;
  // In an object store: where the files are, and the writer's log and epoch.
  std::string place;
  uint64_t log = 0;
  uint64_t epoch = 0;
};

FolderManifest::File DescribeFile(const std::string& name,
                                  const std::string& contents);
std::string EncodeManifest(const FolderManifest& manifest);
// Returns none if the text is no manifest.
std::optional<FolderManifest> ParseManifest(const std::string& text);

// Says that a file of a folder is damaged.
absl::Status DamagedFile(const std::string& folder, const std::string& file,
                         const std::string& how);

// Checks a file's size and SHA-256 against the manifest. Passes what it reads
// to `use`, at most `piece_bytes` at a time. Errors: DATA_LOSS; UNAVAILABLE and
// DEADLINE_EXCEEDED as they are.
absl::Status CheckFile(const FileSource& file, const std::string& folder,
                       const FolderManifest::File& expected,
                       uint64_t piece_bytes,
                       const std::function<void(std::string)>& use);

// Returns the file, which checks itself while it is read: of reads that follow
// one another from the first byte on, the one that comes to the end returns
// DATA_LOSS if the SHA-256 is another. So who reads in this way has the whole
// file only if it is right. Copies share the sum, so one of them may read at a
// time. Errors, also of reads: those of CheckFile.
absl::StatusOr<FileSource> CheckWhileRead(const FileSource& file,
                                          const std::string& folder,
                                          const FolderManifest::File& expected);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_FOLDER_MANIFEST_H_
