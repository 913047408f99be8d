// Reads pytorch_model.bin in the format that torch.save has written since
// version 1.6. Torch-free.
//
// The file is a zip archive. Its entry data.pkl maps each tensor to a part of a
// storage. Each storage is an uncompressed entry data/KEY.
#ifndef WEFT_SRC_WEIGHTS_TORCH_BIN_H_
#define WEFT_SRC_WEIGHTS_TORCH_BIN_H_

#include "absl/status/statusor.h"
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
[[nodiscard]] absl::StatusOr<TensorDirectory> ReadTorchDirectory(
    const RegularFile& file);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TORCH_BIN_H_
