#include "src/weights/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {
namespace {

// A tensor as the header declares it, before it is checked against the file.
struct HeaderEntry {
  ScalarType dtype = ScalarType::kF32;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // Offsets count bytes from the header's end.
  uint64_t end = 0;
};

using HeaderEntries = absl::btree_map<std::string, HeaderEntry>;

constexpr size_t kMaxMetadataKeys = 10'000;

constexpr absl::string_view kMetadataKey = "__metadata__";

std::optional<ScalarType> ScalarTypeOf(absl::string_view name) {
  for (int i = 0; i <= static_cast<int>(ScalarType::kF64); ++i) {
    const auto type = static_cast<ScalarType>(i);
    if (name == ScalarTypeName(type)) return type;
  }
  return std::nullopt;
}

// The part of the header that the parser is in.
enum class Place : uint8_t {
  kStart,
  kHeader,    // Expects a tensor's name or __metadata__.
  kMetadata,  // In __metadata__, which has only strings.
  kTensor,    // In a tensor: dtype, shape, data_offsets.
  kShape,     // In a tensor's shape.
  kOffsets,   // In a tensor's data_offsets.
  kEnd,
};

// Handles nlohmann's SAX events. A handler that returns false ends the parse.
// NOLINTBEGIN(readability-identifier-naming): the parser gives the names.
class HeaderHandler {
 public:
  bool null() { return Refuse("has null"); }
  bool boolean(bool /*value*/) { return Refuse("has a boolean"); }
  bool number_integer(int64_t value) {
    return Refuse(absl::StrCat("has the number ", value, " < 0"));
  }
  bool number_float(double /*value*/, const std::string& text) {
    return Refuse(absl::StrCat("has ", absl::CHexEscape(text.substr(0, 40)),
                               ", which is not an integer of 64 bits"));
  }
  bool binary(const nlohmann::json::binary_t& /*value*/) {
    return Refuse("has binary data");
  }
  bool number_unsigned(uint64_t value);
  bool string(std::string& value);
  bool start_object(size_t /*size*/);
  bool key(std::string& value);
  bool end_object();
  bool start_array(size_t /*size*/);
  bool end_array();
  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& /*error*/) {
    return Refuse(absl::StrCat("is not JSON in UTF-8 at byte ", position));
  }

  absl::StatusOr<HeaderEntries> Finish(bool complete) && {
    if (!complete || place_ != Place::kEnd) {
      if (problem_.empty()) Refuse("is not one JSON object");
      return absl::InvalidArgumentError(problem_);
    }
    return std::move(entries_);
  }

 private:
  bool Refuse(absl::string_view why);
  bool BeginTensor(const std::string& name);
  bool BeginField(const std::string& name);

  Place place_ = Place::kStart;
  HeaderEntries entries_;
  bool has_metadata_ = false;
  absl::flat_hash_set<std::string> metadata_keys_;
  // Name of the tensor that is being read, or __metadata__; else empty.
  std::string tensor_;
  std::string field_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  size_t num_offsets_ = 0;
  HeaderEntry entry_;
  std::string problem_;
};

bool HeaderHandler::Refuse(absl::string_view why) {
  problem_ = tensor_.empty() ? absl::StrCat("safetensors header ", why)
                             : absl::StrCat(QuotedTensor(tensor_), " ", why);
  return false;
}

bool HeaderHandler::number_unsigned(uint64_t value) {
  if (place_ == Place::kShape) {
    if (entry_.shape.size() == kMaxTensorRank) {
      return Refuse(
          absl::StrCat("has more than ", kMaxTensorRank, " dimensions"));
    }
    entry_.shape.push_back(value);
    return true;
  }
  if (place_ == Place::kOffsets && num_offsets_ < 2) {
    (num_offsets_ == 0 ? entry_.begin : entry_.end) = value;
    ++num_offsets_;
    return true;
  }
  return Refuse(absl::StrCat("has the number ", value, " out of place"));
}

bool HeaderHandler::string(std::string& value) {
  if (place_ == Place::kMetadata) return true;
  if (place_ != Place::kTensor || field_ != "dtype") {
    return Refuse("has a string out of place");
  }
  const std::optional<ScalarType> type = ScalarTypeOf(value);
  if (!type.has_value()) {
    return Refuse(absl::StrCat("has the unsupported dtype '",
                               absl::CHexEscape(value.substr(0, 40)), "'"));
  }
  entry_.dtype = *type;
  return true;
}

bool HeaderHandler::start_object(size_t /*size*/) {
  if (place_ == Place::kStart) {
    place_ = Place::kHeader;
    return true;
  }
  // The key before this object is a tensor's name or __metadata__.
  if (place_ == Place::kHeader) {
    place_ = tensor_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
    return true;
  }
  return Refuse("has an object inside a value");
}

bool HeaderHandler::BeginTensor(const std::string& name) {
  tensor_ = name;
  if (name == kMetadataKey) {
    if (has_metadata_) return Refuse("is there twice");
    has_metadata_ = true;
    return true;
  }
  const std::string problem = TensorNameProblem(name);
  if (!problem.empty()) return Refuse(problem);
  if (entries_.contains(name)) return Refuse("is there twice");
  if (entries_.size() == kMaxTensors) {
    return Refuse(absl::StrCat("is one more than the limit of ", kMaxTensors,
                               " tensors"));
  }
  entry_ = HeaderEntry();
  field_.clear();
  has_dtype_ = false;
  has_shape_ = false;
  num_offsets_ = 0;
  return true;
}

bool HeaderHandler::BeginField(const std::string& name) {
  field_ = name;
  if (name == "dtype") {
    return !std::exchange(has_dtype_, true) || Refuse("has dtype twice");
  }
  if (name == "shape") {
    return !std::exchange(has_shape_, true) || Refuse("has shape twice");
  }
  if (name == "data_offsets") {
    return num_offsets_ == 0 || Refuse("has data_offsets twice");
  }
  return Refuse(absl::StrCat("has the unknown field '",
                             absl::CHexEscape(name.substr(0, 40)), "'"));
}

bool HeaderHandler::key(std::string& value) {
  if (place_ == Place::kHeader) return BeginTensor(value);
  if (place_ == Place::kTensor) return BeginField(value);
  if (metadata_keys_.size() == kMaxMetadataKeys) {
    return Refuse(
        absl::StrCat("has more than ", kMaxMetadataKeys, " metadata keys"));
  }
  return metadata_keys_.insert(value).second ||
         Refuse("has a metadata key twice");
}

bool HeaderHandler::end_object() {
  if (place_ == Place::kHeader) {
    place_ = Place::kEnd;
    return true;
  }
  if (place_ == Place::kTensor) {
    if (!has_dtype_ || !has_shape_ || num_offsets_ != 2) {
      return Refuse("needs dtype, shape and data_offsets");
    }
    entries_.emplace(tensor_, std::move(entry_));
  }
  tensor_.clear();
  place_ = Place::kHeader;
  return true;
}

bool HeaderHandler::start_array(size_t /*size*/) {
  if (place_ == Place::kTensor && field_ == "shape") {
    place_ = Place::kShape;
    return true;
  }
  if (place_ == Place::kTensor && field_ == "data_offsets") {
    place_ = Place::kOffsets;
    return true;
  }
  return Refuse("has an array out of place");
}

bool HeaderHandler::end_array() {
  if (place_ == Place::kOffsets && num_offsets_ != 2) {
    return Refuse("needs two data_offsets");
  }
  place_ = Place::kTensor;
  return true;
}

// NOLINTEND(readability-identifier-naming)

// Parses the JSON text as a stream, without building a tree, and stops at the
// first error. Errors: INVALID_ARGUMENT, which names the rule and, if there is
// one, the tensor.
absl::StatusOr<HeaderEntries> ParseHeaderJson(absl::string_view text) {
  if (text.empty() || text.front() != '{') {
    return absl::InvalidArgumentError(
        "safetensors header does not start with '{'");
  }
  // nlohmann would take a NUL byte as the end of the text.
  if (text.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError("safetensors header has a NUL byte");
  }
  HeaderHandler handler;
  const bool complete =
      nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  return std::move(handler).Finish(complete);
}

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
