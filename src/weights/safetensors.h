// Reads and writes files in the safetensors format. Torch-free.
//
// A file has a 64-bit little-endian header length, a JSON header and the bytes
// of the tensors. The checks follow the format's rules (no hole, no overlap, no
// trailing byte, no repeated key), and add limits on counts and names.
#ifndef WEFT_SRC_WEIGHTS_SAFETENSORS_H_
#define WEFT_SRC_WEIGHTS_SAFETENSORS_H_

#include <cstdint>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/weights/regular_file.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

using TensorMap = absl::btree_map<std::string, TensorView>;

// Parses a whole file that is in memory. The views point into `file`. Does not
// check values, which may be NaN.
// Units:  time and memory O(header bytes), bounded by kMaxHeaderBytes.
// Errors: DATA_LOSS if the file is shorter than its header says, otherwise
// INVALID_ARGUMENT. Messages name the rule and, if there is one, the tensor.
// Never throws.
absl::StatusOr<TensorMap> ParseSafetensors(absl::string_view file);

// Reads only the header of a file on disk. Errors: those of ParseSafetensors
// and of RegularFile::ReadAt. Messages do not name the file.
absl::StatusOr<TensorDirectory> ReadSafetensorsDirectory(
    const RegularFile& file);

struct TensorHeader {
  std::string name;
  ScalarType dtype = ScalarType::kF32;
  absl::Span<const int64_t> shape;
  uint64_t size_bytes = 0;  // The size that shape and dtype imply.
};

// Returns the beginning of a file: the header's length and the header. The
// caller appends the bytes of `tensors`, in this order. The header has the
// metadata {"format": "pt"}, which Hugging Face's readers need. REQUIRES: names
// are distinct.
std::string SafetensorsStart(absl::Span<const TensorHeader> tensors);

struct NamedTensor {
  std::string name;
  TensorView view;
};

// Returns the bytes of a whole file with these tensors, in this order.
// REQUIRES: names are distinct, and every view has as many bytes as its shape
// implies.
std::string WriteSafetensors(absl::Span<const NamedTensor> tensors);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_SAFETENSORS_H_
