#include "server/flags/flag_values.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

namespace weft::server {

bool ReadFlagValue(absl::string_view text, std::string* out) {
  *out = std::string(text);
  return true;
}

bool ReadFlagValue(absl::string_view text, int* out) {
  return absl::SimpleAtoi(text, out);
}

bool ReadFlagValue(absl::string_view text, int64_t* out) {
  return absl::SimpleAtoi(text, out);
}

bool ReadBytes(absl::string_view text, int64_t* out) {
  if (absl::SimpleAtoi(text, out)) return true;
  static const auto& units =
      *new std::vector<std::pair<absl::string_view, double>>{
          {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
          {"kB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  for (const auto& [unit, size] : units) {
    double count = 0;
    absl::string_view number = text;
    if (!absl::ConsumeSuffix(&number, unit)) continue;
    if (!absl::SimpleAtod(number, &count)) return false;
    const double bytes = count * size;
    if (!(std::abs(bytes) < 0x1p62)) return false;
    *out = static_cast<int64_t>(bytes);
    return true;
  }
  return false;
}

bool ReadSeconds(absl::string_view text, int* out) {
  if (absl::SimpleAtoi(text, out)) return true;
  absl::Duration time;
  if (!absl::ParseDuration(text, &time)) return false;
  const int64_t seconds = absl::ToInt64Seconds(time);
  *out = static_cast<int>(seconds);
  return absl::Seconds(seconds) == time && *out == seconds;
}

bool ReadFlagValue(absl::string_view text, double* out) {
  return absl::SimpleAtod(text, out);
}

bool ReadFlagValue(absl::string_view text, bool* out) {
  return absl::SimpleAtob(text, out);
}

bool ReadFlagValue(absl::string_view text, std::vector<std::string>* out) {
  *out = absl::StrSplit(text, ',', absl::SkipEmpty());
  return true;
}

}  // namespace weft::server
