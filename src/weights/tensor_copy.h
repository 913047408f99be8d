// Copies tensors of a checkpoint to a new safetensors file. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_COPY_H_
#define WEFT_SRC_WEIGHTS_TENSOR_COPY_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/weights/tensor_file.h"

namespace weft::weights {

struct CopiedTensor {
  std::string name;  // The name in the new file.
  DiskTensor source;
  std::optional<DiskTensor> twin;  // If set, must have the dtype, shape and
                                   // bytes of `source`.
};

// Writes the tensors, in this order and unchanged, to the file `path`, and
// replaces any file there. Writes the file completely or not at all. Copies in
// blocks, and calls `on_copied` with the size of each block in bytes.
// Units:   a few MB of memory.
// Errors:  those of DiskTensor::Read; INVALID_ARGUMENT if a twin differs; the
//          status of errno, naming the file, if the file cannot be written.
// Threads: any, on different paths.
absl::Status CopyTensors(const std::vector<CopiedTensor>& tensors,
                         const std::string& path,
                         const std::function<void(int64_t)>& on_copied);

// Writes `contents` to the file `path`, and replaces any file there. Writes the
// file completely or not at all.
absl::Status ReplaceFile(const std::string& path, absl::string_view contents);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_COPY_H_
