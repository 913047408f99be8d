#include "client/weftctl/weftctl.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/weftctl/arguments.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"
#include "src/base/typo.h"

namespace weft::client::weftctl {
namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;

std::vector<Command> AllCommands() {
  std::vector<Command> all;
  for (std::vector<Command> some :
       {ServerCommands(), AdapterCommands(), SampleCommands(),
        CheckpointCommands(), WeightsCommands(), TokenCommands(),
        StateCommands(), FleetCommands(), BalanceCommands()}) {
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

std::vector<FlagSpec> CommonFlags() {
  const char* server = std::getenv("WEFT_SERVER");
  std::vector<FlagSpec> flags = {
      {"server", "HOST:PORT,...",
       "the server, or several that have its state in turn, or WEFT_SERVER",
       server != nullptr ? server : "127.0.0.1:50051"},
      {"output", "json|table", "also -o", "table"},
      {"timeout", "DURATION", "time for each call, repetitions included",
       "10m"}};
  for (FlagSpec& flag : SecurityFlags()) flags.push_back(std::move(flag));
  flags.push_back({"help", "", "this text", ""});
  return flags;
}

void PrintOverview(const std::vector<Command>& commands, std::ostream& out) {
  out << "Usage: weftctl COMMAND [WORDS] [FLAGS]\n\n";
  std::vector<Row> rows;
  rows.reserve(commands.size());
  for (const Command& command : commands) {
    rows.push_back({absl::StrCat("  ", command.name), command.help});
  }
  PrintTable(rows, out);
  out << "\nweftctl COMMAND --help shows its flags.\n";
}

void PrintFlags(const std::vector<FlagSpec>& flags, std::ostream& out) {
  std::vector<Row> rows;
  for (const FlagSpec& flag : flags) {
    const std::string fallback =
        flag.default_value.empty()
            ? ""
            : absl::StrCat(" (default ", flag.default_value, ")");
    rows.push_back({absl::StrCat("  --", flag.name, " ", flag.value),
                    absl::StrCat(flag.help, fallback)});
  }
  PrintTable(rows, out);
}

bool HasFlag(const Command& command, const std::string& name) {
  return std::any_of(command.flags.begin(), command.flags.end(),
                     [&](const FlagSpec& flag) { return flag.name == name; });
}

void PrintHelp(const Command& command, std::ostream& out) {
  out << command.help << "\n\nUsage: weftctl " << command.name;
  for (const std::string& word : command.words) {
    const bool optional =
        command.last_word_optional && &word == &command.words.back();
    out << (optional ? absl::StrCat(" [", word, "]") : " " + word);
  }
  out << " [FLAGS]\n\n";
  PrintFlags(command.flags, out);
  if (!command.flags.empty()) out << "\n";
  std::vector<FlagSpec> common = CommonFlags();
  std::erase_if(common, [&](const FlagSpec& flag) {
    return HasFlag(command, flag.name);
  });
  PrintFlags(common, out);
}

// Returns the command whose name begins the line; null if there is none. Sets
// `rest` to the words after the name.
const Command* Find(const std::vector<Command>& commands,
                    const std::vector<std::string>& given,
                    std::vector<std::string>& rest) {
  for (size_t count = std::min<size_t>(2, given.size()); count > 0; --count) {
    const auto end = given.begin() + static_cast<std::ptrdiff_t>(count);
    const std::string name = absl::StrJoin(given.begin(), end, " ");
    for (const Command& command : commands) {
      if (command.name != name) continue;
      rest.assign(end, given.end());
      return &command;
    }
  }
  return nullptr;
}

// Returns the name of the command that is spelled almost as the first words
// are; empty if there is none.
std::string NearCommand(const std::vector<Command>& commands,
                        const std::vector<std::string>& given) {
  std::string best;
  size_t best_distance = SIZE_MAX;
  for (const Command& command : commands) {
    const auto words = static_cast<size_t>(
        1 + std::count(command.name.begin(), command.name.end(), ' '));
    const auto end = given.begin() +
                     static_cast<std::ptrdiff_t>(std::min(words, given.size()));
    const std::string name = absl::StrJoin(given.begin(), end, " ");
    const size_t distance = EditDistance(name, command.name);
    if (distance <= FarthestTypo(name) && distance < best_distance) {
      best = command.name;
      best_distance = distance;
    }
  }
  return best;
}

int ReportUsage(absl::string_view message, const Streams& streams) {
  streams.err << "weftctl: " << Printable(message) << "\n";
  return kUsage;
}

int Report(const absl::Status& status, const Streams& streams) {
  if (status.ok()) return kDone;
  if (IsUsageError(status)) return ReportUsage(status.message(), streams);
  streams.err << "weftctl: "
              << Printable(status.ToString(
                     absl::StatusToStringMode::kWithNoExtraData))
              << "\n";
  return kFailed;
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const Command& command,
                                                const Arguments& arguments,
                                                absl::Duration timeout,
                                                const std::string& address) {
  client::ClientOptions options;
  options.timeout = timeout;
  // A person waits, so there are few attempts.
  options.retry.max_attempts = command.view ? 1 : 4;
  options.target = address;
  WEFT_ASSIGN_OR_RETURN(client::Security security, ReadSecurity(arguments));
  options.security = std::move(security);
  return Client::Connect(std::move(options));
}

int RunCommand(const Command& command, const std::vector<std::string>& rest,
               const Streams& streams) {
  // The command's own flags come first. If two flags have the same name, the
  // first one counts, so a command may redefine a common flag.
  std::vector<FlagSpec> flags = command.flags;
  const std::vector<FlagSpec> common = CommonFlags();
  flags.insert(flags.end(), common.begin(), common.end());
  const auto arguments =
      Arguments::Parse(rest, flags, command.words, command.last_word_optional);
  if (!arguments.ok()) {
    return ReportUsage(
        absl::StrCat(arguments.status().message(), " (see: weftctl ",
                     command.name, " --help)"),
        streams);
  }
  const auto timeout = arguments->GetDuration("timeout");
  if (!timeout.ok()) return ReportUsage(timeout.status().message(), streams);
  const std::string output = arguments->GetString("output");
  if (!HasFlag(command, "output") && output != "json" && output != "table") {
    return ReportUsage(
        absl::StrCat("--output: '", output, "' is not json or table"), streams);
  }
  const auto connect = [&](const std::string& address) {
    return Connect(command, *arguments, *timeout, address);
  };
  const auto client = command.offline ? Client::Connect({})
                                      : connect(arguments->GetString("server"));
  if (!client.ok()) return Report(client.status(), streams);
  const absl::Status status = command.run({.client = **client,
                                           .arguments = *arguments,
                                           .out = streams.out,
                                           .err = streams.err,
                                           .connect = connect,
                                           .json = output == "json"});
  return Report(status, streams);
}

}  // namespace

int RunWeftctl(const std::vector<std::string>& given, const Streams& streams) {
  const std::vector<Command> commands = AllCommands();
  const bool help = std::any_of(
      given.begin(), given.end(),
      [](const std::string& word) { return word == "--help" || word == "-h"; });
  std::vector<std::string> rest;
  const Command* command = Find(commands, given, rest);
  if (help || given.empty()) {
    std::ostream& out = help ? streams.out : streams.err;
    command != nullptr ? PrintHelp(*command, out)
                       : PrintOverview(commands, out);
    return help ? kDone : kUsage;
  }
  if (command == nullptr) {
    const std::string near = NearCommand(commands, given);
    return ReportUsage(
        absl::StrCat(
            "no command '", given[0], "' of these words ",
            near.empty() ? "" : absl::StrCat("(did you mean '", near, "'?) "),
            "(see: weftctl --help)"),
        streams);
  }
  return RunCommand(*command, rest, streams);
}

}  // namespace weft::client::weftctl
