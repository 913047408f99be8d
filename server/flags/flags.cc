#include "server/flags/flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/flags/config_file.h"
#include "server/flags/flag_table.h"

namespace weft::server {
namespace {

constexpr size_t kHelpColumns = 100;
constexpr char kHelpHead[] =
    "weftd: serves training and sampling of many LoRA adapters on one base "
    "model, over gRPC.\n\n"
    "Usage: weftd --model DIR [flags]\n\n"
    "A value comes from its flag, else from its environment variable, else "
    "from the file\nof --config, else from its default. Bytes may be written "
    "as 4GiB and seconds as 90s.\n";

// The variables of clients, without WEFT_. A shell may have set them for
// weftctl.
constexpr absl::string_view kClientVariables[] = {
    "SERVER", "TOKEN",       "TOKEN_FILE", "TLS",
    "CA",     "CLIENT_CERT", "CLIENT_KEY", "SERVER_NAME"};

// Returns whether Kubernetes has set the variable ("NAME=VALUE") for a Service
// whose name begins with "weft", such as WEFT_PORT=tcp://10.0.0.1:80,
// WEFT_SERVICE_HOST and WEFT_PORT_80_TCP_ADDR.
bool IsServiceLink(absl::string_view entry) {
  return absl::StrContains(entry, "=tcp://") ||
         absl::StrContains(entry, "_SERVICE_HOST=") ||
         absl::StrContains(entry, "_SERVICE_PORT") ||
         absl::StrContains(entry, "_TCP_");
}

void ReadEnvironment(const Environment& environment, Settings* settings,
                     std::vector<std::string>* errors) {
  for (const Flag& flag : FlagTable()) {
    if (flag.is_action) continue;
    const std::string name = flag.environment();
    const std::optional<std::string> value = environment(name);
    if (!value.has_value()) continue;
    if (absl::StartsWith(*value, "tcp://")) {
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
  if (name == "help" && equals != absl::string_view::npos) {
    settings->help = true;
    settings->help_word = std::string(arg.substr(equals + 1));
    return 1;
  }
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

// Appends a flag with its help.
void AppendFlag(const Flag& flag, std::string* text) {
  absl::StrAppend(text, "  --", flag.name, flag.is_bool ? "" : " ",
                  flag.is_bool ? "" : flag.value_name, "\n");
  AppendWrapped(flag.help, 6, text);
  if (flag.is_action) return;
  std::string facts = absl::StrCat(
      "[default: ", flag.default_value.empty() ? "none" : flag.default_value,
      "]");
  if (!flag.range.empty()) {
    absl::StrAppend(&facts, " [range: ", flag.range, "]");
  }
  absl::StrAppend(&facts, " [env: ", flag.environment(), "]");
  AppendWrapped(facts, 6, text);
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

std::string HelpText(absl::string_view word) {
  std::string text;
  if (word.empty()) text = kHelpHead;
  absl::string_view group;
  for (const Flag& flag : FlagTable()) {
    if (!absl::StrContains(absl::AsciiStrToLower(flag.name + " " + flag.help),
                           absl::AsciiStrToLower(word))) {
      continue;
    }
    if (group != flag.group) {
      group = flag.group;
      absl::StrAppend(&text, text.empty() ? "" : "\n", group, ":\n");
    }
    AppendFlag(flag, &text);
  }
  return text;
}

std::vector<std::string> UnknownVariables(const char* const* environment) {
  std::vector<std::string> found;
  for (; *environment != nullptr; ++environment) {
    const absl::string_view entry = *environment;
    const absl::string_view name = entry.substr(0, entry.find('='));
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, "WEFT_")) continue;
    const bool known =
        std::ranges::find(kClientVariables, rest) !=
            std::end(kClientVariables) ||
        std::ranges::any_of(FlagTable(), [name](const Flag& flag) {
          return flag.environment() == name;
        });
    if (known || IsServiceLink(entry)) continue;
    found.push_back(
        absl::StrCat(name, " sets no flag of weftd",
                     NearFlag(absl::StrReplaceAll(absl::AsciiStrToLower(rest),
                                                  {{"_", "-"}}))));
  }
  return found;
}

}  // namespace weft::server
