#include "src/log/bucket/log_keys.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace weft::log {
namespace {

constexpr int kPlaceDigits = 20;  // The number of digits of 2^64.

}  // namespace

std::string LogKeys::OfPlace(uint64_t place) const {
  return absl::StrFormat("%s%0*d", Records(), kPlaceDigits, place);
}

uint64_t LogKeys::PlaceOf(const std::string& key) const {
  uint64_t place = 0;
  const std::string prefix = Records();
  return absl::StartsWith(key, prefix) &&
                 key.size() == prefix.size() + kPlaceDigits &&
                 absl::SimpleAtoi(key.substr(prefix.size()), &place)
             ? place
             : 0;
}

std::optional<int> LogOfManifest(const std::string& key) {
  LogKeys keys;
  const size_t number = sizeof(kOwnersPrefix) - 1;
  const bool is_one = absl::StartsWith(key, kOwnersPrefix) &&
                      absl::SimpleAtoi(key.substr(number), &keys.log) &&
                      keys.log >= 0 && keys.Manifest() == key;
  return is_one ? std::optional(keys.log) : std::nullopt;
}

}  // namespace weft::log
