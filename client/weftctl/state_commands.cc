// Commands on weftd's state. Most need no server: they read and copy the folder
// of --state-dir, on the machine that has it, or a log in the store of --state.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "client/weftctl/store_probe.h"
#include "nlohmann/json.hpp"
#include "src/base/status_macros.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/copy/copy_state.h"
#include "src/log/folder/backup.h"
#include "src/log/folder/state_folder.h"
#include "src/log/verify.h"
#include "src/store/open_store.h"

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

bool IsStore(const std::string& place) {
  return absl::StrContains(place, "://");
}

FlagSpec LogFlag() {
  return {"log", "N", "log to read of a store that has several", ""};
}

// Opens a store to read the log of --log, by default the only one.
absl::StatusOr<std::unique_ptr<log::State>> OpenLogToRead(
    const std::string& url, const Arguments& arguments) {
  std::optional<int> number;
  if (arguments.Has("log")) {
    WEFT_ASSIGN_OR_RETURN(const int64_t log, arguments.GetInt("log"));
    number = static_cast<int>(std::min<int64_t>(log, INT_MAX));
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<store::ObjectStore> objects,
                        store::OpenStore(url, nullptr));
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<log::StateBucket> bucket,
      log::StateBucket::Open(std::move(objects), std::nullopt, false));
  const absl::Status selected = bucket->SelectLog(number);
  if (absl::IsFailedPrecondition(selected)) {
    return UsageError(absl::StrCat(selected.message(), " with --log"));
  }
  WEFT_RETURN_IF_ERROR(selected);
  return bucket;
}

// Opens the first place of the command, a folder or a store, to read it.
absl::StatusOr<std::unique_ptr<log::State>> OpenToRead(const Session& session) {
  const std::string& place = session.arguments.word(0);
  if (IsStore(place)) return OpenLogToRead(place, session.arguments);
  if (session.arguments.Has("log")) {
    return UsageError("--log: a folder has one log, without a number");
  }
  return log::StateFolder::OpenToRead(place);
}

absl::Status CopyState(const Session& session) {
  const std::string& from = session.arguments.word(0);
  const std::string& to = session.arguments.word(1);
  if (!IsStore(from) && !IsStore(to) && !session.arguments.Has("log")) {
    WEFT_ASSIGN_OR_RETURN(const log::BackupReport report,
                          log::BackUp(from, to));
    Print(session, {{"files", report.files}, {"bytes", report.bytes}});
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::State> source,
                        OpenToRead(session));
  log::CopyReport report;
  if (IsStore(to)) {
    WEFT_ASSIGN_OR_RETURN(std::unique_ptr<store::ObjectStore> objects,
                          store::OpenStore(to, nullptr));
    WEFT_ASSIGN_OR_RETURN(report,
                          log::CopyToStore(*source, std::move(objects)));
  } else {
    WEFT_ASSIGN_OR_RETURN(report, log::CopyToFolder(*source, to));
  }
  Print(session, {{"records", report.records},
                  {"images", report.images},
                  {"bytes", report.bytes}});
  return absl::OkStatus();
}

absl::StatusOr<json> ReadState(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::State> state,
                        OpenToRead(session));
  WEFT_ASSIGN_OR_RETURN(const log::StateReport report,
                        log::VerifyState(*state));
  return json{{"adapters", report.adapters},
              {"records", report.records},
              {"images", report.images},
              {"bytes", report.bytes},
              {"torn_bytes", report.torn_bytes}};
}

absl::Status Verify(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const json state, ReadState(session));
  Print(session, state);
  return absl::OkStatus();
}

absl::Status Restore(const Session& session) {
  // Checks the backup before copying it, because the copy of a damaged backup
  // would look like a good state.
  const absl::StatusOr<json> state = ReadState(session);
  return state.ok() ? CopyState(session) : state.status();
}

absl::Status Snapshot(const Session& session) {
  return session.client.WriteSnapshot();
}

absl::Status ProbeTheStore(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const store::S3Options options,
                        store::ParseS3Url(session.arguments.word(0)));
  WEFT_ASSIGN_OR_RETURN(const absl::Duration duration,
                        session.arguments.GetDuration("duration"));
  WEFT_ASSIGN_OR_RETURN(const std::vector<ProbeResult> results,
                        ProbeStore(options, duration));
  std::vector<Row> rows;
  json checks = json::array();
  int failed = 0;
  for (const ProbeResult& result : results) {
    failed += result.ok ? 0 : 1;
    rows.push_back({result.check, result.ok ? "ok" : "FAILED", result.detail});
    checks.push_back({{"check", result.check},
                      {"ok", result.ok},
                      {"detail", result.detail}});
  }
  if (session.json) {
    session.out << checks.dump() << "\n";
  } else {
    PrintTable(rows, session.out);
  }
  if (failed == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the store failed ", failed, " of ", results.size(),
                   " checks: two processes could own the same state"));
}

}  // namespace

std::vector<Command> StateCommands() {
  return {
      {"state snapshot",
       "Have the server write a snapshot, so that its next start is quick.",
       Snapshot},
      {.name = "state backup",
       .help =
           "copies a state without checkpoints, also while its server runs; "
           "each place is a folder or s3://BUCKET/PREFIX",
       .run = CopyState,
       .words = {"FROM", "TO"},
       .flags = {LogFlag()},
       .offline = true},
      {.name = "state verify",
       .help = "reads all of a state or of a backup, in a folder or a store",
       .run = Verify,
       .words = {"PLACE"},
       .flags = {LogFlag()},
       .offline = true},
      {.name = "state restore",
       .help =
           "verifies a backup and copies it to a new --state-dir or --state",
       .run = Restore,
       .words = {"BACKUP", "TO"},
       .flags = {LogFlag()},
       .offline = true},
      {.name = "state probe",
       .help =
           "races, stops and kills writers of a bucket, for a store of state",
       .run = ProbeTheStore,
       .words = {"s3://BUCKET/PREFIX"},
       .flags = {{"duration", "DURATION", "time of all races", "10s"}},
       .offline = true}};
}

}  // namespace weft::client::weftctl
