// weftd: flags, listeners, engine, signals.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/daemon.h"
#include "server/flags.h"
#include "server/version.h"
#include "src/engine/engine.h"

namespace {

constexpr int kExitBadConfig = 2;

void PrintLines(const absl::Status& status) {
  for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) {
    std::fprintf(stderr, "weftd: %.*s\n", static_cast<int>(line.size()),
                 line.data());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const absl::StatusOr<weft::Settings> settings =
      weft::ParseSettings(std::vector<std::string>(argv + 1, argv + argc),
                          weft::ProcessEnvironment());
  if (!settings.ok()) {
    PrintLines(settings.status());
    return kExitBadConfig;
  }
  if (settings->help) {
    std::fputs(weft::HelpText().c_str(), stdout);
    return 0;
  }
  if (settings->version) {
    std::fputs(weft::VersionText().c_str(), stdout);
    return 0;
  }
  const absl::Status valid = weft::ValidateSettings(*settings);
  if (!valid.ok()) {
    PrintLines(valid);
    return kExitBadConfig;
  }
  if (settings->check_config) {
    std::puts("configuration is good");
    return 0;
  }
  return weft::RunDaemon(*settings, &weft::StartEngine);
}
