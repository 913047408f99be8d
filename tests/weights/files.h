// Makes files for the tests of weights: temporary folders, and safetensors from
// text.
#ifndef WEFT_TESTS_WEIGHTS_FILES_H_
#define WEFT_TESTS_WEIGHTS_FILES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tests/support/temp_folder.h"

namespace weft::weights {

using weft::TempFolder;

// Returns a safetensors file with exactly this header and `data_bytes` zeros.
inline std::string RawFile(std::string_view header, size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) {
    file.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  }
  file.append(header);
  file.append(data_bytes, '\0');
  return file;
}

}  // namespace weft::weights

#endif  // WEFT_TESTS_WEIGHTS_FILES_H_
