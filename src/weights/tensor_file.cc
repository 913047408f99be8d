#include "src/weights/tensor_file.h"

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

int64_t DiskTensor::num_rows() const {
  const absl::Span<const int64_t> dims = shape();
  if (dims.size() == 1) return dims[0];
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) rows *= dims[i];
  return rows;
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

absl::Status DiskTensor::ReadBytes(uint64_t first_byte,
                                   absl::Span<std::byte> destination) const {
  const StoredTensor& tensor = entry_->second;
  if (!tensor.row_major) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_->path(), ": ", QuotedTensor(name()),
                     " is not stored row by row; save it contiguous()"));
  }
  if (first_byte > tensor.size_bytes ||
      destination.size() > tensor.size_bytes - first_byte) {
    return absl::InternalError(absl::StrCat(
        QuotedTensor(name()), " has ", tensor.size_bytes, " bytes; asked were ",
        destination.size(), " from byte ", first_byte));
  }
  const absl::Status read =
      file_->file().ReadAt(tensor.offset + first_byte, destination);
  if (read.ok()) return read;
  return InFile(file_->path(), InFile(QuotedTensor(name()), read));
}

absl::Status DiskTensor::Read(const Block& block,
                              absl::Span<std::byte> destination) const {
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
  uint64_t first_byte =
      static_cast<uint64_t>(block.first_row) * row_bytes() + block.first_byte;
  if (block.num_bytes == row_bytes()) return ReadBytes(first_byte, destination);
  for (uint64_t row = 0; row < rows; ++row, first_byte += row_bytes()) {
    WEFT_RETURN_IF_ERROR(
        ReadBytes(first_byte,
                  destination.subspan(row * block.num_bytes, block.num_bytes)));
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
