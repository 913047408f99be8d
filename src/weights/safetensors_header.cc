#include "src/weights/safetensors_header.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace weft::weights {
namespace {

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

}  // namespace

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

}  // namespace weft::weights
