// pytorch_model.bin: what torch.save writes since version 1.6. Torch-free.
//
// A zip archive with the folder's data.pkl, which says which tensor is which
// part of which storage, and one stored entry data/KEY for each storage.
#ifndef WEFT_SRC_WEIGHTS_TORCH_BIN_H_
#define WEFT_SRC_WEIGHTS_TORCH_BIN_H_

#include "absl/status/statusor.h"
#include "src/weights/regular_file.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// Reads the archive's directory and its pickle, and nothing else of it. Tensors
// may share a storage (tied weights). One that is not row-major is listed, and
// refused when it is read. The pickle's checksum is verified; storages are read
// in slices, and not checked any more than safetensors' are.
// Errors: DATA_LOSS when the file was cut short; UNIMPLEMENTED for the format
//         before 1.6; else INVALID_ARGUMENT naming the tensor, the zip entry or
//         the pickle's opcode, and the rule. Never throws.
[[nodiscard]] absl::StatusOr<TensorDirectory> ReadTorchDirectory(
    const RegularFile& file);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TORCH_BIN_H_
