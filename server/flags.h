// Flags and environment of weftd. One table (flag_table.cc) drives parsing,
// --help and the documentation of defaults. Precedence: flag > environment >
// default.
//
// This code uses neither Torch nor network nor disk, so that --help is quick.
#ifndef WEFT_SERVER_FLAGS_H_
#define WEFT_SERVER_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/config/options.h"
#include "src/config/world.h"

namespace weft {

// The settings of the command line and the environment.
struct Settings {
  EngineOptions engine;
  ServerOptions server;
  bool help = false;
  bool version = false;
  bool check_config = false;
  int64_t device_memory_bytes = 0;  // For check_config; 0: none.
};

[[nodiscard]] Environment ProcessEnvironment();

// Reads `args` (without the program's name): "--name=value", "--name value",
// for booleans also "--name" and "--no-name".
// Errors: INVALID_ARGUMENT listing every unknown flag, every environment
// variable WEFT_* that resembles a flag's, and every value that does not parse.
// Validate of the options checks ranges.
[[nodiscard]] absl::StatusOr<Settings> ParseSettings(
    const std::vector<std::string>& args, const Environment& environment);

// Returns every complaint of both Validate functions and about
// --device-memory-bytes, one per line.
[[nodiscard]] absl::Status ValidateSettings(const Settings& settings);

// Returns the help, grouped, in at most 100 columns.
[[nodiscard]] std::string HelpText();

}  // namespace weft

#endif  // WEFT_SERVER_FLAGS_H_
