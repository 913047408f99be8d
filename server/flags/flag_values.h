// Converts the values of weftd's flags from text and to text.
#ifndef WEFT_SERVER_FLAGS_FLAG_VALUES_H_
#define WEFT_SERVER_FLAGS_FLAG_VALUES_H_

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "src/base/observe/log.h"
#include "src/base/options/options.h"

namespace weft::server {

// The names of an enum's values, in the order in which --help lists them.
template <typename Enum>
using EnumName = std::pair<absl::string_view, Enum>;
constexpr auto NamesOf(Device /*tag*/) {
  return std::to_array<EnumName<Device>>({{"cpu", Device::kCpu},
                                          {"cuda", Device::kCuda},
                                          {"auto", Device::kAuto}});
}
constexpr auto NamesOf(GradientCheckpointing /*tag*/) {
  return std::to_array<EnumName<GradientCheckpointing>>(
      {{"off", GradientCheckpointing::kOff},
       {"all", GradientCheckpointing::kAll},
       {"auto", GradientCheckpointing::kAuto}});
}
constexpr auto NamesOf(Dtype /*tag*/) {
  return std::to_array<EnumName<Dtype>>(
      {{"auto", Dtype::kAuto}, {"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}});
}
constexpr auto NamesOf(CpuBf16 /*tag*/) {
  return std::to_array<EnumName<CpuBf16>>(
      {{"auto", CpuBf16::kAuto}, {"off", CpuBf16::kOff}});
}
constexpr auto NamesOf(BaseWeights /*tag*/) {
  return std::to_array<EnumName<BaseWeights>>(
      {{"dtype", BaseWeights::kDtype}, {"int8", BaseWeights::kInt8}});
}
constexpr auto NamesOf(LoadFormat /*tag*/) {
  return std::to_array<EnumName<LoadFormat>>(
      {{"auto", LoadFormat::kAuto}, {"dummy", LoadFormat::kDummy}});
}
constexpr auto NamesOf(LogStyle /*tag*/) {
  return std::to_array<EnumName<LogStyle>>({{"text", LogStyle::kText},
                                            {"json", LogStyle::kJson},
                                            {"auto", LogStyle::kAuto}});
}
constexpr auto NamesOf(LogLevel /*tag*/) {
  return std::to_array<EnumName<LogLevel>>({{"debug", LogLevel::kDebug},
                                            {"info", LogLevel::kInfo},
                                            {"warning", LogLevel::kWarning},
                                            {"error", LogLevel::kError}});
}

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

// What a value of a type must be: in words, and as --help writes it.
struct FlagValueKind {
  std::string words;
  std::string name;
};

template <typename T>
FlagValueKind KindOfFlagValue(const T& tag) {
  if constexpr (std::is_enum_v<T>) {
    const auto names = [tag](const char* separator) {
      return absl::StrJoin(NamesOf(tag), separator,
                           [](std::string* out, const auto& entry) {
                             absl::StrAppend(out, entry.first);
                           });
    };
    return {names(" or "), names("|")};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {"true or false", "true|false"};
  } else if constexpr (std::is_same_v<T, double>) {
    return {"a number", "NUMBER"};
  } else if constexpr (std::is_integral_v<T>) {
    return {"a whole number", "N"};
  } else {
    return {"a text", "TEXT"};
  }
}

// Returns a value as --help writes it.
template <typename T>
std::string ShowFlagValue(const T& value) {
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

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_FLAG_VALUES_H_
