#include "tests/server/wire/message_mutator.h"

#include <cfloat>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <utility>

namespace weft::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The methods of Reflection that write a value of one type.
template <typename Value>
struct Writer {
  void (Reflection::*set)(Message*, const FieldDescriptor*, Value) const;
  void (Reflection::*set_item)(Message*, const FieldDescriptor*, int,
                               Value) const;
  void (Reflection::*add)(Message*, const FieldDescriptor*, Value) const;
};

template <typename Value>
void Write(Message* message, const FieldDescriptor* field, int index,
           const Writer<Value>& writer, Value value) {
  const Reflection& reflection = *message->GetReflection();
  if (index < 0) {
    (reflection.*writer.set)(message, field, std::move(value));
  } else if (index == reflection.FieldSize(*message, field)) {
    (reflection.*writer.add)(message, field, std::move(value));
  } else {
    (reflection.*writer.set_item)(message, field, index, std::move(value));
  }
}

}  // namespace

void MessageMutator::Mutate(Message* message) {
  for (size_t left = 1 + Below(4); left > 0; --left) Change(message);
}

void MessageMutator::Mutate(std::string* bytes) {
  for (size_t left = 1 + Below(4); left > 0; --left) {
    const size_t at = Below(bytes->size() + 1);
    const char byte = static_cast<char>(Below(256));
    switch (Below(3)) {
      case 0:
        bytes->insert(at, 1, byte);
        break;
      case 1:
        bytes->erase(at, 1 + Below(3));
        break;
      default:
        if (at < bytes->size()) (*bytes)[at] = byte;
    }
  }
}

void MessageMutator::Change(Message* message) {
  const auto& descriptor = *message->GetDescriptor();
  const Reflection& reflection = *message->GetReflection();
  const FieldDescriptor* const field = descriptor.field(
      static_cast<int>(Below(static_cast<size_t>(descriptor.field_count()))));
  if (OneIn(12)) {
    reflection.ClearField(message, field);
  } else if (field->is_repeated()) {
    ChangeList(message, field);
  } else {
    Put(message, field, -1);
  }
}

void MessageMutator::ChangeList(Message* message,
                                const FieldDescriptor* field) {
  static constexpr size_t kAdded[] = {1, 2, 30, 70};
  const Reflection& reflection = *message->GetReflection();
  const int size = reflection.FieldSize(*message, field);
  const size_t choice = Below(8);
  if (choice == 0 && size > 0) {
    reflection.RemoveLast(message, field);
  } else if (choice == 1) {
    for (size_t left = kAdded[Below(std::size(kAdded))]; left > 0; --left) {
      Put(message, field, reflection.FieldSize(*message, field));
    }
  } else if (size == 0) {
    Put(message, field, 0);
  } else {
    Put(message, field, static_cast<int>(Below(static_cast<size_t>(size))));
  }
}

void MessageMutator::Put(Message* message, const FieldDescriptor* field,
                         int index) {
  const Reflection& to = *message->GetReflection();
  using R = Reflection;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return Write<uint32_t>(
          message, field, index,
          {&R::SetUInt32, &R::SetRepeatedUInt32, &R::AddUInt32},
          static_cast<uint32_t>(Integer()));
    case FieldDescriptor::CPPTYPE_INT32:
      return Write<int32_t>(message, field, index,
                            {&R::SetInt32, &R::SetRepeatedInt32, &R::AddInt32},
                            static_cast<int32_t>(Integer()));
    case FieldDescriptor::CPPTYPE_UINT64:
      return Write<uint64_t>(
          message, field, index,
          {&R::SetUInt64, &R::SetRepeatedUInt64, &R::AddUInt64}, Integer());
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Write<float>(message, field, index,
                          {&R::SetFloat, &R::SetRepeatedFloat, &R::AddFloat},
                          static_cast<float>(Real()));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Write<double>(
          message, field, index,
          {&R::SetDouble, &R::SetRepeatedDouble, &R::AddDouble}, Real());
    case FieldDescriptor::CPPTYPE_BOOL:
      return Write<bool>(message, field, index,
                         {&R::SetBool, &R::SetRepeatedBool, &R::AddBool},
                         OneIn(2));
    case FieldDescriptor::CPPTYPE_ENUM:
      return Write<int>(
          message, field, index,
          {&R::SetEnumValue, &R::SetRepeatedEnumValue, &R::AddEnumValue},
          static_cast<int>(OneIn(4) ? Integer() : Below(12)));
    case FieldDescriptor::CPPTYPE_STRING:
      return Write<std::string>(
          message, field, index,
          {&R::SetString, &R::SetRepeatedString, &R::AddString}, Text());
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return Change(index < 0 ? to.MutableMessage(message, field)
                    : index == to.FieldSize(*message, field)
                        ? to.AddMessage(message, field)
                        : to.MutableRepeatedMessage(message, field, index));
    default:
      // No request has a field of another type.
      std::abort();
  }
}

uint64_t MessageMutator::Integer() {
  static constexpr uint64_t kEdges[] = {
      20,         21,         31,        32,         33,        40,
      41,         64,         65,        99,         100,       101,
      1000,       1001,       1024,      1025,       INT32_MAX, 1ULL << 31,
      UINT32_MAX, 1ULL << 32, INT64_MAX, 1ULL << 63, UINT64_MAX};
  return OneIn(2) ? Below(10) : kEdges[Below(std::size(kEdges))];
}

double MessageMutator::Real() {
  using Limits = std::numeric_limits<double>;
  static constexpr double kEdges[] = {0,
                                      -0.0,
                                      1,
                                      -1,
                                      1.1,
                                      1e-45,
                                      1e-37,
                                      1e-8,
                                      1e-9,
                                      1e3,
                                      1e6,
                                      1e8,
                                      1e30,
                                      1.1e30,
                                      FLT_MAX,
                                      DBL_MAX,
                                      -DBL_MAX,
                                      Limits::denorm_min(),
                                      Limits::quiet_NaN(),
                                      Limits::infinity(),
                                      -Limits::infinity()};
  if (OneIn(2)) return static_cast<double>(Below(100)) / 100;
  return kEdges[Below(std::size(kEdges))];
}

std::string MessageMutator::Text() {
  static const std::string kTexts[] = {"",
                                       "a",
                                       "b2",
                                       "team~a",
                                       "~a",
                                       "a~b~c",
                                       "..",
                                       " ..",
                                       "../etc",
                                       "a/../b",
                                       "/etc/passwd",
                                       "a.",
                                       "-rf",
                                       "CON",
                                       "%2e%2e",
                                       "a\tb\n",
                                       std::string("a\0b", 3),
                                       "\xff\xfe\x80",
                                       "\xf0\x9f\x98\x80",
                                       "\xe2\x80\xae",
                                       "adapter_config.json",
                                       "adapter_model.safetensors",
                                       std::string(128, 'a'),
                                       std::string(129, 'a'),
                                       std::string(257, 'x'),
                                       std::string(300, '\x01')};
  if (!OneIn(3)) return kTexts[Below(std::size(kTexts))];
  // The bytes of up to five 4-byte numbers, sometimes with up to 3 more bytes.
  std::string raw(4 * Below(6) + (OneIn(4) ? Below(4) : 0), '\0');
  for (size_t i = 0; i < raw.size(); i += OneIn(8) ? 1 : 4) {
    raw[i] = static_cast<char>(Below(OneIn(8) ? 256 : 100));
  }
  return raw;
}

}  // namespace weft::server
