#include "src/weights/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/safetensors_header.h"

namespace weft::weights {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are used in place and the format is little-endian");

constexpr size_t kLengthBytes = 8;
// Writers pad the header to this multiple, so that the tensors start aligned.
constexpr size_t kAlignment = 8;

absl::Status CheckEntry(absl::string_view name, const HeaderEntry& entry) {
  if (entry.begin > entry.end) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedTensor(name), " has data_offsets [", entry.begin,
                     ", ", entry.end, "], which run backwards"));
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t bytes,
                        DeclaredBytes(name, entry.dtype, entry.shape));
  if (bytes != entry.end - entry.begin) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedTensor(name), " has ", entry.end - entry.begin,
        " bytes by its data_offsets and ", bytes, " by its shape"));
  }
  return absl::OkStatus();
}

// Checks that the tensors fill the bytes after the header exactly, one after
// another.
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
          QuotedTensor(name), " starts at byte ", tensor.begin,
          tensor.begin < next ? " inside the tensor before, which ends at "
                              : " after a hole that starts at ",
          next));
    }
    next = tensor.end;
  }
  if (next > data_bytes) {
    return absl::DataLossError(absl::StrCat(QuotedTensor(order.back()->first),
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

// Reads the header's length from the file's first bytes, and checks it.
absl::StatusOr<uint64_t> HeaderBytes(absl::string_view start,
                                     uint64_t file_bytes) {
  if (file_bytes < kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat("safetensors file has ", file_bytes, " bytes < 8"));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, start.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors header has ", header_bytes, " bytes > limit ",
                     kMaxHeaderBytes));
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat("safetensors header has ", header_bytes,
                     " bytes, the file only ", file_bytes - kLengthBytes));
  }
  return header_bytes;
}

// Parses the header of a file that has `data_bytes` bytes after the header.
absl::StatusOr<TensorDirectory> ParseDirectory(absl::string_view header,
                                               uint64_t data_bytes) {
  WEFT_ASSIGN_OR_RETURN(const HeaderEntries entries, ParseHeaderJson(header));
  for (const auto& [name, entry] : entries) {
    WEFT_RETURN_IF_ERROR(CheckEntry(name, entry));
  }
  WEFT_RETURN_IF_ERROR(CheckContiguous(entries, data_bytes));
  TensorDirectory tensors;
  for (const auto& [name, entry] : entries) {
    tensors[name] = {
        .dtype = entry.dtype,
        .shape = std::vector<int64_t>(entry.shape.begin(), entry.shape.end()),
        .offset = kLengthBytes + header.size() + entry.begin,
        .size_bytes = entry.end - entry.begin};
  }
  return tensors;
}

}  // namespace

absl::StatusOr<TensorMap> ParseSafetensors(absl::string_view file) {
  WEFT_ASSIGN_OR_RETURN(const uint64_t header_bytes,
                        HeaderBytes(file, file.size()));
  WEFT_ASSIGN_OR_RETURN(
      TensorDirectory directory,
      ParseDirectory(file.substr(kLengthBytes, header_bytes),
                     file.size() - kLengthBytes - header_bytes));
  TensorMap tensors;
  for (auto& [name, tensor] : directory) {
    tensors[name] = {
        .dtype = tensor.dtype,
        .shape = std::move(tensor.shape),
        .bytes = absl::MakeConstSpan(
            reinterpret_cast<const std::byte*>(file.data()) + tensor.offset,
            tensor.size_bytes)};
  }
  return tensors;
}

absl::StatusOr<TensorDirectory> ReadSafetensorsDirectory(
    const RegularFile& file) {
  const uint64_t file_bytes = file.size_bytes();
  WEFT_ASSIGN_OR_RETURN(
      const std::string start,
      file.ReadBytes(0, std::min<uint64_t>(kLengthBytes, file_bytes)));
  WEFT_ASSIGN_OR_RETURN(const uint64_t header_bytes,
                        HeaderBytes(start, file_bytes));
  WEFT_ASSIGN_OR_RETURN(const std::string header,
                        file.ReadBytes(kLengthBytes, header_bytes));
  return ParseDirectory(header, file_bytes - kLengthBytes - header_bytes);
}

std::string SafetensorsStart(absl::Span<const TensorHeader> tensors) {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  uint64_t begin = 0;
  for (const TensorHeader& tensor : tensors) {
    const uint64_t end = begin + tensor.size_bytes;
    const std::string name =
        nlohmann::json(tensor.name)
            .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    absl::StrAppend(&text, ",", name, R"(:{"dtype":")",
                    ScalarTypeName(tensor.dtype), R"(","shape":[)",
                    absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)",
                    begin, ",", end, "]}");
    begin = end;
  }
  text.push_back('}');
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t header_bytes = text.size();
  std::string start(reinterpret_cast<const char*>(&header_bytes), kLengthBytes);
  return start.append(text);
}

std::string WriteSafetensors(absl::Span<const NamedTensor> tensors) {
  std::vector<TensorHeader> headers;
  size_t data_bytes = 0;
  for (const auto& [name, view] : tensors) {
    headers.push_back({name, view.dtype, view.shape, view.bytes.size()});
    data_bytes += view.bytes.size();
  }
  std::string file = SafetensorsStart(headers);
  file.reserve(file.size() + data_bytes);
  for (const NamedTensor& tensor : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.view.bytes.data()),
                tensor.view.bytes.size());
  }
  return file;
}

}  // namespace weft::weights
