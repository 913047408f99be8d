// Makes the failpoints of src/base/files/failpoint.h fail in a process with
// this library:
//
//   files.write=short#3;journal.sync=sleep(50)|err(EIO)@0.1;files.*=kill#17
//
// A name, or a prefix of names with `*`, gets actions, separated by `|`:
//   err(NAME)   the operation fails with this errno
//   short       a write writes half of its bytes
//   sleep(MS)   the thread sleeps for MS milliseconds
//   kill        the process ends by SIGKILL
// @P gives an action a probability, #N restricts it to the N-th hit, and #N-M
// to a range of hits.
//
// Tests of modules call the functions below. Tests of shipped programs preload
// libweft_failpoints.so by LD_PRELOAD, which reads WEFT_FAILPOINTS and
// WEFT_FAILPOINTS_SEED. Text that does not parse ends the program.
#ifndef WEFT_TESTS_SUPPORT_FAILPOINTS_H_
#define WEFT_TESTS_SUPPORT_FAILPOINTS_H_

#include <cstdint>
#include <string>

namespace weft {

// Replaces all actions and resets the hits. Threads: any.
void SetFailpoints(const std::string& text, uint64_t seed = 0);

// Returns how often this failpoint was passed since SetFailpoints.
int64_t FailpointHits(const std::string& name);

// Sets failpoints while the object exists.
class ScopedFailpoints {
 public:
  explicit ScopedFailpoints(const std::string& text) { SetFailpoints(text); }
  ~ScopedFailpoints() { SetFailpoints(""); }
  ScopedFailpoints(const ScopedFailpoints&) = delete;
  ScopedFailpoints& operator=(const ScopedFailpoints&) = delete;
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_FAILPOINTS_H_
