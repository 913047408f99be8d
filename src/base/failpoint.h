// Places where a test can inject a failure: a full disk, a short write, the end
// of the process.
//
//   if (Failpoint("files.sync") || ::fsync(fd) != 0) return ErrnoStatus(...);
//
// A failpoint has an effect only in a process that links or preloads the
// library of tests/support/failpoints.h, which defines the function below.
// Without the library a failpoint only tests the function's address, which is
// null. So tests kill the same programs that are shipped.
#ifndef WEFT_SRC_BASE_FAILPOINT_H_
#define WEFT_SRC_BASE_FAILPOINT_H_

#include <cerrno>
#include <cstddef>

// Returns an errno, or 0 if nothing fails. May reduce `*size`, unless `size` is
// null.
extern "C" __attribute__((weak)) int weft_failpoint(const char* name,
                                                    size_t* size);

namespace weft {

// Returns true if the caller must fail with the errno that is set. `size`
// points to the number of bytes that the caller is about to write. Threads:
// any.
inline bool Failpoint(const char* name, size_t* size = nullptr) {
  if (weft_failpoint == nullptr) return false;
  const int error = weft_failpoint(name, size);
  if (error != 0) errno = error;
  return error != 0;
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_FAILPOINT_H_
