#include "src/weights/safetensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/regular_file.h"
#include "src/weights/safetensors_header.h"

namespace weft::weights {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are used in place and the format is little-endian");

constexpr size_t kLengthBytes = 8;
// Writers pad the header so that tensors start aligned.
constexpr size_t kAlignment = 8;

std::string Quoted(absl::string_view name) {
  return absl::StrCat("tensor '", absl::CHexEscape(name), "'");
}

// Bytes that shape and dtype ask for.
absl::StatusOr<uint64_t> DeclaredBytes(absl::string_view name,
                                       const HeaderEntry& entry) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  uint64_t bytes = ScalarTypeBytes(entry.dtype);
  for (const uint64_t size : entry.shape) {
    // A zero later in the shape does not excuse an absurd size before it.
    if (size > kMax || (size != 0 && bytes > kMax / size)) {
      return absl::InvalidArgumentError(
          absl::StrCat(Quoted(name), " has a shape of more than 2^63 bytes"));
    }
    bytes *= size;
  }
  return bytes;
}

absl::Status CheckEntry(absl::string_view name, const HeaderEntry& entry) {
  if (entry.begin > entry.end) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(name), " has data_offsets [", entry.begin, ", ",
                     entry.end, "], which run backwards"));
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t bytes, DeclaredBytes(name, entry));
  if (bytes != entry.end - entry.begin) {
    return absl::InvalidArgumentError(absl::StrCat(
        Quoted(name), " has ", entry.end - entry.begin,
        " bytes by its data_offsets and ", bytes, " by its shape"));
  }
  return absl::OkStatus();
}

// The tensors must fill the data exactly, one after the other.
absl::Status CheckContiguous(const HeaderEntries& entries,
                             uint64_t data_bytes) {
  std::vector<const HeaderEntries::value_type*> order;
  order.reserve(entries.size());
  for (const auto& entry : entries) order.push_back(&entry);
  std::ranges::sort(order, {}, [](const auto* entry) {
    return std::pair(entry->second.begin, entry->second.end);
  });
  uint64_t next = 0;
  for (const auto* entry : order) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin != next) {
      return absl::InvalidArgumentError(absl::StrCat(
          Quoted(name), " starts at byte ", tensor.begin,
          tensor.begin < next ? " inside the tensor before, which ends at "
                              : " after a hole that starts at ",
          next));
    }
    next = tensor.end;
  }
  if (next > data_bytes) {
    return absl::DataLossError(absl::StrCat(Quoted(order.back()->first),
                                            " ends at byte ", next, " of ",
                                            data_bytes));
  }
  if (next < data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors file has ", data_bytes - next,
                     " bytes after the last tensor"));
  }
  return absl::OkStatus();
}

std::string HeaderText(absl::Span<const NamedTensor> tensors) {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  size_t begin = 0;
  for (const NamedTensor& tensor : tensors) {
    const size_t end = begin + tensor.view.bytes.size();
    const std::string name =
        nlohmann::json(tensor.name)
            .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    absl::StrAppend(&text, ",", name, R"(:{"dtype":")",
                    ScalarTypeName(tensor.view.dtype), R"(","shape":[)",
                    absl::StrJoin(tensor.view.shape, ","),
                    R"(],"data_offsets":[)", begin, ",", end, "]}");
    begin = end;
  }
  text.push_back('}');
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  return text;
}

}  // namespace

const char* ScalarTypeName(ScalarType type) {
  constexpr const char* kNames[] = {"BOOL", "U8",  "I8",  "U16", "I16",
                                    "U32",  "I32", "U64", "I64", "F16",
                                    "BF16", "F32", "F64"};
  return kNames[static_cast<int>(type)];
}

size_t ScalarTypeBytes(ScalarType type) {
  constexpr size_t kBytes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return kBytes[static_cast<int>(type)];
}

std::string ShapeString(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<TensorMap> ParseSafetensors(absl::string_view file) {
  if (file.size() < kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat("safetensors file has ", file.size(), " bytes < 8"));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors header has ", header_bytes, " bytes > limit ",
                     kMaxHeaderBytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat("safetensors header has ", header_bytes,
                     " bytes, the file only ", file.size() - kLengthBytes));
  }
  WEFT_ASSIGN_OR_RETURN(
      const HeaderEntries entries,
      ParseHeaderJson(file.substr(kLengthBytes, header_bytes)));
  const absl::string_view data = file.substr(kLengthBytes + header_bytes);
  for (const auto& [name, entry] : entries) {
    WEFT_RETURN_IF_ERROR(CheckEntry(name, entry));
  }
  WEFT_RETURN_IF_ERROR(CheckContiguous(entries, data.size()));
  TensorMap tensors;
  for (const auto& [name, entry] : entries) {
    TensorView& view = tensors[name];
    view.dtype = entry.dtype;
    view.shape.assign(entry.shape.begin(), entry.shape.end());
    view.bytes = absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(data.data()) + entry.begin,
        entry.end - entry.begin);
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  if (file.size_bytes() == 0) {
    return absl::DataLossError(absl::StrCat(path, " is empty"));
  }
  std::unique_ptr<SafetensorsFile> result(new SafetensorsFile());
  void* data =
      mmap(nullptr, file.size_bytes(), PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (data == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("map ", path));
  }
  result->data_ = data;
  result->size_bytes_ = file.size_bytes();
  absl::StatusOr<TensorMap> tensors = ParseSafetensors(
      absl::string_view(static_cast<const char*>(data), file.size_bytes()));
  if (!tensors.ok()) {
    return absl::Status(tensors.status().code(),
                        absl::StrCat(path, ": ", tensors.status().message()));
  }
  result->tensors_ = *std::move(tensors);
  return result;
}

SafetensorsFile::~SafetensorsFile() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

std::string WriteSafetensors(absl::Span<const NamedTensor> tensors) {
  const std::string header = HeaderText(tensors);
  const uint64_t header_bytes = header.size();
  size_t total = kLengthBytes + header.size();
  for (const NamedTensor& tensor : tensors) total += tensor.view.bytes.size();
  std::string file;
  file.reserve(total);
  file.append(reinterpret_cast<const char*>(&header_bytes), kLengthBytes);
  file.append(header);
  for (const NamedTensor& tensor : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.view.bytes.data()),
                tensor.view.bytes.size());
  }
  return file;
}

}  // namespace weft::weights
