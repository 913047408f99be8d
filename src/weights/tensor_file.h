// A checkpoint file of any format, whose tensors are read in parts. Formats
// differ only in their directories: all store the tensors' bytes plainly.
// Torch-free.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_FILE_H_
#define WEFT_SRC_WEIGHTS_TENSOR_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/weights/regular_file.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// The reader of a format: finds the tensors of a file and checks that they are
// inside the file. Reads headers and directories, but no tensor. Its errors
// need not name the file.
using DirectoryReader =
    absl::StatusOr<TensorDirectory> (*)(const RegularFile& file);

// Threads: any, once opened.
class TensorFile {
 public:
  // Errors: those of RegularFile::Open and of the format. They name the path.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TensorFile>> Open(
      const std::string& path, DirectoryReader read_directory);

  [[nodiscard]] const TensorDirectory& tensors() const { return tensors_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const RegularFile& file() const { return file_; }

 private:
  TensorFile(std::string path, RegularFile file, TensorDirectory tensors)
      : path_(std::move(path)),
        file_(std::move(file)),
        tensors_(std::move(tensors)) {}

  const std::string path_;
  const RegularFile file_;
  const TensorDirectory tensors_;
};

// A tensor of a TensorFile, read whole or in slices. Cheap to copy. The
// TensorFile outlives it. Threads: any.
class DiskTensor {
 public:
  DiskTensor(const TensorFile& file, const TensorDirectory::value_type& entry)
      : file_(&file), entry_(&entry) {}

  // Returns the tensor's name in the file.
  [[nodiscard]] const std::string& name() const { return entry_->first; }
  [[nodiscard]] ScalarType dtype() const { return entry_->second.dtype; }
  [[nodiscard]] absl::Span<const int64_t> shape() const {
    return entry_->second.shape;
  }
  // Returns the number of rows of the tensor seen as a matrix. Its columns are
  // the last of two or more dimensions. A vector has one column; a scalar has
  // one row.
  [[nodiscard]] int64_t num_rows() const;
  [[nodiscard]] uint64_t row_bytes() const;
  [[nodiscard]] uint64_t size_bytes() const {
    return entry_->second.size_bytes;
  }

  // Returns whether both are the same bytes of the same file, in the same
  // shape. Tied tensors of a .bin file share their storage.
  [[nodiscard]] bool IsSameAs(const DiskTensor& other) const;

  // Returns whether the tensor is row-major. Only then can it be read.
  [[nodiscard]] bool is_row_major() const { return entry_->second.row_major; }

  // Fills the destination with the tensor's bytes from `first_byte` on. Errors:
  // those of Read.
  [[nodiscard]] absl::Status ReadBytes(uint64_t first_byte,
                                       absl::Span<std::byte> destination) const;

  // A rectangle of the tensor, seen as a matrix of num_rows() rows.
  struct Block {
    int64_t first_row = 0;
    int64_t num_rows = 0;
    uint64_t first_byte = 0;  // Where the block begins in each row.
    uint64_t num_bytes = 0;   // Size of the block in each row.
  };

  // Reads a block of the tensor, and no other byte. Reads whole rows at once,
  // and parts of rows one by one. Shapes: `destination` has block.num_rows *
  // block.num_bytes bytes. Errors: INVALID_ARGUMENT if the tensor is not
  // row-major, DATA_LOSS if the file was cut short since it was opened. Each
  // names file and tensor.
  [[nodiscard]] absl::Status Read(const Block& block,
                                  absl::Span<std::byte> destination) const;

 private:
  const TensorFile* file_;
  const TensorDirectory::value_type* entry_;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_FILE_H_
