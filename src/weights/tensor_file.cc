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

uint64_t DiskTensor::row_bytes() const {
  const int64_t rows = num_rows();
  return rows == 0 ? 0
                   : entry_->second.size_bytes / static_cast<uint64_t>(rows);
}

absl::Status DiskTensor::ReadRows(int64_t begin, int64_t end,
                                  absl::Span<std::byte> destination) const {
  const StoredTensor& tensor = entry_->second;
  if (!tensor.row_major) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_->path(), ": ", QuotedTensor(name()),
                     " is not stored row by row; save it contiguous()"));
  }
  if (begin < 0 || begin > end || end > num_rows() ||
      destination.size() != static_cast<uint64_t>(end - begin) * row_bytes()) {
    return absl::InternalError(
        absl::StrCat(QuotedTensor(name()), " has ", num_rows(), " rows of ",
                     row_bytes(), " bytes; asked were [", begin, ", ", end,
                     ") into ", destination.size(), " bytes"));
  }
  const absl::Status read = file_->file().ReadAt(
      tensor.offset + static_cast<uint64_t>(begin) * row_bytes(), destination);
  if (!read.ok()) {
    return InFile(file_->path(), InFile(QuotedTensor(name()), read));
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
