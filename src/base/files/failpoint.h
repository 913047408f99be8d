// Places where a test can inject a failure: a full disk, a short write, the end
// of the process.
//
//   if (Failpoint("files.sync") || ::fsync(fd) != 0) return ErrnoStatus(...);
//
// A failpoint has an effect only in a process that links or preloads the
// library of tests/support/failpoints.h, which defines the function below. In
// any other process weft_failpoint is null, and Failpoint returns false. So
// tests can break the same programs that are shipped.
#ifndef WEFT_SRC_BASE_FILES_FAILPOINT_H_
#define WEFT_SRC_BASE_FILES_FAILPOINT_H_

#include <cerrno>
#include <cstddef>

// Returns the errno with which the caller must fail, or 0. May reduce `*size`,
// so that the caller makes a short write. `size` may be null.
extern "C" __attribute__((weak)) int weft_failpoint(const char* name,
                                                    size_t* size);

namespace weft {

// Returns true, with errno set, if the caller must fail. If `size` is not null,
// `*size` is the number of bytes that the caller is about to write, and the
// failpoint may reduce it. Threads: any.
inline bool Failpoint(const char* name, size_t* size = nullptr) {
  if (weft_failpoint == nullptr) return false;
  const int error = weft_failpoint(name, size);
  if (error != 0) errno = error;
  return error != 0;
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_FILES_FAILPOINT_H_
