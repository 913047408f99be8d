#include "src/weights/torch_bin.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"
#include "src/weights/byte_reader.h"
#include "src/weights/torch_pickle.h"
#include "src/weights/zip_directory.h"

namespace weft::weights {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are read as they lie, and archives are little-endian");

constexpr absl::string_view kPickleName = "/data.pkl";
constexpr uint32_t kZipSignature = 0x04034b50;
constexpr uint32_t kPickleStart = 0x80;
constexpr size_t kMaxByteOrderBytes = 16;
// Offset of a tar archive's magic. torch wrote tar archives before version 0.1.
constexpr size_t kTarMagicOffset = 257;

// Refuses a file that is not a zip archive. If the file has torch's old format,
// the message says so.
absl::Status CheckIsZip(const RegularFile& file) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string start,
      file.ReadBytes(
          0, std::min<uint64_t>(file.size_bytes(), kTarMagicOffset + 5)));
  const uint32_t signature = ByteReader(start).U32();
  if (signature == kZipSignature) return absl::OkStatus();
  const bool is_tar = start.ends_with("ustar");
  if (is_tar || (signature & 0xff) == kPickleStart) {
    return absl::UnimplementedError(absl::StrCat(
        "is in torch's old format (a ", is_tar ? "tar archive" : "bare pickle",
        "); load it with torch and torch.save it again"));
  }
  return absl::InvalidArgumentError("is not a zip archive of torch.save");
}

// Returns the only folder of the archive that has a data.pkl.
absl::StatusOr<std::string> FindRoot(const ZipDirectory& zip) {
  std::string root;
  for (const auto& [name, entry] : zip) {
    absl::string_view folder = name;
    if (!absl::ConsumeSuffix(&folder, kPickleName)) continue;
    if (!root.empty() || folder.empty()) {
      return absl::InvalidArgumentError(
          "zip archive has data.pkl twice, or outside of a folder");
    }
    root = std::string(folder);
  }
  if (root.empty()) {
    return absl::InvalidArgumentError(
        "zip archive has no data.pkl: torch.save did not write it");
  }
  return root;
}

// Reads a whole entry and verifies its checksum.
absl::StatusOr<std::string> ReadEntry(const RegularFile& file,
                                      absl::string_view name,
                                      const ZipEntry& entry,
                                      uint64_t max_bytes) {
  if (entry.size_bytes > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("zip entry '", absl::CHexEscape(name), "' has ",
                     entry.size_bytes, " bytes > limit ", max_bytes));
  }
  WEFT_ASSIGN_OR_RETURN(std::string bytes,
                        file.ReadBytes(entry.data_offset, entry.size_bytes));
  // torch writes 0 if it is configured to skip checksums.
  if (entry.crc32 != 0 && Crc32(bytes) != entry.crc32) {
    return absl::DataLossError(absl::StrCat(
        "zip entry '", absl::CHexEscape(name), "' fails its checksum"));
  }
  return bytes;
}

absl::Status CheckByteOrder(const RegularFile& file, const ZipDirectory& zip,
                            const std::string& root) {
  const auto entry = zip.find(absl::StrCat(root, "/byteorder"));
  if (entry == zip.end()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(
      const std::string order,
      ReadEntry(file, entry->first, entry->second, kMaxByteOrderBytes));
  if (order == "little") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "zip archive has byteorder '", absl::CHexEscape(order), "', not little"));
}

// Computes from shape, strides and offset whether the tensor is inside its
// storage. The computation never overflows.
bool LiesInStorage(const PickledTensor& tensor) {
  uint64_t last = tensor.offset;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] == 0) return tensor.offset <= tensor.storage_elements;
    uint64_t span = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return false;
    }
  }
  return last < tensor.storage_elements;
}

// Returns whether the tensor is row-major. Ignores the strides of dimensions of
// size 1, and all strides of an empty tensor.
bool IsRowMajor(const PickledTensor& tensor) {
  if (std::ranges::count(tensor.shape, 0u) > 0) return true;
  uint64_t stride = 1;
  for (size_t i = tensor.shape.size(); i > 0; --i) {
    const uint64_t size = tensor.shape[i - 1];
    if (size != 1 && tensor.strides[i - 1] != stride) return false;
    stride *= size;
  }
  return true;
}

// Checks that the tensor is inside its storage, and returns its place in the
// file.
absl::StatusOr<StoredTensor> Locate(const std::string& name,
                                    const PickledTensor& tensor,
                                    const ZipDirectory& zip,
                                    const std::string& root) {
  const auto record = zip.find(absl::StrCat(root, "/data/", tensor.storage));
  if (record == zip.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedTensor(name), " is in storage '",
        absl::CHexEscape(tensor.storage.substr(0, 64)), "', which is missing"));
  }
  const ZipEntry& entry = record->second;
  const uint64_t element_bytes = ScalarTypeBytes(tensor.dtype);
  uint64_t storage_bytes = 0;
  if (__builtin_mul_overflow(tensor.storage_elements, element_bytes,
                             &storage_bytes) ||
      storage_bytes != entry.size_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedTensor(name), " is in a storage of ", tensor.storage_elements,
        " elements of ", element_bytes, " bytes, whose zip entry has ",
        entry.size_bytes, " bytes"));
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t bytes,
                        DeclaredBytes(name, tensor.dtype, tensor.shape));
  if (!LiesInStorage(tensor)) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedTensor(name), " reaches beyond the ",
                     tensor.storage_elements, " elements of its storage"));
  }
  return StoredTensor{
      .dtype = tensor.dtype,
      .shape = std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end()),
      .offset = entry.data_offset + tensor.offset * element_bytes,
      .size_bytes = bytes,
      .row_major = IsRowMajor(tensor)};
}

}  // namespace

absl::StatusOr<TensorDirectory> ReadTorchDirectory(const RegularFile& file) {
  WEFT_RETURN_IF_ERROR(CheckIsZip(file));
  WEFT_ASSIGN_OR_RETURN(const ZipDirectory zip, ReadZipDirectory(file));
  WEFT_ASSIGN_OR_RETURN(const std::string root, FindRoot(zip));
  WEFT_RETURN_IF_ERROR(CheckByteOrder(file, zip, root));
  const std::string pickle_name = absl::StrCat(root, kPickleName);
  WEFT_ASSIGN_OR_RETURN(
      const std::string pickle,
      ReadEntry(file, pickle_name, zip.at(pickle_name), kMaxPickleBytes));
  WEFT_ASSIGN_OR_RETURN(const PickledTensors pickled, ParseTorchPickle(pickle));
  TensorDirectory tensors;
  for (const auto& [name, tensor] : pickled) {
    WEFT_ASSIGN_OR_RETURN(StoredTensor stored, Locate(name, tensor, zip, root));
    tensors.emplace(name, std::move(stored));
  }
  return tensors;
}

}  // namespace weft::weights
