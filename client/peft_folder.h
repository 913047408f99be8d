// PEFT folders to and from the chunks of Export and Import.
#ifndef WEFT_CLIENT_PEFT_FOLDER_H_
#define WEFT_CLIENT_PEFT_FOLDER_H_

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "weft/v1/adapters.pb.h"

namespace weft::client {

// Gives the files of a PEFT folder to `send`, at most 1 MiB at a time, until
// it returns false. Errors: NOT_FOUND for a missing file.
[[nodiscard]] absl::Status ReadPeftFolder(
    const std::filesystem::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send);

// Collects chunks beside `folder`, then moves them in place. Without Commit,
// what was written is removed and the folder stays as it was.
// Threads: one at a time.
class PeftFolderWriter {
 public:
  explicit PeftFolderWriter(std::filesystem::path folder);
  ~PeftFolderWriter();
  PeftFolderWriter(const PeftFolderWriter&) = delete;
  PeftFolderWriter& operator=(const PeftFolderWriter&) = delete;

  // Appends a piece. DATA_LOSS when its name is not a plain file name;
  // INTERNAL when the disk refuses.
  [[nodiscard]] absl::Status Add(const v1::FileChunk& chunk);
  // Moves the files, replacing those of their names. DATA_LOSS when one of
  // PEFT's two files did not come.
  [[nodiscard]] absl::Status Commit();

 private:
  const std::filesystem::path folder_;
  const std::filesystem::path scratch_;
  std::string name_;
  std::ofstream file_;
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_PEFT_FOLDER_H_
