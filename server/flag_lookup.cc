// Finds flags by name, and suggests a flag for an unknown name.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/flag_table.h"

namespace weft {
namespace {

// Returns the Levenshtein distance, computed one row at a time.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1,
                         diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

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
    errors->push_back(absl::StrCat(source, "=", text, " is not ", value_name));
  }
}

const Flag* FindFlag(absl::string_view name) {
  const auto flag = std::ranges::find(FlagTable(), name, &Flag::name);
  return flag == FlagTable().end() ? nullptr : &*flag;
}

std::string NearFlag(absl::string_view name) {
  const Flag* best = nullptr;
  size_t best_distance = 1 + name.size() / 3;
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

}  // namespace weft
