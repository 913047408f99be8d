#include "src/request/move_unit.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "src/base/tokens.h"

namespace weft {
namespace {

constexpr size_t kSessionLength = 32;
constexpr absl::string_view kNotes = "tinker/";
constexpr absl::string_view kSessionNotes[] = {"session", "model", "sampler",
                                               "making", "loss"};

}  // namespace

std::string UnitOf(absl::string_view adapter_id) {
  const absl::string_view name =
      adapter_id.substr(adapter_id.find(kTenantSeparator) + 1);
  const bool is_model =
      name.size() > kSessionLength &&
      absl::StartsWith(name.substr(kSessionLength), ".train.");
  return std::string(is_model ? name.substr(0, kSessionLength) : adapter_id);
}

std::string UnitOfNote(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kNotes)) return "";
  const size_t slash = name.find('/');
  if (slash == absl::string_view::npos ||
      std::ranges::count(kSessionNotes, name.substr(0, slash)) == 0) {
    return "";
  }
  const absl::string_view id = name.substr(slash + 1);
  const absl::string_view session = id.substr(0, id.find(':'));
  return session.size() == kSessionLength ? std::string(session) : "";
}

std::vector<std::string> NotePrefixesOf(absl::string_view unit) {
  std::vector<std::string> prefixes;
  for (const absl::string_view kind : kSessionNotes) {
    prefixes.push_back(absl::StrCat(kNotes, kind, "/", unit));
  }
  return prefixes;
}

}  // namespace weft
