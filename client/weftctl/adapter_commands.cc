#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/load_table.h"
#include "client/weftctl/output.h"

namespace weft::weftctl {
namespace {

Row Heading() {
  return {"ADAPTER", "TENANT",  "STATE",  "RANK",   "STEP",
          "OPTIM",   "VERSION", "MEMORY", "CREATED"};
}

Row Describe(const v1::Adapter& adapter) {
  return {adapter.adapter_id(),
          adapter.tenant(),
          DescribeState(adapter),
          absl::StrCat(adapter.config().rank()),
          absl::StrCat(adapter.last_step()),
          absl::StrCat(adapter.optim_steps()),
          absl::StrCat(adapter.version()),
          FormatBytes(adapter.resident_bytes()),
          FormatTime(adapter.created_at())};
}

absl::Status Print(const Session& session,
                   const absl::StatusOr<v1::Adapter>& adapter) {
  if (!adapter.ok()) return adapter.status();
  if (session.json) {
    PrintJson(*adapter, session.out);
  } else {
    PrintTable({Heading(), Describe(*adapter)}, session.out);
  }
  return absl::OkStatus();
}

absl::Status ListAdapters(const Session& session) {
  const auto found = session.client.ListAdapters();
  if (!found.ok()) return found.status();
  if (session.json) {
    PrintJson(*found, session.out);
    return absl::OkStatus();
  }
  std::vector<Row> rows = {Heading()};
  for (const v1::Adapter& adapter : found->adapters()) {
    rows.push_back(Describe(adapter));
  }
  PrintTable(rows, session.out);
  return absl::OkStatus();
}

absl::StatusOr<v1::LoraConfig> ReadConfig(const Arguments& arguments) {
  v1::LoraConfig config;
  const auto rank = arguments.GetUint32("rank");
  if (!rank.ok()) return rank.status();
  config.set_rank(*rank);
  const auto alpha = arguments.GetDouble("alpha");
  if (!alpha.ok()) return alpha.status();
  config.set_alpha(*alpha);
  if (arguments.Has("seed")) {
    const auto seed = arguments.GetInt("seed");
    if (!seed.ok()) return seed.status();
    config.set_seed(static_cast<uint64_t>(*seed));
  }
  const std::string modules = arguments.GetString("target-modules");
  for (const auto name : absl::StrSplit(modules, ',', absl::SkipEmpty())) {
    v1::TargetModule module = v1::TARGET_MODULE_UNSPECIFIED;
    if (!v1::TargetModule_Parse(
            absl::StrCat("TARGET_MODULE_", absl::AsciiStrToUpper(name)),
            &module)) {
      return UsageError(
          absl::StrCat("--target-modules: no module '", name, "'"));
    }
    config.add_target_modules(module);
  }
  return config;
}

absl::Status CreateAdapter(const Session& session) {
  const auto config = ReadConfig(session.arguments);
  if (!config.ok()) return config.status();
  const auto durability = ReadDurability(session.arguments);
  if (!durability.ok()) return durability.status();
  const std::string& id = session.arguments.word(0);
  const auto made = session.client.CreateAdapter(
      id, *config, session.arguments.GetString("tenant"), *durability);
  if (!made.ok()) return made.status();
  return Print(session, session.client.GetAdapter(id));
}

absl::Status GetAdapter(const Session& session) {
  return Print(session, session.client.GetAdapter(session.arguments.word(0)));
}

absl::Status DeleteAdapter(const Session& session) {
  return session.client.DeleteAdapter(session.arguments.word(0));
}

absl::Status ImportAdapter(const Session& session) {
  const auto durability = ReadDurability(session.arguments);
  if (!durability.ok()) return durability.status();
  return Print(session,
               session.client.ImportAdapter(
                   session.arguments.word(0), session.arguments.word(1),
                   session.arguments.GetString("tenant"), *durability));
}

absl::Status ExportAdapter(const Session& session) {
  return session.client.ExportAdapter(session.arguments.word(0),
                                      session.arguments.GetString("snapshot"),
                                      session.arguments.word(1));
}

}  // namespace

absl::StatusOr<v1::Durability> ReadDurability(const Arguments& arguments) {
  const std::string name = arguments.GetString("durability");
  v1::Durability durability = v1::DURABILITY_UNSPECIFIED;
  if (!name.empty() &&
      !v1::Durability_Parse(
          absl::StrCat("DURABILITY_", absl::AsciiStrToUpper(name)),
          &durability)) {
    return UsageError(
        absl::StrCat("--durability: '", name, "' is neither memory nor step"));
  }
  return durability;
}

std::vector<Command> AdapterCommands() {
  const std::vector<FlagSpec> shape = {
      {"rank", "R", "rank of the adapter", "32"},
      {"alpha", "A", "scale is alpha / rank", "32"},
      {"seed", "N", "seed of the initial weights", ""},
      {"target-modules", "NAMES",
       "q_proj,...,lm_head,embed_tokens; all projections", ""},
      DurabilityFlag(),
      TenantFlag()};
  return {
      {.name = "adapters list",
       .help = "All adapters.",
       .words = {},
       .flags = {ViewTimeout()},
       .run = ListAdapters,
       .view = true},
      {"adapters create",
       "Make an adapter.",
       {"ADAPTER"},
       shape,
       CreateAdapter},
      {"adapters get", "One adapter.", {"ADAPTER"}, {}, GetAdapter},
      {"adapters delete", "Forget an adapter.", {"ADAPTER"}, {}, DeleteAdapter},
      {"import",
       "Make an adapter from a local PEFT folder.",
       {"ADAPTER", "FOLDER"},
       {DurabilityFlag(), TenantFlag()},
       ImportAdapter},
      {"export",
       "Write an adapter to a local PEFT folder.",
       {"ADAPTER", "FOLDER"},
       {{"snapshot", "NAME", "a snapshot instead of the latest weights", ""}},
       ExportAdapter},
  };
}

}  // namespace weft::weftctl
