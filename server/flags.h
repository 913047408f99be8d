// Flags and environment of weftd. One table (flag_table.cc) drives parsing,
// --help and the documentation of defaults. Precedence: flag > environment >
// default.
//
// Nothing here touches Torch, the network or the disk: --help must be quick.
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

// What the command line asks for.
struct Settings {
  EngineOptions engine;
  ServerOptions server;
  bool help = false;
  bool version = false;
  bool check_config = false;
  int64_t device_memory_bytes = 0;  // For check_config; 0: of no device.
};

[[nodiscard]] Environment ProcessEnvironment();

// Reads `args` (without the program's name): "--name=value", "--name value",
// for booleans also "--name" and "--no-name".
// Errors: INVALID_ARGUMENT listing every unknown flag or environment variable
// WEFT_* of a near name, and every value that does not parse. Ranges are not
// checked here but by Validate of the options.
[[nodiscard]] absl::StatusOr<Settings> ParseSettings(
    const std::vector<std::string>& args, const Environment& environment);

// Every complaint of both Validate functions, and of --device-memory-bytes, one
// per line.
[[nodiscard]] absl::Status ValidateSettings(const Settings& settings);

// Grouped, at most 100 columns.
[[nodiscard]] std::string HelpText();

}  // namespace weft

#endif  // WEFT_SERVER_FLAGS_H_
