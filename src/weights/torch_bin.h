// Reads pytorch_model.bin in the format that torch.save has written since
// version 1.6. Torch-free.
//
// The file is a zip archive. Its entry data.pkl maps each tensor to a part of a
// storage. Each storage is an uncompressed entry data/KEY.
#ifndef WEFT_SRC_WEIGHTS_TORCH_BIN_H_
#define WEFT_SRC_WEIGHTS_TORCH_BIN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/weights/regular_file.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// Reads the archive's directory and headers and its pickle, and verifies the
// pickle's checksum if it has one. Storages are later read in slices and, as in
// safetensors, without a checksum. Several tensors may share a storage (tied
// weights). The result lists tensors that are not row-major, but they cannot be
// read. Errors: DATA_LOSS if the file was cut short or a checksum fails;
// UNIMPLEMENTED for the format before 1.6; those of RegularFile::ReadAt;
// otherwise INVALID_ARGUMENT, which names the rule. Never throws.
absl::StatusOr<TensorDirectory> ReadTorchDirectory(const RegularFile& file);

inline constexpr size_t kMaxPickleBytes = size_t{64} << 20;

// A tensor as the pickle declares it, before it is checked against its storage.
// Offset and strides count elements.
struct PickledTensor {
  ScalarType dtype = ScalarType::kF32;
  std::string storage;  // The storage's name below data/.
  uint64_t storage_elements = 0;
  uint64_t offset = 0;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> strides;  // One for each dimension.
};

using PickledTensors = absl::btree_map<std::string, PickledTensor>;

// Reads the pickle inside the archive. Accepts only the Python names that dicts
// of tensors need. For any other name, returns an error with the offset in the
// pickle. Imports and calls nothing. Runs a pickle whose result is a dict that
// maps names to tensors or Parameters, such as a module's state_dict().
// Units:  time and memory O(bytes), bounded by the limits of pickle_machine.h.
// Errors: DATA_LOSS if the pickle ends early, otherwise INVALID_ARGUMENT naming
// the opcode and its offset, the tensor or the limit. Never throws.
absl::StatusOr<PickledTensors> ParseTorchPickle(absl::string_view pickle);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TORCH_BIN_H_
