// Places where a test makes the world fail: a full disk, a short write, the end
// of the process.
//
//   if (Failpoint("files.sync") || ::fsync(fd) != 0) return ErrnoStatus(...);
//
// A failpoint does something only in a process that holds the library of
// tests/support/failpoints.h, linked or preloaded: no other code defines the
// function below. Without it a failpoint is one load of an address, which is
// null. So the programs that tests kill are those that are shipped.
#ifndef WEFT_SRC_BASE_FAILPOINT_H_
#define WEFT_SRC_BASE_FAILPOINT_H_

#include <cerrno>
#include <cstddef>

// Returns an errno, or 0 to go on; may make `*size`, unless null, smaller.
extern "C" __attribute__((weak)) int weft_failpoint(const char* name,
                                                    size_t* size);

namespace weft {

// True: what follows has failed, with errno set. `size`: the bytes that a write
// is about to write. Threads: any.
inline bool Failpoint(const char* name, size_t* size = nullptr) {
  if (weft_failpoint == nullptr) return false;
  const int error = weft_failpoint(name, size);
  if (error != 0) errno = error;
  return error != 0;
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_FAILPOINT_H_
