// Reads what the kernel counts for this process.
#ifndef WEFT_TESTS_BENCH_PROCESS_STATUS_H_
#define WEFT_TESTS_BENCH_PROCESS_STATUS_H_

#include <c10/util/Exception.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace weft::bench {

// Returns the number after "FIELD:" in a file of /proc/self, such as "VmHWM"
// (in kB) of "status" or "rchar" (in bytes) of "io".
inline int64_t ProcSelf(const std::string& name, const std::string& field) {
  std::ifstream file("/proc/self/" + name);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) {
      return std::stoll(line.substr(field.size() + 1));
    }
  }
  TORCH_CHECK(false, "no ", field, " in /proc/self/", name);
}

}  // namespace weft::bench

#endif  // WEFT_TESTS_BENCH_PROCESS_STATUS_H_
