// Converts folders to and from the chunks of ExportAdapter and ImportAdapter,
// and of DownloadCheckpoint and UploadCheckpoint.
#ifndef WEFT_CLIENT_PEFT_FOLDER_H_
#define WEFT_CLIENT_PEFT_FOLDER_H_

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "weft/v1/adapters.pb.h"

namespace weft::client {

// Passes the files of a PEFT folder to `send`, in chunks of up to 1 MiB, until
// it returns false. Errors: NOT_FOUND for a missing file.
[[nodiscard]] absl::Status ReadPeftFolder(
    const std::filesystem::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send);
// Does the same for the files of a checkpoint. The optimizer's file may be
// absent.
[[nodiscard]] absl::Status ReadCheckpointFolder(
    const std::filesystem::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send);

// Writes chunks to files beside `folder`. Commit moves the files into it.
// Without Commit, the written files are removed and the folder does not change.
// Threads: not thread-safe.
class PeftFolderWriter {
 public:
  explicit PeftFolderWriter(std::filesystem::path folder);
  ~PeftFolderWriter();
  PeftFolderWriter(const PeftFolderWriter&) = delete;
  PeftFolderWriter& operator=(const PeftFolderWriter&) = delete;

  // Appends a chunk. Errors: DATA_LOSS if its name is not a plain file name;
  // INTERNAL if it cannot be written.
  [[nodiscard]] absl::Status Add(const v1::FileChunk& chunk);
  // Moves the files into the folder and replaces files with the same names.
  // Errors: DATA_LOSS if one of PEFT's two files is missing.
  [[nodiscard]] absl::Status Commit();

 private:
  const std::filesystem::path folder_;
  const std::filesystem::path scratch_;
  std::string name_;
  std::ofstream file_;
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_PEFT_FOLDER_H_
