// What the programs of the benches share.
#ifndef WEFT_TESTS_BENCH_BENCH_H_
#define WEFT_TESTS_BENCH_BENCH_H_

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

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

// Returns the value, or throws the error's message.
template <typename T>
T ValueOf(absl::StatusOr<T> value) {
  TORCH_CHECK(value.ok(), value.status().ToString());
  return *std::move(value);
}

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

// Returns the words from index `begin` on as whole numbers; 0 for other words.
inline std::vector<int64_t> Numbers(const std::vector<std::string>& words,
                                    size_t begin) {
  std::vector<int64_t> numbers;
  for (size_t i = begin; i < words.size(); ++i) {
    numbers.push_back(std::atoll(words[i].c_str()));
  }
  return numbers;
}

// Is a program's main: calls run(words) with the words behind the program's
// name. Prints the usage if run returns false, and what it throws.
template <typename Run>
int Main(int argc, char** argv, const char* usage, const Run& run) {
  try {
    if (run(std::vector<std::string>(argv + 1, argv + argc))) return 0;
    std::cerr << "usage: " << usage << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << "\n";
    return 1;
  }
}

}  // namespace weft::bench

#endif  // WEFT_TESTS_BENCH_BENCH_H_
