// A file in memory, for code that opens paths.
#ifndef WEFT_TESTS_SUPPORT_MEMORY_FILE_H_
#define WEFT_TESTS_SUPPORT_MEMORY_FILE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace weft {

class MemoryFile {
 public:
  explicit MemoryFile(std::string_view contents)
      : fd_(memfd_create("memory_file", MFD_CLOEXEC)) {
    if (fd_ < 0 || write(fd_, contents.data(), contents.size()) !=
                       static_cast<ssize_t>(contents.size())) {
      std::abort();
    }
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { close(fd_); }

  // Returns a path that is valid in this process while the object exists.
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  const int fd_;
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_MEMORY_FILE_H_
