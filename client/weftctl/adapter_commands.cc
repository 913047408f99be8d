#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
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
  WEFT_ASSIGN_OR_RETURN(const auto found, session.client.ListAdapters());
  if (session.json) {
    PrintJson(found, session.out);
    return absl::OkStatus();
  }
  std::vector<Row> rows = {Heading()};
  for (const v1::Adapter& adapter : found.adapters()) {
    rows.push_back(Describe(adapter));
  }
  PrintTable(rows, session.out);
  return absl::OkStatus();
}

absl::StatusOr<v1::LoraConfig> ReadConfig(const Arguments& arguments) {
  v1::LoraConfig config;
  WEFT_ASSIGN_OR_RETURN(const auto rank, arguments.GetUint32("rank"));
  config.set_rank(rank);
  WEFT_ASSIGN_OR_RETURN(const auto alpha, arguments.GetDouble("alpha"));
  config.set_alpha(alpha);
  if (arguments.Has("seed")) {
    WEFT_ASSIGN_OR_RETURN(const auto seed, arguments.GetInt("seed"));
    config.set_seed(static_cast<uint64_t>(seed));
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
  WEFT_ASSIGN_OR_RETURN(const auto config, ReadConfig(session.arguments));
  WEFT_ASSIGN_OR_RETURN(const auto durability,
                        ReadDurability(session.arguments));
  const std::string& id = session.arguments.word(0);
  WEFT_RETURN_IF_ERROR(session.client
                           .CreateAdapter(id, config,
                                          session.arguments.GetString("tenant"),
                                          durability)
                           .status());
  return Print(session, session.client.GetAdapter(id));
}

absl::Status GetAdapter(const Session& session) {
  return Print(session, session.client.GetAdapter(session.arguments.word(0)));
}

absl::Status DeleteAdapter(const Session& session) {
  return session.client.DeleteAdapter(session.arguments.word(0));
}

absl::Status ImportAdapter(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto durability,
                        ReadDurability(session.arguments));
  return Print(session,
               session.client.ImportAdapter(
                   session.arguments.word(0), session.arguments.word(1),
                   session.arguments.GetString("tenant"), durability));
}

absl::StatusOr<v1::Loader> ReadLoader(const Arguments& arguments) {
  const std::string name = arguments.GetString("for");
  if (name == "peft") return v1::LOADER_PEFT;
  if (name == "vllm") return v1::LOADER_VLLM;
  if (name == "llama.cpp") return v1::LOADER_LLAMA_CPP;
  return UsageError(
      absl::StrCat("--for: '", name, "' is none of peft, vllm and llama.cpp"));
}

absl::Status ExportAdapter(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const v1::Loader loader, ReadLoader(session.arguments));
  return session.client.ExportAdapter(session.arguments.word(0),
                                      session.arguments.GetString("snapshot"),
                                      session.arguments.word(1), loader);
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
       .run = ListAdapters,
       .flags = {ViewTimeout()},
       .view = true},
      {"adapters create",
       "Make an adapter.",
       CreateAdapter,
       {"ADAPTER"},
       shape},
      {"adapters get", "One adapter.", GetAdapter, {"ADAPTER"}},
      {"adapters delete", "Forget an adapter.", DeleteAdapter, {"ADAPTER"}},
      {"import",
       "Make an adapter from a local PEFT folder.",
       ImportAdapter,
       {"ADAPTER", "FOLDER"},
       {DurabilityFlag(), TenantFlag()}},
      {"export",
       "Write an adapter to a local PEFT folder.",
       ExportAdapter,
       {"ADAPTER", "FOLDER"},
       {{"snapshot", "NAME", "a snapshot instead of the latest weights", ""},
        {"for", "PROGRAM", "peft, vllm or llama.cpp, which loads the folder",
         "peft"}}}};
}

}  // namespace weft::client::weftctl
