// Commands on weftd's --state-dir. All but one read or copy the folder, and run
// on the machine that has it.
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "nlohmann/json.hpp"
#include "src/base/status_macros.h"
#include "src/log/folder/backup.h"
#include "src/log/folder/state_folder.h"
#include "src/log/verify.h"

namespace weft::client::weftctl {
namespace {

using nlohmann::json;

void Print(const Session& session, const json& fields) {
  if (session.json) {
    session.out << fields.dump() << "\n";
    return;
  }
  std::vector<Row> rows;
  for (const auto& [name, value] : fields.items()) {
    rows.push_back({name, name == "bytes" || name == "torn_bytes"
                              ? FormatBytes(value.get<uint64_t>())
                              : value.dump()});
  }
  PrintTable(rows, session.out);
}

absl::Status CopyState(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(
      const log::BackupReport report,
      log::BackUp(session.arguments.word(0), session.arguments.word(1)));
  Print(session, {{"files", report.files}, {"bytes", report.bytes}});
  return absl::OkStatus();
}

absl::StatusOr<json> ReadState(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::StateFolder> folder,
                        log::StateFolder::OpenExisting(path));
  WEFT_ASSIGN_OR_RETURN(const log::StateReport report,
                        log::VerifyState(*folder));
  return json{{"adapters", report.adapters},
              {"records", report.records},
              {"images", report.images},
              {"bytes", report.bytes},
              {"torn_bytes", report.torn_bytes}};
}

absl::Status Verify(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const json state, ReadState(session.arguments.word(0)));
  Print(session, state);
  return absl::OkStatus();
}

absl::Status Restore(const Session& session) {
  // Checks the backup before copying it, because the copy of a damaged backup
  // would look like a good state folder.
  const absl::StatusOr<json> state = ReadState(session.arguments.word(0));
  return state.ok() ? CopyState(session) : state.status();
}

absl::Status Snapshot(const Session& session) {
  return session.client.WriteSnapshot();
}

}  // namespace

std::vector<Command> StateCommands() {
  return {
      {"state snapshot",
       "Have the server write a snapshot, so that its next start is quick.",
       Snapshot},
      {.name = "state backup",
       .help = "copies a --state-dir, also while its server runs",
       .run = CopyState,
       .words = {"DIR", "TO"},
       .offline = true},
      {.name = "state verify",
       .help = "reads all of a --state-dir or of a backup, without a server",
       .run = Verify,
       .words = {"DIR"},
       .offline = true},
      {.name = "state restore",
       .help = "verifies a backup and copies it to a new --state-dir",
       .run = Restore,
       .words = {"BACKUP", "DIR"},
       .offline = true}};
}

}  // namespace weft::client::weftctl
