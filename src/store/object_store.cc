#include "src/store/object_store.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weft::store {
namespace {

constexpr size_t kMaxKeyBytes = 512;

absl::Status NotAKey(std::string_view key, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "the key \"",
      absl::CHexEscape({key.data(), std::min(key.size(), size_t{64})}), "\" ",
      absl::string_view(why.data(), why.size())));
}

}  // namespace

bool IsAway(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

absl::Status OtherEtag(const std::string& name, const std::string& etag) {
  return absl::AbortedError(absl::StrCat(
      name, ": the object is missing or has another ETag than ", etag));
}

absl::Status CreateOnce(ObjectStore& store, const std::string& key,
                        const std::vector<std::string_view>& pieces) {
  const absl::Status created = store.Create(key, pieces).status();
  return absl::IsAlreadyExists(created) ? absl::OkStatus() : created;
}

absl::Status CheckKey(std::string_view key) {
  if (key.size() > kMaxKeyBytes) {
    return NotAKey(key,
                   absl::StrCat("has ", key.size(), " bytes > ", kMaxKeyBytes));
  }
  for (const char c : key) {
    if (c < ' ' || c > '~' || c == '\\') {
      return NotAKey(key,
                     "has bytes that are not printable ASCII, or a backslash");
    }
  }
  for (const absl::string_view part :
       absl::StrSplit(absl::string_view(key.data(), key.size()), '/')) {
    if (part.empty() || part == "." || part == "..") {
      return NotAKey(key, "has a part that is empty, \".\" or \"..\"");
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::store
