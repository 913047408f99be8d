#include "server/wire/parse_cost.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// More than any message of ours, with its allocation and its place in a list or
// a map (parse_cost_test.cc compares).
constexpr int64_t kMessageBytes = 448;
// An empty string, with its allocation and its place in a list.
constexpr int64_t kStringBytes = 64;
// A field that the message does not have.
constexpr int64_t kUnknownBytes = 96;

// The wire types: the low three bits of a tag. There are groups, too, which no
// message of ours has.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
constexpr int kWireBits = 3;

// Returns the wire type of a single value of the field.
uint32_t WireOf(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return kFixed32;
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return kFixed64;
    case FieldDescriptor::TYPE_STRING:
    case FieldDescriptor::TYPE_BYTES:
    case FieldDescriptor::TYPE_MESSAGE:
      return kBytes;
    default:
      return kVarint;
  }
}

// Returns the bytes of a list's entry, with the room that a growing list has
// for more entries.
int64_t EntryBytes(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return 2;
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_UINT64:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return 16;
    default:
      return 8;
  }
}

class Scan {
 public:
  Scan(google::protobuf::io::ZeroCopyInputStream* wire, int64_t most)
      : in_(wire), most_(most) {}

  // Reads the fields of a message of `size` bytes. Returns false if the message
  // is malformed or takes more than `most_`.
  bool Message(const Descriptor& type, int size) {
    const auto outer = in_.PushLimit(size);
    if (in_.BytesUntilLimit() != size) return false;
    while (const uint32_t tag = in_.ReadTagNoLastTag()) {
      const auto number = static_cast<int>(tag >> kWireBits);
      if (number == 0 || bytes_ > most_ ||
          !Field(type.FindFieldByNumber(number),
                 tag & ((1U << kWireBits) - 1))) {
        return false;
      }
    }
    const bool whole = in_.BytesUntilLimit() == 0;
    in_.PopLimit(outer);
    return whole && bytes_ <= most_;
  }

  int64_t bytes() const { return bytes_; }

 private:
  // Reads a field's value. `field` is null for a field that the message does
  // not have.
  bool Field(const FieldDescriptor* field, uint32_t wire) {
    if (wire != kBytes) Number(field, wire);
    uint64_t ignored = 0;
    switch (wire) {
      case kVarint:
        return in_.ReadVarint64(&ignored);
      case kFixed32:
        return in_.Skip(sizeof(uint32_t));
      case kFixed64:
        return in_.Skip(sizeof(uint64_t));
      case kBytes: {
        int size = 0;
        return in_.ReadVarintSizeAsInt(&size) && Delimited(field, size);
      }
      default:
        return false;
    }
  }

  void Number(const FieldDescriptor* field, uint32_t wire) {
    // The parser keeps a value of another wire type as an unknown field.
    if (field == nullptr || WireOf(*field) != wire) {
      bytes_ += kUnknownBytes;
    } else if (field->is_repeated()) {
      bytes_ += EntryBytes(*field);
    }
  }

  bool Delimited(const FieldDescriptor* field, int size) {
    if (field != nullptr && field->message_type() != nullptr) {
      bytes_ += kMessageBytes;
      return Message(*field->message_type(), size);
    }
    if (field != nullptr && field->is_packable()) {
      return Packed(*field, size);
    }
    const bool known = field != nullptr &&
                       field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    bytes_ += size + (known ? kStringBytes : kStringBytes + kUnknownBytes);
    return in_.Skip(size);
  }

  bool Packed(const FieldDescriptor& field, int size) {
    if (WireOf(field) == kVarint) return Varints(EntryBytes(field), size);
    bytes_ += int64_t{2} * size;
    return in_.Skip(size);
  }

  // Reads packed varints, each of which ends with a byte below 0x80.
  bool Varints(int64_t entry_bytes, int size) {
    while (size > 0) {
      const void* data = nullptr;
      int piece = 0;
      if (!in_.GetDirectBufferPointer(&data, &piece)) return false;
      piece = std::min(piece, size);
      const auto* const begin = static_cast<const signed char*>(data);
      bytes_ +=
          entry_bytes * std::count_if(begin, begin + piece,
                                      [](auto byte) { return byte >= 0; });
      size -= piece;
      if (!in_.Skip(piece)) return false;
    }
    return true;
  }

  google::protobuf::io::CodedInputStream in_;
  const int64_t most_;
  int64_t bytes_ = kMessageBytes;
};

}  // namespace

absl::StatusOr<int64_t> ParsedBytes(
    const Descriptor& type, google::protobuf::io::ZeroCopyInputStream* wire,
    int64_t size) {
  const int64_t most = size * kMaxGrowth + kSmallRequestBytes;
  Scan scan(wire, most);
  const bool scanned = scan.Message(type, static_cast<int>(size));
  if (scan.bytes() > most) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "the ", size, " bytes of this ", type.name(),
            " have so many small parts that they take more than ", most,
            " bytes of memory, the limit for its size: send fewer parts")),
        {.name = "TOO_LARGE", .values = {{"limit", absl::StrCat(most)}}});
  }
  if (scanned) return scan.bytes();
  return absl::InvalidArgumentError(
      absl::StrCat("the request is not a ", type.name()));
}

absl::StatusOr<std::shared_ptr<void>> ChargeMessage(
    FairBudget* memory, const std::string& holder, const Descriptor& type,
    google::protobuf::io::ZeroCopyInputStream* wire, int64_t size) {
  WEFT_ASSIGN_OR_RETURN(const int64_t parsed, ParsedBytes(type, wire, size));
  return memory->Reserve(holder, size + parsed);
}

}  // namespace weft::server
