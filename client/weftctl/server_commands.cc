#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

std::string Share(uint64_t used, uint64_t total) {
  if (total == 0) return "-";
  return absl::StrCat(FormatBytes(used), " of ", FormatBytes(total));
}

// Returns what a server that says its load does now.
std::vector<Row> LoadRows(const v1::ServerLoad& load) {
  return {
      {"up", absl::StrFormat("%.0f s", load.uptime_seconds())},
      {"calls in flight", absl::StrCat(load.calls_in_flight())},
      {"queued", absl::StrCat(load.queued_requests())},
      {"trained tokens", absl::StrCat(load.train_tokens())},
      {"prompt tokens", absl::StrCat(load.prompt_tokens())},
      {"sampled tokens", absl::StrCat(load.sampled_tokens())},
      {"optimizer steps", absl::StrCat(load.optim_steps())},
      {"process memory", FormatBytes(load.process_bytes())},
      {"device memory",
       Share(load.device_used_bytes(), load.device_total_bytes())},
      {"keys and values", Share(load.kv_used_bytes(), load.kv_total_bytes())}};
}

absl::Status Info(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto info, session.client.GetInfo());
  if (session.json) {
    PrintJson(info, session.out);
    return absl::OkStatus();
  }
  const v1::ModelInfo& model = info.model();
  std::vector<Row> rows = {
      {"model", model.name()},
      {"architecture", model.architecture()},
      {"parameters", absl::StrCat(model.num_parameters())},
      {"layers", absl::StrCat(model.num_layers())},
      {"hidden size", absl::StrCat(model.hidden_size())},
      {"vocabulary", absl::StrCat(model.vocab_size())},
      {"context", absl::StrCat(model.context_length())},
      {"end of sequence", absl::StrJoin(model.eos_token_ids(), ",")},
      {"dtype", model.dtype()},
      {"device", info.device()},
      {"adapters",
       absl::StrCat(info.num_adapters(), " of ", info.max_adapters())},
      {"max rank", absl::StrCat(info.max_rank())},
      {"version", info.version()},
      {"state", DescribeState(info)}};
  if (info.has_load()) {
    for (Row& row : LoadRows(info.load())) rows.push_back(std::move(row));
  }
  PrintTable(std::move(rows), session.out);
  return absl::OkStatus();
}

absl::Status Health(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(
      const auto healthy,
      session.client.IsHealthy(session.arguments.GetString("service")));
  const char* state = healthy ? "SERVING" : "NOT_SERVING";
  if (session.json) {
    session.out << "{\"status\":\"" << state << "\"}\n";
  } else {
    session.out << state << "\n";
  }
  if (healthy) return absl::OkStatus();
  return absl::UnavailableError("the server takes no work now");
}

// Saves every adapter under one name. Goes on after a failure, and says at the
// end how many there were.
absl::Status SaveAll(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto adapters,
                        session.client.ListAdapters(/*of_all_servers=*/false));
  const std::string name =
      absl::FormatTime("drain-%Y%m%d-%H%M%S", absl::Now(), absl::UTCTimeZone());
  int failed = 0;
  for (const v1::Adapter& adapter : adapters.adapters()) {
    v1::SaveCheckpointRequest request;
    request.set_adapter_id(adapter.adapter_id());
    request.set_name(name);
    const auto saved = session.client.SaveCheckpoint(request);
    if (!saved.ok()) ++failed;
    session.out << Printable(absl::StrCat(
                       adapter.adapter_id(), "/", name, ": ",
                       saved.ok() ? FormatBytes(saved->size_bytes())
                                  : std::string(saved.status().message())))
                << "\n";
  }
  if (failed == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(failed, " of ", adapters.adapters_size(),
                   " adapters could not be saved; the server still drains"));
}

absl::Status Drain(const Session& session) {
  const absl::Status drained = session.client.Drain();
  if (!drained.ok() || !session.arguments.Has("save-all")) return drained;
  return SaveAll(session);
}

absl::Status Undrain(const Session& session) {
  return session.client.Undrain();
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

std::vector<Command> ServerCommands() {
  return {
      {.name = "info",
       .help = "What the server runs and accepts.",
       .run = Info,
       .flags = {ViewTimeout()},
       .view = true},
      {"health",
       "Whether the server takes work: code 0 or 1.",
       Health,
       {},
       {{"service", "NAME",
         "\"liveness\": whether its process is to be left alone", ""}}},
      {"drain",
       "Finish accepted work, take nothing new but reads, saves and exports.",
       Drain,
       {},
       {{"save-all", "", "then save every adapter as drain-DATE-TIME", ""}}},
      {"undrain", "Take new work again.", Undrain},
      {"profile",
       "Record what the engine does, for ui.perfetto.dev.",
       Profile,
       {},
       {{"steps", "N",
         "end after N batches, optimizer steps or decode iterations; 0: no "
         "limit",
         "0"},
        {"time", "DURATION", "end after this time at the latest, up to 300s",
         "10s"},
        {"output", "FILE", "also -o; a Chrome trace (JSON)",
         "weft-trace.json"}}}};
}

}  // namespace weft::client::weftctl
