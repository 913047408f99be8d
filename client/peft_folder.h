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
// `send` returns false. Errors: NOT_FOUND if a file is missing; INTERNAL if a
// file cannot be read.
absl::Status ReadPeftFolder(
    const std::filesystem::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send);
// Like ReadPeftFolder, for the files of a checkpoint. The optimizer's file may
// be absent.
absl::Status ReadCheckpointFolder(
    const std::filesystem::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send);

// Writes received chunks to files in a scratch folder beside `folder`. Commit
// moves the files into `folder`. The destructor removes files that were not
// moved.
// Threads: not thread-safe.
class PeftFolderWriter {
 public:
  explicit PeftFolderWriter(std::filesystem::path folder);
  ~PeftFolderWriter();
  PeftFolderWriter(const PeftFolderWriter&) = delete;
  PeftFolderWriter& operator=(const PeftFolderWriter&) = delete;

  // Appends a chunk to its file. Errors: DATA_LOSS if the chunk's name is not a
  // plain file name; INTERNAL if the file cannot be written.
  absl::Status Add(const v1::FileChunk& chunk);
  // Moves the files into the folder and replaces files with the same names.
  // Errors: DATA_LOSS if adapter_config.json or adapter_model.safetensors is
  // missing; INTERNAL if a file cannot be written.
  absl::Status Commit();

 private:
  const std::filesystem::path folder_;
  const std::filesystem::path scratch_;
  std::string name_;
  std::ofstream file_;
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_PEFT_FOLDER_H_
