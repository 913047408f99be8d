// A file that is read in pieces, so that a large one is never in memory.
#ifndef WEFT_SRC_BASE_FILES_FILE_SOURCE_H_
#define WEFT_SRC_BASE_FILES_FILE_SOURCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/base/files/file_io.h"

namespace weft {

// Copies share the contents or the descriptor. Threads: any; all methods are
// const.
class FileSource {
 public:
  // Opens the file `name` of a directory. It can be read even if its name is
  // removed. Errors: those of file_io.h; INTERNAL if it is not a plain file.
  static absl::StatusOr<FileSource> OpenAt(int dir, const std::string& name);
  // Makes a file of memory.
  FileSource(std::string name, std::string contents);
  // Returns exactly `count` bytes from `offset`.
  using Reader = std::function<absl::StatusOr<std::string>(uint64_t offset,
                                                           uint64_t count)>;
  // Makes a file of `size` bytes that `read` reads, on any thread.
  FileSource(std::string name, uint64_t size, Reader read);

  const std::string& name() const { return name_; }
  uint64_t size() const { return size_; }
  // Returns `count` bytes from `offset`, or fewer where the file ends. May wait
  // for the disk or an object store.
  absl::StatusOr<std::string> Read(uint64_t offset, uint64_t count) const;

 private:
  FileSource(std::string name, UniqueFd file, uint64_t size);

  std::string name_;
  uint64_t size_ = 0;
  // One of these is set.
  std::shared_ptr<const UniqueFd> file_;
  std::shared_ptr<const std::string> contents_;
  Reader read_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_FILE_SOURCE_H_
