#include "server/flags/flag_table.h"

#include <algorithm>
#include <type_traits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/flags/flag_values.h"
#include "src/base/typo.h"

namespace weft::server {
namespace {

// The units in which values may be written, too.
constexpr char kBytes[] = "BYTES";
constexpr char kSeconds[] = "SECONDS";

// Reads a value of a flag with this unit.
template <typename T>
bool ReadInUnit(absl::string_view text, absl::string_view unit, T* out) {
  if constexpr (std::is_same_v<T, int64_t>) {
    if (unit == kBytes) return ReadBytes(text, out);
  } else if constexpr (std::is_same_v<T, int>) {
    if (unit == kSeconds) return ReadSeconds(text, out);
  }
  return ReadFlagValue(text, out);
}

template <typename T>
std::string WordsFor(const T& tag, absl::string_view unit) {
  if (unit == kBytes) return "a number of bytes, such as 4096 or 4GiB";
  if (unit == kSeconds) return "a number of seconds, such as 90 or 2m";
  return KindOfFlagValue(tag).words;
}

// Makes a row. `field` returns a reference to the flag's value in Settings, and
// `unit` is a literal.
template <typename T>
Flag MakeFlag(const char* group, T& (*field)(Settings&), const char* name,
              T standard, const Range<T>& range, absl::string_view unit,
              const char* help) {
  Flag flag;
  flag.group = group;
  flag.name = name;
  flag.value_name =
      unit.empty() ? KindOfFlagValue(standard).name : std::string(unit);
  flag.wanted = WordsFor(standard, unit);
  flag.help = help;
  flag.is_bool = std::is_same_v<T, bool>;
  flag.is_list = std::is_same_v<T, std::vector<std::string>>;
  flag.default_value = ShowFlagValue(standard);
  if (range) {
    flag.range = absl::StrCat(ShowFlagValue(range->first), " to ",
                              ShowFlagValue(range->second));
  }
  flag.read = [field, unit](absl::string_view text, Settings* settings) {
    return ReadInUnit(text, unit, &field(*settings));
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
    return absl::StrCat("--", name, "=", ShowFlagValue(value), " must be from ",
                        ShowFlagValue(range->first), " to ",
                        ShowFlagValue(range->second));
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
#define WEFT_ROW(type, member, name, value, range, unit, help)             \
  flags->push_back(MakeFlag<type>(                                         \
      group, +[](Settings& settings) -> type& { return settings.member; }, \
      name, value, range, unit, help));
#define WEFT_ENGINE_FLAG(type, member, ...) \
  WEFT_ROW(type, engine.member, __VA_ARGS__)
#define WEFT_SERVER_FLAG(type, member, ...) \
  WEFT_ROW(type, server.member, __VA_ARGS__)
#define WEFT_ACTION(...) WEFT_ROW(__VA_ARGS__) flags->back().is_action = true;
#include "src/base/options/flags.inc"
    return flags;
  }();
  return table;
}

void Flag::Set(absl::string_view source, absl::string_view text,
               Settings* settings, std::vector<std::string>* errors) const {
  std::string whole(text);
  const auto before = settings->sources.find(name);
  if (is_list && before != settings->sources.end() &&
      before->second == source) {
    whole = absl::StrCat(show(*settings), ",", text);
  }
  if (read(whole, settings)) {
    settings->sources[name] = std::string(source);
  } else {
    errors->push_back(absl::StrCat(source, "=", text, " is not ", wanted));
  }
}

const Flag* FindFlag(absl::string_view name) {
  const auto flag = std::ranges::find(FlagTable(), name, &Flag::name);
  return flag == FlagTable().end() ? nullptr : &*flag;
}

std::string NearFlag(absl::string_view name) {
  if (absl::StartsWith(name, "max-queue-")) {
    return "; it is gone: what waits is limited by its bytes, for all tenants "
           "by --request-memory, and a tenant has half of what others leave";
  }
  const Flag* best = nullptr;
  size_t best_distance = FarthestTypo(name);
  for (const Flag& flag : FlagTable()) {
    const size_t distance = EditDistance(name, flag.name);
    const bool is_prefix =
        name.size() >= 3 && absl::StartsWith(flag.name, name);
    if (distance <= best_distance || (is_prefix && best == nullptr)) {
      best = &flag;
      best_distance = std::min(distance, best_distance);
    }
  }
  return best == nullptr ? "; see --help"
                         : absl::StrCat("; did you mean --", best->name, "?");
}

}  // namespace weft::server
