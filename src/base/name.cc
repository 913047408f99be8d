#include "src/base/name.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"

namespace weft {
namespace {

constexpr size_t kMaxNameBytes = 128;

}  // namespace

bool IsName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes ||
      !absl::ascii_isalnum(static_cast<unsigned char>(name.front())) ||
      name.back() == '.') {
    return false;
  }
  return std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
           c == '_' || c == '-';
  });
}

}  // namespace weft
