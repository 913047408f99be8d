// Converts the values of weftd's flags from text and to text.
#ifndef WEFT_SERVER_FLAG_VALUES_H_
#define WEFT_SERVER_FLAG_VALUES_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "src/base/log.h"
#include "src/base/options.h"

namespace weft {

// The names of an enum's values, in the order in which --help lists them.
template <typename Enum>
using EnumNames = std::vector<std::pair<absl::string_view, Enum>>;
[[nodiscard]] const EnumNames<Device>& NamesOf(Device tag);
[[nodiscard]] const EnumNames<GradientCheckpointing>& NamesOf(
    GradientCheckpointing tag);
[[nodiscard]] const EnumNames<Dtype>& NamesOf(Dtype tag);
[[nodiscard]] const EnumNames<CpuBf16>& NamesOf(CpuBf16 tag);
[[nodiscard]] const EnumNames<BaseWeights>& NamesOf(BaseWeights tag);
[[nodiscard]] const EnumNames<LoadFormat>& NamesOf(LoadFormat tag);
[[nodiscard]] const EnumNames<LogStyle>& NamesOf(LogStyle tag);
[[nodiscard]] const EnumNames<LogLevel>& NamesOf(LogLevel tag);

// Parses `text` as a value of the type of `*out`. Returns false if that fails.
[[nodiscard]] bool ReadFlagValue(absl::string_view text, std::string* out);
[[nodiscard]] bool ReadFlagValue(absl::string_view text, int* out);
[[nodiscard]] bool ReadFlagValue(absl::string_view text, int64_t* out);
[[nodiscard]] bool ReadFlagValue(absl::string_view text, double* out);
[[nodiscard]] bool ReadFlagValue(absl::string_view text, bool* out);
[[nodiscard]] bool ReadFlagValue(absl::string_view text,
                                 std::vector<std::string>* out);
template <typename Enum>
requires std::is_enum_v<Enum>
[[nodiscard]] bool ReadFlagValue(absl::string_view text, Enum* out) {
  for (const auto& [name, value] : NamesOf(Enum{})) {
    if (name == text) {
      *out = value;
      return true;
    }
  }
  return false;
}

// Parse a number of bytes, such as 4096, 4GiB or 1.5TB, and a number of
// seconds, such as 90, 90s or 1h30m.
[[nodiscard]] bool ReadBytes(absl::string_view text, int64_t* out);
[[nodiscard]] bool ReadSeconds(absl::string_view text, int* out);

// Returns what a value of type T must be, in words.
template <typename T>
[[nodiscard]] std::string FlagValueWords(const T& /*tag*/) {
  if constexpr (std::is_enum_v<T>) {
    return absl::StrJoin(NamesOf(T{}), " or ",
                         [](std::string* out, const auto& entry) {
                           absl::StrAppend(out, entry.first);
                         });
  } else if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_same_v<T, double>) {
    return "a number";
  } else if constexpr (std::is_integral_v<T>) {
    return "a whole number";
  } else {
    return "a text";
  }
}

// Returns the placeholder that --help prints for a value of type T.
template <typename T>
[[nodiscard]] std::string FlagValueName(const T& /*tag*/) {
  if constexpr (std::is_enum_v<T>) {
    return absl::StrJoin(NamesOf(T{}), "|",
                         [](std::string* out, const auto& entry) {
                           absl::StrAppend(out, entry.first);
                         });
  } else if constexpr (std::is_same_v<T, bool>) {
    return "true|false";
  } else if constexpr (std::is_same_v<T, double>) {
    return "NUMBER";
  } else if constexpr (std::is_integral_v<T>) {
    return "N";
  } else {
    return "TEXT";
  }
}

// Returns a value as --help writes it.
template <typename T>
[[nodiscard]] std::string ShowFlagValue(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    for (const auto& [name, entry] : NamesOf(T{})) {
      if (entry == value) return std::string(name);
    }
    return "";
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return absl::StrJoin(value, ",");
  } else {
    return absl::StrCat(value);
  }
}

}  // namespace weft

#endif  // WEFT_SERVER_FLAG_VALUES_H_
