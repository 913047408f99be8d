#include "src/base/fingerprint.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace weft {
namespace {

// A message shows so many differences, and so many characters of each.
constexpr size_t kMaxShown = 4;
constexpr size_t kMaxShownCharacters = 100;

using Parts = std::map<std::string, std::string>;

Parts PartsOf(std::string_view fingerprint) {
  Parts parts;
  const std::vector<absl::string_view> words =
      absl::StrSplit(absl::string_view(fingerprint.data(), fingerprint.size()),
                     ' ', absl::SkipEmpty());
  for (size_t i = 1; i < words.size(); ++i) {
    parts.insert(absl::StrSplit(words[i], absl::MaxSplits('=', 1)));
  }
  return parts;
}

std::string Shown(const Parts& parts, const std::string& name) {
  const auto found = parts.find(name);
  return found == parts.end()
             ? "absent"
             : absl::CHexEscape(found->second.substr(0, kMaxShownCharacters));
}

}  // namespace

std::string FingerprintDifference(std::string_view stored,
                                  std::string_view own) {
  const Parts before = PartsOf(stored);
  const Parts now = PartsOf(own);
  if (before.empty()) {
    return "it has the fingerprint of an older server, which does not say what "
           "differs";
  }
  Parts names = before;
  names.insert(now.begin(), now.end());
  std::vector<std::string> differences;
  for (const auto& [name, value] : names) {
    if (Shown(before, name) == Shown(now, name)) continue;
    differences.push_back(
        absl::StrCat(absl::CHexEscape(name.substr(0, kMaxShownCharacters)),
                     " is ", Shown(before, name), ", here ", Shown(now, name)));
  }
  const size_t left_out =
      differences.size() - std::min(differences.size(), kMaxShown);
  differences.resize(differences.size() - left_out);
  std::string message = absl::StrJoin(differences, "; ");
  if (left_out > 0) absl::StrAppend(&message, "; and ", left_out, " more");
  return message;
}

}  // namespace weft
