// The safetensors file format: header, views, files, writing. Torch-free.
//
// A file is a 64-bit little-endian header length, a JSON header and the bytes
// of the tensors. Checks follow the format's rules (no hole, no overlap, no
// trailing byte, no key twice) plus limits of our own on counts and names.
#ifndef WEFT_SRC_WEIGHTS_SAFETENSORS_H_
#define WEFT_SRC_WEIGHTS_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::weights {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kMaxTensors = 100'000;
inline constexpr size_t kMaxTensorNameBytes = 512;
inline constexpr size_t kMaxTensorRank = 8;

enum class ScalarType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBf16,
  kF32,
  kF64,
};

// The format's name of the type, such as "BF16".
[[nodiscard]] const char* ScalarTypeName(ScalarType type);
[[nodiscard]] size_t ScalarTypeBytes(ScalarType type);

// A tensor that lies in somebody else's memory: row-major, little-endian, at
// any alignment.
struct TensorView {
  ScalarType dtype = ScalarType::kF32;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> bytes;

  [[nodiscard]] size_t num_elements() const {
    return bytes.size() / ScalarTypeBytes(dtype);
  }
};

// "[2, 3]", for messages.
[[nodiscard]] std::string ShapeString(absl::Span<const int64_t> shape);

using TensorMap = absl::btree_map<std::string, TensorView>;

// Reads the header of a whole file held in memory. The views point into `file`.
// Values are not looked at: there may be NaN.
// Units:  time and memory O(header bytes), bounded by the limits above.
// Errors: DATA_LOSS when the file is shorter than its header says, else
//         INVALID_ARGUMENT; each names the tensor and the rule. Never throws.
[[nodiscard]] absl::StatusOr<TensorMap> ParseSafetensors(
    absl::string_view file);

// A file of the operator, memory-mapped. Not for files from clients: one that
// is cut short while mapped ends the process. Threads: any. The views live as
// long as the object.
class SafetensorsFile {
 public:
  // Errors: as ParseSafetensors and RegularFile::Open, naming the path.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(
      const std::string& path);

  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  [[nodiscard]] const TensorMap& tensors() const { return tensors_; }

 private:
  SafetensorsFile() = default;

  void* data_ = nullptr;
  size_t size_bytes_ = 0;
  TensorMap tensors_;
};

struct NamedTensor {
  std::string name;
  TensorView view;
};

// The bytes of a file with these tensors, in this order, and the metadata
// {"format": "pt"} that Hugging Face's readers ask for. Names are distinct and
// every view has as many bytes as its shape says.
[[nodiscard]] std::string WriteSafetensors(
    absl::Span<const NamedTensor> tensors);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_SAFETENSORS_H_
