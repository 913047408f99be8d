// Flags, environment and configuration file of weftd. One table
// (src/base/options/flags.inc) drives parsing, the checks of ranges, --help and
// --print-config. Precedence: flag > environment > file > default.
//
// weftd has its own parser, which reports all mistakes at once and suggests
// similar names. CLI11, which Debian packages, stops at the first mistake.
//
// This code does not use Torch or the network, so that --help is quick.
#ifndef WEFT_SERVER_FLAGS_FLAGS_H_
#define WEFT_SERVER_FLAGS_FLAGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/options/options.h"
#include "src/base/options/world.h"

namespace weft::server {

// The settings from the command line, the environment and the file.
struct Settings {
  EngineOptions engine;
  ServerOptions server;
#define WEFT_ACTION(type, member, name, value, range, unit, help) \
  type member = value;
#include "src/base/options/flags.inc"
  std::string help_word;  // The WORD of --help=WORD.
  // WEFT_ variables that are no setting (UnknownVariables).
  std::vector<std::string> unknown_variables;
  // The source of each setting that was given. Maps a flag's name, such as
  // "max-rank", to "--max-rank", "WEFT_MAX_RANK" or "FILE: max-rank".
  std::map<std::string, std::string> sources;
};

Environment ProcessEnvironment();

// Reads `args` (without the program's name). Forms: "--name=value"; for
// booleans also "--name" and "--no-name", for all other flags "--name value".
// Reads the file of --config, if there is one. Errors: INVALID_ARGUMENT, with
// one line for each mistake. ValidateSettings checks the ranges.
absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& args,
                                       const Environment& environment);

// Checks the range of every setting, and which settings go together. Errors:
// INVALID_ARGUMENT, with one line for each.
absl::Status ValidateSettings(const Settings& settings);

// Returns the help, in groups and at most 100 columns wide. With a word,
// returns only flags whose name or help contains it; empty if there are none.
std::string HelpText(absl::string_view word = "");

// Returns, for each variable ("NAME=VALUE") whose name begins with WEFT_ but is
// neither a flag's nor one of the clients nor set by Kubernetes for a Service,
// a complaint that names it.
std::vector<std::string> UnknownVariables(const char* const* environment);

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_FLAGS_H_
