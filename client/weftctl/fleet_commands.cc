// Commands on all daemons of a store.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "nlohmann/json.hpp"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/standby.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/log_summary.h"
#include "src/log/steady_read.h"
#include "src/store/open_store.h"

namespace weft::client::weftctl {
namespace {

using nlohmann::json;

// Between two looks an owner that lives changes its manifest.
constexpr absl::Duration kBetweenLooks = absl::Seconds(3);
static_assert(kBetweenLooks > log::kBeatInterval);

// The log after the newest snapshot.
struct Tail {
  uint64_t first_sequence = 1;
  uint64_t records = 0;
  uint64_t bytes = 0;
};

absl::Status ReadTail(const log::State& state,
                      const std::optional<log::SnapshotFile>& snapshot,
                      Tail* tail) {
  *tail = {.first_sequence = snapshot ? snapshot->next_sequence : 1};
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::LogReader> reader,
                        state.OpenLog(tail->first_sequence));
  for (;;) {
    WEFT_ASSIGN_OR_RETURN(const auto record, reader->Next());
    if (!record) break;
    ++tail->records;
  }
  tail->bytes = reader->read_bytes();
  return absl::OkStatus();
}

const char* Describe(const log::SeenManifest& first,
                     const log::SeenManifest& second) {
  if (second.manifest.drained) return "drained";
  if (second.manifest.released) return "released";
  return first.etag != second.etag ? "alive" : "silent";
}

absl::StatusOr<json> ReadLogs(log::StateBucket& bucket) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<int> logs, bucket.ListLogs());
  const int num_logs = logs.back() + 1;
  const absl::Time start = SteadyNow();
  const auto first = log::LookAtManifests(*bucket.objects(), num_logs);
  std::vector<Tail> tails(num_logs);
  for (const int log : logs) {
    WEFT_RETURN_IF_ERROR(bucket.SelectLog(log));
    WEFT_RETURN_IF_ERROR(log::ReadSteadily(
        bucket, [&](const std::optional<log::SnapshotFile>& snapshot) {
          return ReadTail(bucket, snapshot, &tails[log]);
        }));
  }
  absl::SleepFor(start + kBetweenLooks - SteadyNow());
  const auto second = log::LookAtManifests(*bucket.objects(), num_logs);
  json rows = json::array();
  for (const int log : logs) {
    WEFT_RETURN_IF_ERROR(first[log].status());
    WEFT_RETURN_IF_ERROR(second[log].status());
    const log::Manifest& manifest = second[log]->manifest;
    rows.push_back({{"log", log},
                    {"epoch", manifest.epoch},
                    {"owner", manifest.owner.name},
                    {"address", manifest.owner.address},
                    {"state", Describe(*first[log], *second[log])},
                    {"snapshot", tails[log].first_sequence - 1},
                    {"records", tails[log].records},
                    {"bytes", tails[log].bytes}});
  }
  return rows;
}

// Opens the state that the first word names.
absl::StatusOr<std::unique_ptr<log::StateBucket>> Open(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<store::ObjectStore> objects,
                        store::OpenStore(session.arguments.word(0), nullptr));
  return log::StateBucket::Open(std::move(objects), std::nullopt, false);
}

absl::Status List(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::StateBucket> bucket,
                        Open(session));
  WEFT_ASSIGN_OR_RETURN(const json logs, ReadLogs(*bucket));
  if (session.json) {
    session.out << logs.dump(-1, ' ', false, json::error_handler_t::replace)
                << "\n";
    return absl::OkStatus();
  }
  std::vector<Row> rows = {{"LOG", "EPOCH", "OWNER", "ADDRESS", "STATE",
                            "SNAPSHOT", "RECORDS", "BYTES"}};
  for (const json& log : logs) {
    rows.push_back(
        {log["log"].dump(), log["epoch"].dump(),
         log["owner"].get<std::string>(), log["address"].get<std::string>(),
         log["state"].get<std::string>(), log["snapshot"].dump(),
         log["records"].dump(), FormatBytes(log["bytes"].get<uint64_t>())});
  }
  PrintTable(rows, session.out);
  return absl::OkStatus();
}

absl::Status UndrainLog(const Session& session) {
  if (!session.arguments.Has("log")) return UsageError("--log is required");
  WEFT_ASSIGN_OR_RETURN(const int64_t number, session.arguments.GetInt("log"));
  const int log = static_cast<int>(std::min<int64_t>(number, INT_MAX));
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<log::StateBucket> bucket,
                        Open(session));
  WEFT_RETURN_IF_ERROR(bucket->SelectLog(log));
  WEFT_RETURN_IF_ERROR(log::Undrain(*bucket->objects(), {.log = log}));
  session.out << "log " << log << " is free for the next standby\n";
  return absl::OkStatus();
}

absl::Status Move(const Session& session) {
  if (!session.arguments.Has("to")) return UsageError("--to is required");
  WEFT_ASSIGN_OR_RETURN(const uint32_t log, session.arguments.GetUint32("to"));
  return session.client.MoveAdapter(session.arguments.word(0), log);
}

// Shows how many adapters are left until the server has none.
absl::Status DrainServer(const Session& session) {
  std::future<absl::Status> drained =
      std::async(std::launch::async, [&] { return session.client.DrainLog(); });
  while (drained.wait_for(std::chrono::seconds(1)) !=
         std::future_status::ready) {
    const auto info = session.client.GetInfo();
    if (info.ok()) session.err << info->num_adapters() << " adapters left\n";
  }
  WEFT_RETURN_IF_ERROR(drained.get());
  session.out << "the server gives its log away, and ends\n";
  return absl::OkStatus();
}

}  // namespace

std::vector<Command> FleetCommands() {
  return {
      {.name = "fleet list",
       .help = "who has each log of a state in a store, whether the owner is "
               "alive, and what a start would replay",
       .run = List,
       .words = {"s3://BUCKET/PREFIX"},
       .offline = true},
      {.name = "fleet drain",
       .help = "take all adapters and sessions of the server to others, and "
               "end it; nobody takes its log any more",
       .run = DrainServer},
      {.name = "fleet undrain",
       .help = "lets a process take a log again that is drained",
       .run = UndrainLog,
       .words = {"s3://BUCKET/PREFIX"},
       .flags = {{"log", "N", "the log", ""}},
       .offline = true},
      {.name = "fleet move",
       .help = "take an adapter to another log of the servers' store; its "
               "clients go on there",
       .run = Move,
       .words = {"ADAPTER"},
       .flags = {{"to", "LOG", "number of the log", ""}}}};
}

}  // namespace weft::client::weftctl
