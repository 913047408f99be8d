// Commands on all daemons of a store. They read only.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
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
  if (second.manifest.released) return "released";
  return first.etag != second.etag ? "alive" : "silent";
}

absl::Status List(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<store::ObjectStore> objects,
                        store::OpenStore(session.arguments.word(0), nullptr));
  WEFT_ASSIGN_OR_RETURN(
      const std::unique_ptr<log::StateBucket> bucket,
      log::StateBucket::Open(std::move(objects), std::nullopt, false));
  const absl::Time start = SteadyNow();
  WEFT_ASSIGN_OR_RETURN(const log::SeenManifest first,
                        log::LookAtManifest(*bucket->objects()));
  Tail tail;
  WEFT_RETURN_IF_ERROR(log::ReadSteadily(
      *bucket, [&](const std::optional<log::SnapshotFile>& snapshot) {
        return ReadTail(*bucket, snapshot, &tail);
      }));
  absl::SleepFor(start + kBetweenLooks - SteadyNow());
  WEFT_ASSIGN_OR_RETURN(const log::SeenManifest second,
                        log::LookAtManifest(*bucket->objects()));
  const log::Manifest& manifest = second.manifest;
  const char* state = Describe(first, second);
  if (session.json) {
    session.out << json::array({{{"log", 0},
                                 {"epoch", manifest.epoch},
                                 {"owner", manifest.owner.name},
                                 {"address", manifest.owner.address},
                                 {"state", state},
                                 {"snapshot", tail.first_sequence - 1},
                                 {"records", tail.records},
                                 {"bytes", tail.bytes}}})
                       .dump(-1, ' ', false, json::error_handler_t::replace)
                << "\n";
    return absl::OkStatus();
  }
  PrintTable(
      {{"LOG", "EPOCH", "OWNER", "ADDRESS", "STATE", "SNAPSHOT", "RECORDS",
        "BYTES"},
       {"0", absl::StrCat(manifest.epoch), manifest.owner.name,
        manifest.owner.address, state, absl::StrCat(tail.first_sequence - 1),
        absl::StrCat(tail.records), FormatBytes(tail.bytes)}},
      session.out);
  return absl::OkStatus();
}

}  // namespace

std::vector<Command> FleetCommands() {
  return {{.name = "fleet list",
           .help = "who has the state of a store, whether its owner is alive, "
                   "and what a start would replay",
           .run = List,
           .words = {"s3://BUCKET/PREFIX"},
           .offline = true}};
}

}  // namespace weft::client::weftctl
