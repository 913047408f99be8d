// Writes plain structs to messages of log.proto and reads them back. Both use
// one list of the struct's fields (src/request/step_fields.h), which is in the
// struct's namespace or in weft::log. Private to src/log.
#ifndef WEFT_SRC_LOG_FIELD_CODEC_H_
#define WEFT_SRC_LOG_FIELD_CODEC_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/reflection.h>

#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/request/step_fields.h"

namespace weft::log {

// Returns the bytes of the values, and the values of such bytes.
template <typename T>
std::string RawBytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

template <typename T>
std::vector<T> FromRawBytes(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  // data() of an empty vector may be null, which memcpy forbids.
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  }
  return values;
}

// The type of log.proto for T: the same, except for enums.
template <typename T>
auto WireValue() {
  if constexpr (!std::is_enum_v<T>)
    return T();
  else
    return std::conditional_t<sizeof(T) == 8, uint64_t, int32_t>();
}
template <typename T>
using Wire = decltype(WireValue<T>());

// The entries of a map that is a map in log.proto, too.
void Fields(const auto& f, auto& key, auto& value) {
  f("key", key);
  f("value", value);
}

class Writer {
 public:
  static constexpr bool kReads = false;
  static constexpr bool kDigests = false;

  explicit Writer(google::protobuf::Message* out)
      : out_(*out), reflection_(*out->GetReflection()) {}

  template <Scalar T>
  void operator()(const char* name, const T& value) const {
    Set(Find(name), static_cast<Wire<T>>(value));
  }
  // In microseconds. absl::InfiniteFuture() is absent.
  void operator()(const char* name, absl::Time time) const {
    if (time == absl::InfiniteFuture()) return;
    (*this)(name, int64_t{absl::ToUnixMicros(time)});
  }
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) const {
    if (value) (*this)(name, *value);
  }
  template <typename T>
  void operator()(const char* name, const std::vector<T>& values) const {
    const Field field = Find(name);
    if constexpr (Scalar<T>) {
      const auto to =
          reflection_.GetMutableRepeatedFieldRef<Wire<T>>(&out_, field);
      for (const T& value : values) to.Add(static_cast<Wire<T>>(value));
    } else {
      for (const T& value : values) Fields(Add(field), value);
    }
  }
  template <typename K, typename V>
  void operator()(const char* name, const std::map<K, V>& values) const {
    for (const auto& [key, value] : values) Fields(Add(Find(name)), key, value);
  }
  template <typename T>
  void operator()(const char* name, const T& value) const {
    Fields(Writer(reflection_.MutableMessage(&out_, Find(name))), value);
  }

  // Writes the values as an array of bytes.
  template <typename T>
  void Raw(const char* name, const std::vector<T>& values) const {
    reflection_.SetString(&out_, Find(name), RawBytes(values));
  }

  // Writes a variant as a oneof with these names, one for each alternative. An
  // alternative whose name is null is not written. One whose name is no message
  // has its one field here.
  template <typename Variant>
  void OneOf(const std::array<const char*, std::variant_size_v<Variant>>& names,
             const Variant& value) const {
    const char* const name = names.at(value.index());
    if (name == nullptr) return;
    const Field field = Find(name);
    const Writer kind = field->message_type() == nullptr
                            ? *this
                            : Writer(reflection_.MutableMessage(&out_, field));
    std::visit([&kind](const auto& fields) { Fields(kind, fields); }, value);
  }

 private:
  using Field = const google::protobuf::FieldDescriptor*;

  Field Find(const char* name) const {
    return out_.GetDescriptor()->FindFieldByName(name);
  }
  Writer Add(Field field) const {
    return Writer(reflection_.AddMessage(&out_, field));
  }
  void Set(Field f, bool v) const { reflection_.SetBool(&out_, f, v); }
  void Set(Field f, double v) const { reflection_.SetDouble(&out_, f, v); }
  void Set(Field f, int32_t v) const { reflection_.SetInt32(&out_, f, v); }
  void Set(Field f, int64_t v) const { reflection_.SetInt64(&out_, f, v); }
  void Set(Field f, uint64_t v) const { reflection_.SetUInt64(&out_, f, v); }
  void Set(Field f, std::string v) const {
    reflection_.SetString(&out_, f, std::move(v));
  }

  google::protobuf::Message& out_;
  const google::protobuf::Reflection& reflection_;
};

// Replaces the fields by those of a message. One that is optional in log.proto
// and absent stays as it is.
class Reader {
 public:
  static constexpr bool kReads = true;
  static constexpr bool kDigests = false;

  // Sets `*status` to DATA_LOSS if a oneof is not set.
  Reader(const google::protobuf::Message& in, absl::Status* status)
      : in_(in), reflection_(*in.GetReflection()), status_(*status) {}

  template <Scalar T>
  void operator()(const char* name, T& value) const {
    const Field field = Find(name);
    if (field->has_presence() && !Has(field)) return;
    Wire<T> wire{};
    Get(field, wire);
    value = static_cast<T>(std::move(wire));
  }
  void operator()(const char* name, absl::Time& time) const {
    const Field field = Find(name);
    if (field->has_presence() && !Has(field)) return;
    time = absl::FromUnixMicros(reflection_.GetInt64(in_, field));
  }
  template <typename T>
  void operator()(const char* name, std::optional<T>& value) const {
    value.reset();
    if (Has(Find(name))) (*this)(name, value.emplace());
  }
  template <typename T>
  void operator()(const char* name, std::vector<T>& values) const {
    const Field field = Find(name);
    values.clear();
    if constexpr (Scalar<T>) {
      for (const Wire<T>& value :
           reflection_.GetRepeatedFieldRef<Wire<T>>(in_, field)) {
        values.push_back(static_cast<T>(value));
      }
    } else {
      for (int i = 0; i < reflection_.FieldSize(in_, field); ++i) {
        Fields(Entry(field, i), values.emplace_back());
      }
    }
  }
  template <typename V>
  void operator()(const char* name, std::map<std::string, V>& values) const {
    const Field field = Find(name);
    values.clear();
    for (int i = 0; i < reflection_.FieldSize(in_, field); ++i) {
      std::string key;
      V value{};
      Fields(Entry(field, i), key, value);
      values.insert_or_assign(std::move(key), std::move(value));
    }
  }
  template <typename T>
  void operator()(const char* name, T& value) const {
    Fields(Kind(Find(name)), value);
  }

  template <typename T>
  void Raw(const char* name, std::vector<T>& values) const {
    std::string scratch;
    values = FromRawBytes<T>(
        reflection_.GetStringReference(in_, Find(name), &scratch));
  }

  template <typename Variant>
  void OneOf(const std::array<const char*, std::variant_size_v<Variant>>& names,
             Variant& value) const {
    const auto any = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (ReadKind<kIndex>(names[kIndex], value) || ...);
    };
    if (any(std::make_index_sequence<std::variant_size_v<Variant>>())) return;
    status_ = absl::DataLossError(
        absl::StrCat("a ", in_.GetDescriptor()->name(), " of an unknown kind"));
  }

 private:
  using Field = const google::protobuf::FieldDescriptor*;

  Field Find(const char* name) const {
    return in_.GetDescriptor()->FindFieldByName(name);
  }
  bool Has(Field field) const { return reflection_.HasField(in_, field); }
  Reader Kind(Field field) const {
    return Reader(reflection_.GetMessage(in_, field), &status_);
  }
  Reader Entry(Field field, int i) const {
    return Reader(reflection_.GetRepeatedMessage(in_, field, i), &status_);
  }
  template <size_t kIndex>
  bool ReadKind(const char* name, auto& value) const {
    if (name == nullptr || !Has(Find(name))) return false;
    const Field field = Find(name);
    Fields(field->message_type() == nullptr ? *this : Kind(field),
           value.template emplace<kIndex>());
    return true;
  }
  void Get(Field f, bool& v) const { v = reflection_.GetBool(in_, f); }
  void Get(Field f, double& v) const { v = reflection_.GetDouble(in_, f); }
  void Get(Field f, int32_t& v) const { v = reflection_.GetInt32(in_, f); }
  void Get(Field f, int64_t& v) const { v = reflection_.GetInt64(in_, f); }
  void Get(Field f, uint64_t& v) const { v = reflection_.GetUInt64(in_, f); }
  void Get(Field f, std::string& v) const { v = reflection_.GetString(in_, f); }

  const google::protobuf::Message& in_;
  const google::protobuf::Reflection& reflection_;
  absl::Status& status_;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_FIELD_CODEC_H_
