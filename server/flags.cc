#include "server/flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/config_file.h"
#include "server/flag_table.h"

namespace weft {
namespace {

constexpr size_t kHelpColumns = 100;

void ReadEnvironment(const Environment& environment, Settings* settings,
                     std::vector<std::string>* errors) {
  for (const Flag& flag : FlagTable()) {
    if (flag.is_action) continue;
    const std::string name = flag.environment();
    const std::optional<std::string> value = environment(name);
    if (!value.has_value()) continue;
    // For a Service named "weft", Kubernetes sets variables such as
    // WEFT_PORT=tcp://10.0.0.1:80.
    if (absl::StrContains(*value, "://")) {
      errors->push_back(
          absl::StrCat(name, "=", *value,
                       " looks like a Kubernetes service link: rename "
                       "the Service or set enableServiceLinks: false"));
      continue;
    }
    flag.Set(name, *value, settings, errors);
  }
}

// Reads the flag at args[i]. Returns how many arguments it takes.
size_t ReadFlag(const std::vector<std::string>& args, size_t i,
                Settings* settings, std::vector<std::string>* errors) {
  const absl::string_view arg = args[i];
  if (!absl::StartsWith(arg, "--") || arg.size() == 2) {
    errors->push_back(absl::StrCat("unexpected argument ", arg));
    return 1;
  }
  const size_t equals = arg.find('=');
  const absl::string_view name = arg.substr(2, equals - 2);
  const Flag* flag = FindFlag(name);
  if (flag == nullptr && absl::StartsWith(name, "no-") &&
      equals == absl::string_view::npos) {
    flag = FindFlag(name.substr(3));
    if (flag != nullptr && flag->is_bool) {
      flag->Set(arg, "false", settings, errors);
      return 1;
    }
    flag = nullptr;
  }
  if (flag == nullptr) {
    errors->push_back(absl::StrCat("unknown flag --", name, NearFlag(name)));
    return 1;
  }
  const std::string source = absl::StrCat("--", name);
  if (equals != absl::string_view::npos) {
    flag->Set(source, arg.substr(equals + 1), settings, errors);
    return 1;
  }
  if (flag->is_bool) {
    flag->Set(source, "true", settings, errors);
    return 1;
  }
  if (i + 1 == args.size()) {
    errors->push_back(
        absl::StrCat(source, " needs a value: ", flag->value_name));
    return 1;
  }
  flag->Set(source, args[i + 1], settings, errors);
  return 2;
}

// Appends `text` in indented lines, broken between words at kHelpColumns.
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
  const auto read_all = [&](Settings* settings,
                            std::vector<std::string>* errors) {
    ReadEnvironment(environment, settings, errors);
    for (size_t i = 0; i < args.size();) {
      i += ReadFlag(args, i, settings, errors);
    }
  };
  std::vector<std::string> errors;
  // The first pass only finds the file of --config. In the second pass, flags
  // and environment replace the values of that file.
  Settings named;
  std::vector<std::string> ignored;
  read_all(&named, &ignored);
  Settings settings;
  if (!named.server.config_file.empty()) {
    ReadConfigFile(named.server.config_file, &settings, &errors);
  }
  read_all(&settings, &errors);
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
  for (const Flag& flag : FlagTable()) {
    std::string complaint = flag.check(settings);
    if (!complaint.empty()) complaints.push_back(std::move(complaint));
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
      "from the file\nof --config, else from its default.\n";
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
    std::string facts = absl::StrCat(
        "[default: ", flag.default_value.empty() ? "none" : flag.default_value,
        "]");
    if (!flag.range.empty()) {
      absl::StrAppend(&facts, " [range: ", flag.range, "]");
    }
    absl::StrAppend(&facts, " [env: ", flag.environment(), "]");
    AppendWrapped(facts, 6, &text);
  }
  return text;
}

}  // namespace weft
