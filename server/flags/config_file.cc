#include "server/flags/config_file.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/flags/flag_table.h"
#include "src/base/files/operator_file.h"

namespace weft::server {
namespace {

using nlohmann::json;

// Returns whether a --config file may set the flag. Actions, such as --help,
// and --config itself are not allowed.
bool IsSetting(const Flag& flag) {
  return !flag.is_action && flag.name != "config";
}

// Sets the flags that a file names. An error begins with the file's path.
class Reader {
 public:
  Reader(std::string path, Settings* settings, std::vector<std::string>* errors)
      : path_(std::move(path)), settings_(*settings), errors_(*errors) {}

  void Read(const std::string& text) {
    const auto note_twice = [this](int depth, json::parse_event_t event,
                                   json& parsed) {
      if (event == json::parse_event_t::key && depth == 1 &&
          !names_.insert(parsed).second) {
        Complain(absl::StrCat(parsed.dump(), " comes twice"));
      }
      return true;
    };
    json file;
    try {
      file = json::parse(text, note_twice, /*allow_exceptions=*/true,
                         /*ignore_comments=*/true);
    } catch (const json::parse_error& error) {
      const std::string read = text.substr(0, error.byte);
      errors_.push_back(absl::StrCat(
          path_, ":", 1 + std::count(read.begin(), read.end(), '\n'),
          ": not JSON at column ", read.size() - (read.rfind('\n') + 1)));
      return;
    } catch (const json::out_of_range&) {
      return Complain("has a number that is out of range");
    }
    if (!file.is_object()) return Complain("is not a JSON object");
    for (const auto& [name, value] : file.items()) Set(name, value);
  }

 private:
  void Set(const std::string& name, const json& value) {
    const Flag* const flag = FindFlag(name);
    if (flag == nullptr) {
      Complain(absl::StrCat("unknown setting \"", name, "\"", NearFlag(name)));
    } else if (!IsSetting(*flag)) {
      Complain(absl::StrCat("\"", name, "\" cannot be set in a file"));
    } else if (value.is_null()) {
      Complain(absl::StrCat("\"", name, "\" has no value"));
    } else if (value.is_structured()) {
      Complain(absl::StrCat("\"", name, "\" is an ", value.type_name()));
    } else {
      flag->Set(absl::StrCat(path_, ": ", name),
                value.is_string() ? value.get<std::string>() : value.dump(),
                &settings_, &errors_);
    }
  }
  void Complain(const std::string& problem) {
    errors_.push_back(absl::StrCat(path_, ": ", problem));
  }

  const std::string path_;
  Settings& settings_;
  std::vector<std::string>& errors_;
  std::set<std::string> names_;
};

}  // namespace

void ReadConfigFile(const std::string& path, Settings* settings,
                    std::vector<std::string>* errors) {
  const absl::StatusOr<std::string> contents = ReadOperatorFile(path);
  if (!contents.ok()) {
    errors->push_back(absl::StrCat(
        "--config=", path, " cannot be read: ", contents.status().message()));
    return;
  }
  Reader(path, settings, errors).Read(*contents);
}

std::string ConfigText(const Settings& settings) {
  std::string text = "{\n";
  const Flag* last = nullptr;
  for (const Flag& flag : FlagTable()) {
    if (IsSetting(flag)) last = &flag;
  }
  for (const Flag& flag : FlagTable()) {
    if (!IsSetting(flag)) continue;
    const std::string value = flag.show(settings);
    absl::StrAppend(&text, "  \"", flag.name, "\": ",
                    flag.is_number || flag.is_bool ? value : json(value).dump(),
                    &flag == last ? "" : ",");
    const auto source = settings.sources.find(flag.name);
    if (source != settings.sources.end()) {
      absl::StrAppend(&text, "  // ", source->second);
    }
    text += '\n';
  }
  return text + "}\n";
}

}  // namespace weft::server
