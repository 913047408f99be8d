#include "src/weights/tensor_file.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::weights {

absl::StatusOr<std::unique_ptr<TensorFile>> TensorFile::Open(
    const std::string& path, DirectoryReader read_directory) {
  WEFT_ASSIGN_OR_RETURN(RegularFile file, RegularFile::Open(path));
  if (file.size_bytes() == 0) {
    return absl::DataLossError(absl::StrCat(path, " is empty"));
  }
  absl::StatusOr<TensorDirectory> tensors = read_directory(file);
  if (!tensors.ok()) return InFile(path, tensors.status());
  return std::unique_ptr<TensorFile>(
      new TensorFile(path, std::move(file), *std::move(tensors)));
}

uint64_t DiskTensor::row_bytes() const {
  const int64_t rows = num_rows();
  return rows == 0 ? 0
                   : entry_->second.size_bytes / static_cast<uint64_t>(rows);
}

bool DiskTensor::IsSameAs(const DiskTensor& other) const {
  const StoredTensor& mine = entry_->second;
  const StoredTensor& theirs = other.entry_->second;
  return file_ == other.file_ && mine.offset == theirs.offset &&
         mine.dtype == theirs.dtype && mine.shape == theirs.shape &&
         mine.row_major && theirs.row_major;
}

absl::Status DiskTensor::Read(const Block& block,
                              absl::Span<std::byte> destination) const {
  const StoredTensor& tensor = entry_->second;
  if (!tensor.row_major) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_->path(), ": ", QuotedTensor(name()),
                     " is not stored row by row; save it contiguous()"));
  }
  const auto rows = static_cast<uint64_t>(block.num_rows);
  if (block.first_row < 0 || block.num_rows < 0 ||
      block.first_row > num_rows() - block.num_rows ||
      block.first_byte > row_bytes() ||
      block.num_bytes > row_bytes() - block.first_byte ||
      destination.size() != rows * block.num_bytes) {
    return absl::InternalError(absl::StrCat(
        QuotedTensor(name()), " has ", num_rows(), " rows of ", row_bytes(),
        " bytes; asked were ", block.num_rows, " from ", block.first_row,
        ", bytes [", block.first_byte, ", +", block.num_bytes, ") of each, in ",
        destination.size(), " bytes"));
  }
  const bool whole_rows = block.num_bytes == row_bytes();
  const uint64_t reads = whole_rows ? std::min<uint64_t>(rows, 1) : rows;
  const size_t size = whole_rows ? destination.size() : block.num_bytes;
  uint64_t offset = tensor.offset +
                    static_cast<uint64_t>(block.first_row) * row_bytes() +
                    block.first_byte;
  for (uint64_t i = 0; i < reads; ++i, offset += row_bytes()) {
    const absl::Status read =
        file_->file().ReadAt(offset, destination.subspan(i * size, size));
    if (!read.ok()) {
      return InFile(file_->path(), InFile(QuotedTensor(name()), read));
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
