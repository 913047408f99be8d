#include "src/weights/strict_json.h"

#include <functional>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/regular_file.h"

namespace weft::weights {
namespace {

// Checks the parser's events against the limits, and refuses a key that an
// object has twice.
template <typename Json>
class Watcher {
 public:
  using Event = typename Json::parse_event_t;

  explicit Watcher(const JsonLimits& limits) : limits_(limits) {}

  // Returns false to make the parser drop a value. So a refused document takes
  // little memory.
  bool operator()(int depth, Event event, Json& value) {
    if (!problem_.empty()) return false;
    switch (event) {
      case Event::object_start:
        keys_.emplace_back();
        return CheckDepth(depth) && CountValue();
      case Event::array_start:
        return CheckDepth(depth) && CountValue();
      case Event::value:
        return CountValue();
      case Event::object_end:
        keys_.pop_back();
        return true;
      case Event::key:
        return CheckKey(value.template get_ref<const std::string&>());
      default:
        return true;
    }
  }

  const std::string& problem() const { return problem_; }

 private:
  // `depth` is the number of containers around the new container.
  bool CheckDepth(int depth) {
    if (depth < limits_.max_depth) return true;
    problem_ = absl::StrCat("is nested deeper than ", limits_.max_depth);
    return false;
  }

  bool CountValue() {
    if (++num_values_ <= limits_.max_values) return true;
    problem_ = absl::StrCat("has more than ", limits_.max_values, " values");
    return false;
  }

  bool CheckKey(const std::string& key) {
    if (keys_.back().size() == limits_.max_keys) {
      problem_ = absl::StrCat("has an object of more than ", limits_.max_keys,
                              " keys");
      return false;
    }
    if (keys_.back().insert(key).second) return true;
    problem_ = absl::StrCat("has the key '",
                            absl::CHexEscape(key.substr(0, 128)), "' twice");
    return false;
  }

  const JsonLimits limits_;
  size_t num_values_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;
  std::string problem_;
};

}  // namespace

template <typename Json>
absl::StatusOr<Json> ParseStrictJson(absl::string_view text,
                                     absl::string_view what,
                                     const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " has ", text.size(), " bytes > limit ", limits.max_bytes));
  }
  // nlohmann would take a NUL byte as the end of the text.
  if (text.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has a NUL byte"));
  }
  Watcher<Json> watcher(limits);
  Json value = Json::parse(text.begin(), text.end(), std::ref(watcher),
                           /*allow_exceptions=*/false);
  if (!watcher.problem().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", watcher.problem()));
  }
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is not a JSON object in UTF-8"));
  }
  return value;
}

template absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view,
                                                        absl::string_view,
                                                        const JsonLimits&);
template absl::StatusOr<nlohmann::ordered_json> ParseStrictJson(
    absl::string_view, absl::string_view, const JsonLimits&);

absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t max_bytes) {
  WEFT_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  if (file.size_bytes() > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has ", file.size_bytes(), " bytes > limit ", max_bytes));
  }
  absl::StatusOr<std::string> contents = file.ReadBytes(0, file.size_bytes());
  if (!contents.ok()) return InFile(path, contents.status());
  return contents;
}

}  // namespace weft::weights
