// A checkpoint file of any format, whose tensors are read in parts. The formats
// differ only in the directory that lists the tensors. All formats store the
// tensors' bytes uncompressed. Torch-free.
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

// Reads the directory of a file in one format: finds the tensors and checks
// that they lie inside the file. Reads headers, but no tensor. The errors need
// not name the file.
using DirectoryReader =
    absl::StatusOr<TensorDirectory> (*)(const RegularFile& file);

// Threads: any, once opened.
class TensorFile {
 public:
  // Opens the file and reads its directory. Errors: DATA_LOSS if the file is
  // empty; those of RegularFile::Open and `read_directory`. Messages name the
  // path.
  static absl::StatusOr<std::unique_ptr<TensorFile>> Open(
      const std::string& path, DirectoryReader read_directory);

  const TensorDirectory& tensors() const { return tensors_; }
  const std::string& path() const { return path_; }
  const RegularFile& file() const { return file_; }

 private:
  TensorFile(std::string path, RegularFile file, TensorDirectory tensors)
      : path_(std::move(path)),
        file_(std::move(file)),
        tensors_(std::move(tensors)) {}

  const std::string path_;
  const RegularFile file_;
  const TensorDirectory tensors_;
};

// A tensor of a TensorFile. The tensor is read whole or in slices. Copies are
// cheap. The TensorFile outlives the tensor. Threads: any.
class DiskTensor {
 public:
  DiskTensor(const TensorFile& file, const TensorDirectory::value_type& entry)
      : file_(&file), entry_(&entry) {}

  // Returns the tensor's name in the file.
  const std::string& name() const { return entry_->first; }
  ScalarType dtype() const { return entry_->second.dtype; }
  absl::Span<const int64_t> shape() const { return entry_->second.shape; }
  // Returns the number of rows of the tensor seen as a matrix. With two or more
  // dimensions, the last one is the columns, and the others are flattened into
  // the rows. A vector has one column; a scalar has one row.
  int64_t num_rows() const;
  uint64_t row_bytes() const;
  uint64_t size_bytes() const { return entry_->second.size_bytes; }

  // Returns whether both tensors are row-major, of one dtype and shape, and at
  // the same place in one file, as tied tensors of a .bin file are.
  bool IsSameAs(const DiskTensor& other) const;

  // Returns whether the tensor is row-major. Other tensors cannot be read.
  bool is_row_major() const { return entry_->second.row_major; }

  // Fills `destination` with the tensor's bytes from `first_byte` on. Errors:
  // those of Read.
  absl::Status ReadBytes(uint64_t first_byte,
                         absl::Span<std::byte> destination) const;

  // A rectangle of the tensor, seen as a matrix of num_rows() rows.
  struct Block {
    int64_t first_row = 0;
    int64_t num_rows = 0;
    uint64_t first_byte = 0;  // Position of the block in each row.
    uint64_t num_bytes = 0;   // Size of the block in each row.
  };

  // Reads a block of the tensor, and no other byte. Reads whole rows together,
  // and parts of rows one row at a time. Shapes: `destination` has
  // block.num_rows * block.num_bytes bytes. Errors: INVALID_ARGUMENT if the
  // tensor is not row-major, INTERNAL if the block is outside the tensor, and
  // those of RegularFile::ReadAt. Messages name the tensor.
  absl::Status Read(const Block& block,
                    absl::Span<std::byte> destination) const;

 private:
  const TensorFile* file_;
  const TensorDirectory::value_type* entry_;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_FILE_H_
