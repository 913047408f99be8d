#include "server/flag_table.h"

#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/flag_values.h"

namespace weft {
namespace {

// Makes a row. `field` returns a reference to the flag's value in Settings.
template <typename T, typename Field>
Flag MakeFlag(const char* group, Field field, std::string name, T standard,
              const Range<T>& range, std::string unit, std::string help) {
  Flag flag;
  flag.group = group;
  flag.name = std::move(name);
  flag.value_name = unit.empty() ? FlagValueName(standard) : std::move(unit);
  flag.help = std::move(help);
  flag.is_bool = std::is_same_v<T, bool>;
  flag.is_list = std::is_same_v<T, std::vector<std::string>>;
  flag.default_value = ShowFlagValue(standard);
  if (range) {
    flag.range = absl::StrCat(ShowFlagValue(range->first), " to ",
                              ShowFlagValue(range->second));
  }
  flag.read = [field](absl::string_view text, Settings* settings) {
    return ReadFlagValue(text, &field(*settings));
  };
  flag.show = [field](Settings settings) {
    return ShowFlagValue(field(settings));
  };
  flag.check = [field, range, name = flag.name](Settings settings) {
    const T& value = field(settings);
    // The comparison is false for NaN, so NaN is refused.
    if (!range || (value >= range->first && value <= range->second)) {
      return std::string();
    }
    return absl::StrCat("--", name, "=", ShowFlagValue(value), " is outside [",
                        ShowFlagValue(range->first), ", ",
                        ShowFlagValue(range->second), "]");
  };
  flag.is_number = std::is_arithmetic_v<T> && !flag.is_bool;
  return flag;
}

}  // namespace

std::string Flag::environment() const {
  if (is_action) return "";
  return absl::StrCat(
      "WEFT_", absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}})));
}

const std::vector<Flag>& FlagTable() {
  static const std::vector<Flag>& table = *[] {
    auto* const flags = new std::vector<Flag>;
    const char* group = nullptr;
#define WEFT_FLAG_GROUP(title) group = title;
#define WEFT_ROW(type, member, name, value, range, unit, help)            \
  flags->push_back(MakeFlag<type>(                                        \
      group, [](Settings& settings) -> type& { return settings.member; }, \
      name, value, range, unit, help));
#define WEFT_ENGINE_FLAG(type, member, ...) \
  WEFT_ROW(type, engine.member, __VA_ARGS__)
#define WEFT_SERVER_FLAG(type, member, ...) \
  WEFT_ROW(type, server.member, __VA_ARGS__)
#define WEFT_ACTION(...) WEFT_ROW(__VA_ARGS__) flags->back().is_action = true;
#include "src/base/flags.inc"
    return flags;
  }();
  return table;
}

}  // namespace weft
