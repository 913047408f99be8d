// The commands that watch a server: top and profile.
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/load_table.h"
#include "client/weftctl/output.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

constexpr size_t kMaxAdapters = 30;
constexpr char kClearScreen[] = "\033[H\033[2J";

absl::StatusOr<LoadSample> Look(const Session& session) {
  LoadSample sample{.seconds =
                        absl::ToDoubleSeconds(SteadyNow() - absl::UnixEpoch())};
  WEFT_ASSIGN_OR_RETURN(auto info, session.client.GetInfo());
  sample.info = std::move(info);
  if (sample.info.model().architecture().empty()) return sample;  // It starts.
  WEFT_ASSIGN_OR_RETURN(auto adapters, session.client.ListAdapters());
  sample.adapters = std::move(adapters);
  return sample;
}

absl::Status Top(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto interval,
                        session.arguments.GetDuration("interval"));
  WEFT_ASSIGN_OR_RETURN(const auto count, session.arguments.GetInt("count"));
  const bool live = &session.out == &std::cout && isatty(STDOUT_FILENO) == 1;
  std::optional<LoadSample> before;
  absl::Time answered;
  for (int64_t shown = 0; count == 0 || shown < count; ++shown) {
    if (shown > 0) absl::SleepFor(interval);
    absl::StatusOr<LoadSample> now = Look(session);
    // A server that has answered may restart, so this waits for its return.
    const bool away = absl::IsUnavailable(now.status()) ||
                      absl::IsDeadlineExceeded(now.status());
    if (!now.ok() && !(before && away)) return now.status();
    if (now.ok()) answered = SteadyNow();
    if (!session.json) {
      session.out << (live ? kClearScreen : shown > 0 ? "\n" : "");
    }
    if (!now.ok()) {
      session.err << absl::StrFormat(
          "weftctl: no answer for %.0f s: %s\n",
          absl::ToDoubleSeconds(SteadyNow() - answered),
          Printable(now.status().message()));
    } else if (session.json) {
      PrintJson(now->info, session.out);
    } else {
      session.out << LoadTable(before, *now, kMaxAdapters);
    }
    session.out.flush();
    if (now.ok()) before = *std::move(now);
  }
  return absl::OkStatus();
}

absl::Status Profile(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto steps, session.arguments.GetUint32("steps"));
  WEFT_ASSIGN_OR_RETURN(const auto time, session.arguments.GetDuration("time"));
  const std::string path = session.arguments.GetString("output");
  WEFT_ASSIGN_OR_RETURN(const auto trace, session.client.Profile(steps, time));
  std::ofstream file(path, std::ios::binary);
  file << trace;
  file.close();
  if (!file) {
    return absl::InternalError(absl::StrCat("--output: cannot write ", path));
  }
  session.out << "wrote " << FormatBytes(trace.size()) << " to " << path
              << "\n";
  return absl::OkStatus();
}

}  // namespace

std::vector<Command> MonitorCommands() {
  return {
      {.name = "top",
       .help = "Load of the server and its adapters, again and again.",
       .words = {},
       .flags = {{"interval", "DURATION", "time between two tables", "2s"},
                 {"count", "N", "number of tables; 0: until it is stopped",
                  "0"},
                 ViewTimeout()},
       .run = Top,
       .view = true},
      {"profile",
       "Record what the engine does, for ui.perfetto.dev.",
       {},
       {{"steps", "N",
         "end after N batches, optimizer steps or decode iterations; 0: no "
         "limit",
         "0"},
        {"time", "DURATION", "end after this time at the latest, up to 300s",
         "10s"},
        {"output", "FILE", "also -o; a Chrome trace (JSON)",
         "weft-trace.json"}},
       Profile},
  };
}

}  // namespace weft::client::weftctl
