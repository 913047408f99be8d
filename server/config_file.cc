#include "server/config_file.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/flag_table.h"
#include "src/base/operator_file.h"

namespace weft {
namespace {

using nlohmann::json;

// Returns whether a --config file may set the flag. Actions, such as --help,
// and --config itself are not allowed.
bool IsSetting(const Flag& flag) {
  return !flag.is_action && flag.name != "config";
}

// Receives the JSON parser's events for one object without nested values. Sets
// the flag of each name.
class Reader : public nlohmann::json_sax<json> {
 public:
  Reader(std::string file, Settings* settings, std::vector<std::string>* errors)
      : file_(std::move(file)), settings_(*settings), errors_(*errors) {}

  bool null() override { return Refuse("has no value"); }
  bool boolean(bool value) override { return Value(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    return Value(absl::StrCat(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    return Value(absl::StrCat(value));
  }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return Value(text);
  }
  bool string(string_t& value) override { return Value(value); }
  bool binary(binary_t& /*value*/) override { return Refuse("is binary"); }
  bool start_object(size_t /*size*/) override {
    if (depth_++ == 0) return true;
    return Refuse("is an object");
  }
  bool end_object() override { return true; }
  bool start_array(size_t /*size*/) override { return Refuse("is an array"); }
  bool end_array() override { return true; }

  bool key(string_t& name) override {
    name_ = name;
    flag_ = FindFlag(name);
    if (flag_ == nullptr) {
      Complain(absl::StrCat("unknown setting \"", name, "\"", NearFlag(name)));
    } else if (!IsSetting(*flag_)) {
      flag_ = nullptr;
      Complain(absl::StrCat("\"", name, "\" cannot be set in a file"));
    } else if (!names_.insert(name).second) {
      Complain(absl::StrCat("\"", name, "\" comes twice"));
    }
    return true;
  }

  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    error_at_ = position;
    return false;
  }

  // Returns the position of the JSON syntax error; 0 if there is none.
  [[nodiscard]] size_t error_at() const { return error_at_; }

 private:
  bool Value(const std::string& text) {
    if (depth_ == 0) return Refuse("is not an object");
    if (flag_ != nullptr) {
      flag_->Set(absl::StrCat(file_, ": ", name_), text, &settings_, &errors_);
    }
    return true;
  }
  // Adds an error. Returns false, which stops the parser.
  bool Refuse(const char* problem) {
    Complain(depth_ == 0 ? "is not a JSON object"
                         : absl::StrCat("\"", name_, "\" ", problem));
    return false;
  }
  void Complain(const std::string& problem) {
    errors_.push_back(absl::StrCat(file_, ": ", problem));
  }

  const std::string file_;
  Settings& settings_;
  std::vector<std::string>& errors_;
  std::set<std::string> names_;
  std::string name_;
  const Flag* flag_ = nullptr;
  int depth_ = 0;
  size_t error_at_ = 0;
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
  const std::string& text = *contents;
  Reader reader(path, settings, errors);
  if (json::sax_parse(text, &reader, json::input_format_t::json,
                      /*strict=*/true, /*ignore_comments=*/true) ||
      reader.error_at() == 0) {
    return;
  }
  const auto end = text.begin() + static_cast<ptrdiff_t>(
                                      std::min(reader.error_at(), text.size()));
  const auto line = 1 + std::count(text.begin(), end, '\n');
  errors->push_back(absl::StrCat(path, ":", line, ": not JSON"));
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

}  // namespace weft
