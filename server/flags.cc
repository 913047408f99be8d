#include "server/flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/flag_table.h"

namespace weft {
namespace {

constexpr size_t kHelpColumns = 100;

const Flag* Find(absl::string_view name) {
  for (const Flag& flag : FlagTable()) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

// Levenshtein distance, one row at a time.
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

std::string Suggestion(absl::string_view name) {
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

void SetFromText(const Flag& flag, absl::string_view source,
                 absl::string_view text, Settings* settings,
                 std::vector<std::string>* errors) {
  if (flag.read(text, settings)) return;
  errors->push_back(
      absl::StrCat(source, "=", text, " is not ", flag.value_name));
}

void ReadEnvironment(const Environment& environment, Settings* settings,
                     std::vector<std::string>* errors) {
  for (const Flag& flag : FlagTable()) {
    if (flag.is_action) continue;
    const std::string name = flag.environment();
    const std::optional<std::string> value = environment(name);
    if (!value.has_value()) continue;
    // Kubernetes sets such values for every Service of the namespace.
    if (absl::StrContains(*value, "://")) {
      errors->push_back(
          absl::StrCat(name, "=", *value,
                       " looks like a Kubernetes service link: rename "
                       "the Service or set enableServiceLinks: false"));
      continue;
    }
    SetFromText(flag, name, *value, settings, errors);
  }
}

// Reads the flag at args[i]. Returns the number of arguments used.
size_t ReadFlag(const std::vector<std::string>& args, size_t i,
                Settings* settings, std::vector<std::string>* errors) {
  const absl::string_view arg = args[i];
  if (!absl::StartsWith(arg, "--") || arg.size() == 2) {
    errors->push_back(absl::StrCat("unexpected argument ", arg));
    return 1;
  }
  const size_t equals = arg.find('=');
  const absl::string_view name = arg.substr(2, equals - 2);
  const Flag* flag = Find(name);
  if (flag == nullptr && absl::StartsWith(name, "no-") &&
      equals == absl::string_view::npos) {
    flag = Find(name.substr(3));
    if (flag != nullptr && flag->is_bool) {
      flag->read("false", settings);
      return 1;
    }
    flag = nullptr;
  }
  if (flag == nullptr) {
    errors->push_back(absl::StrCat("unknown flag --", name, Suggestion(name)));
    return 1;
  }
  const std::string source = absl::StrCat("--", name);
  if (equals != absl::string_view::npos) {
    SetFromText(*flag, source, arg.substr(equals + 1), settings, errors);
    return 1;
  }
  if (flag->is_bool) {
    flag->read("true", settings);
    return 1;
  }
  if (i + 1 == args.size()) {
    errors->push_back(
        absl::StrCat(source, " needs a value: ", flag->value_name));
    return 1;
  }
  SetFromText(*flag, source, args[i + 1], settings, errors);
  return 2;
}

// Appends `text` in lines of at most kHelpColumns, each indented.
void AppendWrapped(absl::string_view text, size_t indent, std::string* out) {
  std::string line(indent, ' ');
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (line.size() > indent && line.size() + 1 + word.size() > kHelpColumns) {
      absl::StrAppend(out, line, "\n");
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    absl::StrAppend(&line, word);
  }
  absl::StrAppend(out, line, "\n");
}

}  // namespace

Environment ProcessEnvironment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& args,
                                       const Environment& environment) {
  Settings settings;
  std::vector<std::string> errors;
  ReadEnvironment(environment, &settings, &errors);
  for (size_t i = 0; i < args.size();) {
    i += ReadFlag(args, i, &settings, &errors);
  }
  if (!errors.empty()) {
    return absl::InvalidArgumentError(absl::StrJoin(errors, "\n"));
  }
  if (settings.server.model_name.empty()) {
    std::filesystem::path folder(settings.engine.model_dir);
    if (!folder.has_filename()) folder = folder.parent_path();
    settings.server.model_name = folder.filename().string();
  }
  return settings;
}

absl::Status ValidateSettings(const Settings& settings) {
  std::vector<std::string> complaints;
  for (const absl::Status& status :
       {settings.engine.Validate(), settings.server.Validate()}) {
    if (!status.ok()) complaints.emplace_back(status.message());
  }
  if (settings.device_memory_bytes < 0) {
    complaints.push_back(
        absl::StrCat("--device-memory-bytes=", settings.device_memory_bytes,
                     " is less than 0"));
  }
  if (settings.device_memory_bytes != 0 && !settings.check_config) {
    complaints.emplace_back(
        "--device-memory-bytes goes with --check-config: a start asks its "
        "device");
  }
  if (complaints.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(complaints, "\n"));
}

std::string HelpText() {
  std::string text =
      "weftd: serves training and sampling of many LoRA adapters on one base "
      "model, over gRPC.\n\n"
      "Usage: weftd --model DIR [flags]\n\n"
      "A value comes from its flag, else from its environment variable, else "
      "from its default.\n";
  absl::string_view group;
  for (const Flag& flag : FlagTable()) {
    if (group != flag.group) {
      group = flag.group;
      absl::StrAppend(&text, "\n", group, ":\n");
    }
    if (flag.is_bool) {
      absl::StrAppend(&text, "  --", flag.name, "\n");
    } else {
      absl::StrAppend(&text, "  --", flag.name, " ", flag.value_name, "\n");
    }
    AppendWrapped(flag.help, 6, &text);
    if (flag.is_action) continue;
    AppendWrapped(absl::StrCat("[default: ",
                               flag.default_value.empty() ? std::string("none")
                                                          : flag.default_value,
                               "] [env: ", flag.environment(), "]"),
                  6, &text);
  }
  return text;
}

}  // namespace weft
