#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"

namespace weft::weftctl {
namespace {

absl::Status Info(const Session& session) {
  const auto info = session.client.GetInfo();
  if (!info.ok()) return info.status();
  if (session.json) {
    PrintJson(*info, session.out);
    return absl::OkStatus();
  }
  const v1::ModelInfo& model = info->model();
  PrintTable({{"model", model.name()},
              {"architecture", model.architecture()},
              {"parameters", absl::StrCat(model.num_parameters())},
              {"layers", absl::StrCat(model.num_layers())},
              {"hidden size", absl::StrCat(model.hidden_size())},
              {"vocabulary", absl::StrCat(model.vocab_size())},
              {"context", absl::StrCat(model.context_length())},
              {"end of sequence", absl::StrJoin(model.eos_token_ids(), ",")},
              {"dtype", model.dtype()},
              {"device", info->device()},
              {"adapters", absl::StrCat(info->num_adapters(), " of ",
                                        info->max_adapters())},
              {"max rank", absl::StrCat(info->max_rank())},
              {"version", info->version()},
              {"draining", info->draining() ? "yes" : "no"}},
             session.out);
  return absl::OkStatus();
}

absl::Status Health(const Session& session) {
  const auto healthy =
      session.client.IsHealthy(session.arguments.GetString("service"));
  if (!healthy.ok()) return healthy.status();
  const char* state = *healthy ? "SERVING" : "NOT_SERVING";
  if (session.json) {
    session.out << "{\"status\":\"" << state << "\"}\n";
  } else {
    session.out << state << "\n";
  }
  if (*healthy) return absl::OkStatus();
  return absl::UnavailableError("the server takes no work now");
}

absl::Status Drain(const Session& session) { return session.client.Drain(); }

}  // namespace

std::vector<Command> ServerCommands() {
  return {
      {"info", "What the server runs and accepts.", {}, {}, Info},
      {"health",
       "Whether the server takes work: code 0 or 1.",
       {},
       {{"service", "NAME",
         "\"liveness\": whether its process is to be left alone", ""}},
       Health},
      {"drain", "Finish accepted work, take nothing new.", {}, {}, Drain},
  };
}

}  // namespace weft::weftctl
