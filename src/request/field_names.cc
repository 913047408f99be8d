#include "src/request/field_names.h"

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"

namespace weft {
namespace {

thread_local absl::Span<const FieldName> current_names;

// The end of a field in a path, and the indexes before it, with brackets.
struct Match {
  size_t end = 0;
  std::vector<absl::string_view> indexes;
};

// Returns where `path` names the field `row`, or none.
std::optional<Match> Find(absl::string_view path, absl::string_view row) {
  Match match;
  size_t at = 0;
  for (const char c : row) {
    if (c == '.' && at < path.size() && path[at] == '[') {
      const size_t next = path.find(']', at) + 1;
      match.indexes.push_back(path.substr(at, next - at));
      at = next;
    }
    if (at >= path.size() || path[at++] != c) return std::nullopt;
  }
  if (at < path.size() && path[at] != '.' && path[at] != '[') {
    return std::nullopt;  // Another field, whose name begins alike.
  }
  match.end = at;
  return match;
}

}  // namespace

std::string NameOfField(absl::string_view path) {
  const FieldName* best = nullptr;
  Match at;
  for (const FieldName& row : current_names) {
    if (best != nullptr && row.path.size() <= best->path.size()) continue;
    if (std::optional<Match> match = Find(path, row.path)) {
      best = &row;
      at = *std::move(match);
    }
  }
  if (best == nullptr) return std::string(path);
  std::string name;
  size_t begin = 0;
  for (const absl::string_view index : at.indexes) {
    const size_t hole = best->shown.find("[]", begin);
    absl::StrAppend(&name, best->shown.substr(begin, hole - begin), index);
    begin = hole + 2;
  }
  absl::StrAppend(&name, best->shown.substr(begin), path.substr(at.end));
  return name;
}

FieldNameScope::FieldNameScope(absl::Span<const FieldName> names)
    : outer_(current_names) {
  current_names = names;
}

FieldNameScope::~FieldNameScope() { current_names = outer_; }

}  // namespace weft
