// The JSON header of a safetensors file, event by event. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_SAFETENSORS_HEADER_H_
#define WEFT_SRC_WEIGHTS_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// A tensor as the header declares it, not yet checked against the file.
struct HeaderEntry {
  ScalarType dtype = ScalarType::kF32;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // Bytes from the end of the header.
  uint64_t end = 0;
};

using HeaderEntries = absl::btree_map<std::string, HeaderEntry>;

// Parses the JSON text as a stream, without a tree, and stops at the first
// error. Errors: INVALID_ARGUMENT names the tensor and the rule.
[[nodiscard]] absl::StatusOr<HeaderEntries> ParseHeaderJson(
    absl::string_view text);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_SAFETENSORS_HEADER_H_
