// Parses the JSON header of a safetensors file as a stream of events.
// Torch-free.
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

// A tensor as the header declares it, before it is checked against the file.
struct HeaderEntry {
  ScalarType dtype = ScalarType::kF32;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // Offsets count bytes from the header's end.
  uint64_t end = 0;
};

using HeaderEntries = absl::btree_map<std::string, HeaderEntry>;

// Parses the JSON text as a stream, without building a tree, and stops at the
// first error. Errors: INVALID_ARGUMENT, which names the rule and, if there is
// one, the tensor.
[[nodiscard]] absl::StatusOr<HeaderEntries> ParseHeaderJson(
    absl::string_view text);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_SAFETENSORS_HEADER_H_
