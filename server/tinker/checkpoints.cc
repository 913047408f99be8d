#include "server/tinker/checkpoints.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/tinker/accounts.h"
#include "server/tinker/adapters.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/wire/field_checks.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

constexpr absl::string_view kScheme = "tinker://";

struct KindNames {
  CheckpointKind kind;
  absl::string_view segment;
  const char* type;
  const char* saved_by;
};
constexpr KindNames kKinds[] = {
    {CheckpointKind::kTraining, "weights", "training", "save_weights"},
    {CheckpointKind::kSampler, "sampler_weights", "sampler",
     "save_weights_for_sampler"},
    {CheckpointKind::kExternal, "external_weights", "external",
     "save_weights_external"}};

const KindNames& NamesOf(CheckpointKind kind) {
  return kKinds[static_cast<size_t>(kind)];
}

absl::Status BadPath(absl::string_view path) {
  return BadField("path", absl::StrCat("is ", Quoted(path),
                                       ", must be "
                                       "tinker://RUN/KIND/NAME, KIND being "
                                       "weights, sampler_weights or "
                                       "external_weights"));
}

}  // namespace

std::string CheckpointPath::Id() const {
  return absl::StrCat(NamesOf(kind).segment, "/", name);
}

std::string CheckpointPath::ToString() const {
  return absl::StrCat(kScheme, run, "/", Id());
}

std::string CheckpointPath::WeftName() const {
  if (kind == CheckpointKind::kTraining) return name;
  return absl::StrCat(NamesOf(kind).segment, ".", name);
}

const char* CheckpointPath::KindName() const { return NamesOf(kind).type; }

const char* CheckpointPath::SavedBy() const { return NamesOf(kind).saved_by; }

CheckpointPath PathOfWeft(absl::string_view run, absl::string_view weft_name) {
  CheckpointPath path{.run = std::string(run), .name = std::string(weft_name)};
  for (const KindNames& names : kKinds) {
    const std::string prefix = absl::StrCat(names.segment, ".");
    if (names.kind == CheckpointKind::kTraining ||
        !absl::StartsWith(weft_name, prefix)) {
      continue;
    }
    path.kind = names.kind;
    path.name = std::string(weft_name.substr(prefix.size()));
  }
  return path;
}

absl::StatusOr<CheckpointPath> NameCheckpoint(absl::string_view field,
                                              absl::string_view run,
                                              CheckpointKind kind,
                                              absl::string_view name) {
  WEFT_RETURN_IF_ERROR(CheckName(field, name));
  CheckpointPath path{
      .run = std::string(run), .kind = kind, .name = std::string(name)};
  WEFT_RETURN_IF_ERROR(CheckName(field, path.WeftName()));
  if (PathOfWeft(run, path.WeftName()).kind == kind) return path;
  return BadField(field, absl::StrCat("has the name ", Quoted(name),
                                      ", which begins as another kind's"));
}

absl::StatusOr<CheckpointPath> PathOf(const Call& call) {
  return ParseCheckpointPath(
      absl::StrCat(kScheme, absl::StrJoin(call.args, "/")));
}

absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path) {
  WEFT_RETURN_IF_ERROR(path.status());
  absl::string_view rest = *path;
  if (!absl::ConsumePrefix(&rest, kScheme)) return BadPath(*path);
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, '/');
  if (parts.size() != 3 || parts[0].empty()) return BadPath(*path);
  for (const KindNames& names : kKinds) {
    if (parts[1] != names.segment) continue;
    return NameCheckpoint("path", parts[0], names.kind, parts[2]);
  }
  return BadPath(*path);
}

namespace {

// Returns the key of a checkpoint in Front::extras. The key contains the owner,
// because two tenants may use the same name for a run.
std::string KeyOf(const Caller& caller, const CheckpointPath& path) {
  return absl::StrCat(OwnerKey(caller), " ", path.ToString());
}

void Drop(Front& front, const std::string& key) {
  front.extras.erase(key);
  front.ledger.Erase(EntryKind::kCheckpoint, key);
}

}  // namespace

absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body) {
  CheckpointExtras extras;
  WEFT_ASSIGN_OR_RETURN(extras.user_metadata,
                        ShownField(body, "user_metadata"));
  if (Find(body, "ttl_seconds") == nullptr) return extras;
  WEFT_ASSIGN_OR_RETURN(const int64_t ttl, Int(body, "ttl_seconds"));
  if (ttl < kMinTtlSeconds || ttl > kMaxTtlSeconds) {
    return BadField("ttl_seconds",
                    absl::StrCat("is ", ttl, ", must be in [", kMinTtlSeconds,
                                 ", ", kMaxTtlSeconds, "]"));
  }
  extras.expires_at =
      absl::FromUnixSeconds(absl::ToUnixSeconds(absl::Now()) + ttl);
  return extras;
}

absl::Status ChargeExtras(const Front& front, const Caller& caller,
                          CheckpointExtras* extras) {
  WEFT_ASSIGN_OR_RETURN(
      extras->charge,
      front.ChargeEntry(OwnerKey(caller), extras->user_metadata.size() +
                                              extras->base_model.size() +
                                              extras->copied_from.size() +
                                              sizeof(kDimuonType)));
  return absl::OkStatus();
}

void KeepExtras(Front& front, const Caller& caller, const CheckpointPath& path,
                CheckpointExtras extras) {
  extras.caller = caller;
  extras.path = path.ToString();
  const std::string key = KeyOf(caller, path);
  if (extras.user_metadata.empty() && !extras.expires_at &&
      extras.base_model.empty() && extras.copied_from.empty() &&
      extras.optimizer.empty()) {
    return Drop(front, key);
  }
  Json fields = {{"caller", CallerToJson(caller)},
                 {"path", extras.path},
                 {"user_metadata", Shown(extras.user_metadata)},
                 {"base_model", extras.base_model},
                 {"copied_from", extras.copied_from},
                 {"optimizer", extras.optimizer}};
  if (extras.expires_at) {
    fields["expires_at"] = absl::ToUnixSeconds(*extras.expires_at);
  }
  front.ledger.Put(EntryKind::kCheckpoint,
                   {.id = key, .fields = std::move(fields)},
                   [](const absl::Status& kept) {
                     if (kept.ok()) return;
                     Log(LogLevel::kError,
                         "a checkpoint's metadata will not outlive the server",
                         {{"error", std::string(kept.message())}});
                   });
  front.extras[key] = std::move(extras);
}

CheckpointExtras FindExtras(const Front& front, const Caller& caller,
                            const CheckpointPath& path) {
  const auto found = front.extras.find(KeyOf(caller, path));
  return found == front.extras.end() ? CheckpointExtras() : found->second;
}

std::string BaseModelOf(const Front& front, const Caller& caller,
                        const CheckpointPath& path) {
  const std::string name = FindExtras(front, caller, path).base_model;
  return name.empty() ? front.model_name() : name;
}

void SweepCheckpoints(Front& front, absl::Time now) {
  const auto is_over = [now](const CheckpointExtras& extras) {
    return extras.expires_at && *extras.expires_at <= now;
  };
  for (const std::string& key : IdsWhere(front.extras, is_over)) {
    const CheckpointExtras over = front.extras.at(key);
    const auto path = ParseCheckpointPath(over.path);
    if (!path.ok()) continue;
    const Callback<bool> end = [&front, key, over,
                                path](const absl::StatusOr<bool>& deleted) {
      if (!deleted.ok() && !absl::IsNotFound(deleted.status())) return;
      if (deleted.ok()) {
        NoteEvent(front, over.caller, "delete", *path, "expired");
      }
      const auto found = front.extras.find(key);
      // A new checkpoint of this name may have other extras by now.
      if (found != front.extras.end() && found->second.charge == over.charge &&
          found->second.expires_at == over.expires_at) {
        Drop(front, key);
      }
    };
    const absl::Status refused =
        DeleteRunCheckpoint(front, {.caller = over.caller}, *path, end);
    if (!refused.ok()) end(refused);
  }
}

void RestoreExtras(Front& front) {
  for (const LedgerEntry& entry :
       front.ledger.ReadAll(EntryKind::kCheckpoint)) {
    const Json& fields = entry.fields;
    CheckpointExtras& extras = front.extras[entry.id];
    extras.caller = CallerFromJson(fields.value("caller", Json()));
    extras.path = fields.value("path", "");
    extras.user_metadata = ShownField(fields, "user_metadata").value_or("");
    extras.base_model = fields.value("base_model", "");
    extras.copied_from = fields.value("copied_from", "");
    extras.optimizer = fields.value("optimizer", "");
    if (const Json* const seconds = Find(fields, "expires_at")) {
      extras.expires_at = absl::FromUnixSeconds(seconds->get<int64_t>());
    }
    extras.charge = front.ChargeIfRoom(OwnerKey(extras.caller),
                                       extras.user_metadata.size());
  }
}

namespace {

constexpr int64_t kDefaultLimit = 20;
constexpr int64_t kMaxLimit = 1000;

absl::StatusOr<int64_t> QueryNumber(const Call& call, const char* name,
                                    int64_t otherwise, int64_t most) {
  const auto found = call.query.find(name);
  if (found == call.query.end()) return otherwise;
  int64_t value = 0;
  if (absl::SimpleAtoi(found->second, &value) && value >= 0) {
    return std::min(value, most);
  }
  return BadField(name, "must be a number that is not negative");
}

// Returns true if the front loaded the adapter from a checkpoint for sampling.
// If the caller is an admin, the adapter's name begins with the tenant.
bool IsSamplerAdapter(absl::string_view adapter) {
  const size_t separator = adapter.find(kTenantSeparator);
  if (separator != adapter.npos) adapter.remove_prefix(separator + 1);
  return absl::StartsWith(adapter, kSamplerAdapterPrefix);
}

bool Trains(const LoraConfig& config, TargetModule module) {
  return std::ranges::count(config.target_modules, module) > 0;
}

// Returns a checkpoint in the form of the SDK's type Checkpoint.
Json CheckpointJson(const CheckpointInfo& info, const CheckpointPath& path,
                    const CheckpointExtras& extras) {
  Json out = {
      {"checkpoint_id", path.Id()},        {"checkpoint_type", path.KindName()},
      {"time", TimeText(info.created_at)}, {"tinker_path", path.ToString()},
      {"size_bytes", info.size_bytes},     {"public", false}};
  if (!extras.user_metadata.empty()) {
    out["user_metadata"] = Shown(extras.user_metadata);
  }
  if (extras.expires_at) out["expires_at"] = TimeText(*extras.expires_at);
  return out;
}

// Returns a run in the form of the SDK's type TrainingRun.
Json RunJson(const Front& front, const Caller& caller, const Run& run) {
  const std::string id = ModelOfAdapter(run.adapter);
  Json out = {{"training_run_id", id},
              {"base_model", front.model_name()},
              {"model_owner", caller.tenant()},
              {"is_lora", true},
              {"corrupted", false},
              {"lora_rank", run.config.rank},
              {"last_request_time", TimeText(run.last_used_at)}};
  const Model* const model = front.FindModel(id);
  // The model with this id may belong to another owner.
  if (model != nullptr && model->owner == OwnerKey(caller)) {
    ShowMetadata(model->user_metadata, &out);
  }
  for (const CheckpointInfo& info : run.checkpoints) {
    const CheckpointPath path = PathOfWeft(id, info.name);
    const char* const field = path.kind == CheckpointKind::kSampler
                                  ? "last_sampler_checkpoint"
                                  : "last_checkpoint";
    if (out.contains(field)) continue;
    out[field] = CheckpointJson(info, path, FindExtras(front, caller, path));
  }
  return out;
}

// Returns the reply of weights_info.
Json WeightsJson(const std::string& base_model, const std::string& optimizer,
                 const CheckpointInfo& info) {
  const LoraConfig& config = info.config;
  // Before its first step, the engine does not know a model's optimizer.
  const bool known = info.optim_steps > 0 || optimizer.empty();
  return {{"base_model", base_model},
          {"is_lora", true},
          {"lora_rank", config.rank},
          {"train_unembed", Trains(config, TargetModule::kLmHead)},
          {"train_mlp", Trains(config, TargetModule::kGateProj)},
          {"train_attn", Trains(config, TargetModule::kQProj)},
          {"optimizer_config",
           OptimizerJson(known ? TypeOf(info.optimizer) : optimizer)}};
}

// Adds the caller's adapters to `*all`, beginning after the name `after`. Asks
// the engine for one page after the other.
absl::Status ListAdapters(Front& front, const CallPtr& call,
                          const std::string& after,
                          std::shared_ptr<std::vector<AdapterInfo>> all,
                          Callback<bool> done) {
  v1::ListAdaptersRequest request;
  request.set_page_size(1000);
  request.set_page_token(after);
  const auto add = [&front, call, all, done](const AdapterPage& page) {
    // A run has a rank, which an adapter may not have yet.
    if (std::ranges::any_of(page.adapters, &AdapterInfo::restoring)) {
      return done(absl::UnavailableError(
          "adapters are being restored from --state-dir; try again"));
    }
    all->insert(all->end(), page.adapters.begin(), page.adapters.end());
    if (!page.more) return done(true);
    const absl::Status refused =
        ListAdapters(front, call, page.adapters.back().adapter_id, all, done);
    if (!refused.ok()) done(refused);
  };
  return front.port.Call(call->origin(), Rpc::kListAdapters, request,
                         &engine::Engine::ListAdapters, IfOk(done, add));
}

// Calls `make` with the caller's runs. Responds with the JSON or the error that
// `make` returns.
absl::Status WithRuns(
    Front& front, const CallPtr& call, const Respond& respond,
    std::function<absl::StatusOr<Json>(const std::vector<Run>&)> make) {
  const auto adapters = std::make_shared<std::vector<AdapterInfo>>();
  const auto finish =
      ReplyWith(respond, [adapters, make](const Checkpoints& checkpoints) {
        return make(MakeRuns(*adapters, checkpoints));
      });
  const Callback<bool> list =
      IfOk(respond, [&front, call, respond, finish](bool /*listed*/) {
        const absl::Status refused = ListCheckpoints(front, call, "", finish);
        if (!refused.ok()) Fail(respond, refused);
      });
  return ListAdapters(front, call, "", adapters, list);
}

Json CheckpointsJson(const Front& front, const Caller& caller,
                     const Checkpoints& checkpoints) {
  Json out = Json::array();
  for (const CheckpointInfo& info : checkpoints) {
    const CheckpointPath path =
        PathOfWeft(ModelOfAdapter(info.adapter_id), info.name);
    out.push_back(CheckpointJson(info, path, FindExtras(front, caller, path)));
  }
  return out;
}

}  // namespace

std::string TimeText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone());
}

absl::Status ListCheckpoints(Front& front, const CallPtr& call,
                             const std::string& adapter,
                             Callback<Checkpoints> done) {
  v1::ListCheckpointsRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(call->origin(), Rpc::kListCheckpoints, request,
                         &engine::Engine::ListCheckpoints, std::move(done));
}

absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                            const CheckpointPath& path,
                            Callback<CheckpointInfo> done) {
  return ListCheckpoints(
      front, call, AdapterOfModel(path.run),
      IfOk(done, [path, done](const Checkpoints& checkpoints) {
        for (const CheckpointInfo& info : checkpoints) {
          if (info.name == path.WeftName()) return done(info);
        }
        done(absl::NotFoundError(
            absl::StrCat("no checkpoint ", Quoted(path.ToString()))));
      }));
}

absl::Status DeleteRunCheckpoint(Front& front, CallOrigin origin,
                                 const CheckpointPath& path,
                                 Callback<bool> done) {
  v1::DeleteCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  return front.port.CallWith<bool>(
      std::move(origin), Rpc::kDeleteCheckpoint, request,
      [](engine::Engine& engine, std::pair<std::string, std::string> names,
         auto then) {
        engine.DeleteCheckpoint(std::move(names.first), std::move(names.second),
                                std::move(then));
      },
      std::move(done));
}

absl::Status ListRuns(Front& front, const CallPtr& call,
                      const Respond& respond) {
  if (call->query.contains("project_id")) {
    return NoProjects("project_id");
  }
  return WithRuns(front, call, respond,
                  [&front, call](const std::vector<Run>& runs) {
                    Json all = Json::array();
                    for (const Run& run : runs) {
                      all.push_back(RunJson(front, call->caller, run));
                    }
                    return PageJson(*call, "training_runs", all);
                  });
}

absl::Status GetRun(Front& front, const CallPtr& call, const Respond& respond) {
  return WithRuns(
      front, call, respond,
      [&front, call](const std::vector<Run>& runs) -> absl::StatusOr<Json> {
        const std::string adapter = AdapterOfModel(call->args[0]);
        for (const Run& run : runs) {
          if (run.adapter == adapter) return RunJson(front, call->caller, run);
        }
        return absl::NotFoundError(
            absl::StrCat("no training run ", Quoted(call->args[0])));
      });
}

absl::Status ListRunCheckpoints(Front& front, const CallPtr& call,
                                const Respond& respond) {
  return ListCheckpoints(
      front, call, AdapterOfModel(call->args[0]),
      ReplyWith(respond, [&front, call](const Checkpoints& found) {
        return Json{
            {"checkpoints", CheckpointsJson(front, call->caller, found)}};
      }));
}

absl::Status ListAllCheckpoints(Front& front, const CallPtr& call,
                                const Respond& respond) {
  return ListCheckpoints(
      front, call, "",
      ReplyWith(respond, [&front, call](const Checkpoints& found) {
        return PageJson(*call, "checkpoints",
                        CheckpointsJson(front, call->caller, found));
      }));
}

absl::Status DeleteCheckpoint(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  return DeleteRunCheckpoint(
      front, call->origin(), path,
      IfOk(respond, [&front, call, path, respond](bool /*deleted*/) {
        KeepExtras(front, call->caller, path, {});
        NoteEvent(front, call->caller, "delete", path);
        respond({.status = 204});
      }));
}

absl::Status SetCheckpointTtl(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  WEFT_ASSIGN_OR_RETURN(const CheckpointExtras given, ReadExtras(call->body));
  const auto set = [&front, call, path, given](
                       const CheckpointInfo& /*info*/) -> absl::StatusOr<Json> {
    CheckpointExtras extras = FindExtras(front, call->caller, path);
    extras.expires_at = given.expires_at;
    if (extras.charge == nullptr) {
      WEFT_RETURN_IF_ERROR(ChargeExtras(front, call->caller, &extras));
    }
    KeepExtras(front, call->caller, path, extras);
    return Json::object();
  };
  return FindCheckpoint(front, call, path, ReplyWith(respond, set));
}

absl::Status GetWeightsInfo(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call->body, "tinker_path")));
  const std::string base = BaseModelOf(front, call->caller, path);
  const std::string optimizer = FindExtras(front, call->caller, path).optimizer;
  return FindCheckpoint(
      front, call, path,
      ReplyWith(respond, [base, optimizer](const CheckpointInfo& info) {
        return WeightsJson(base, optimizer, info);
      }));
}

std::vector<Run> MakeRuns(const std::vector<AdapterInfo>& adapters,
                          const Checkpoints& checkpoints) {
  std::map<std::string, Run> runs;
  for (const AdapterInfo& info : adapters) {
    if (IsSamplerAdapter(info.adapter_id)) continue;
    runs[info.adapter_id] = {.adapter = info.adapter_id,
                             .config = info.config,
                             .last_used_at = info.last_used_at};
  }
  for (const CheckpointInfo& info : checkpoints) {
    Run& run = runs[info.adapter_id];
    if (run.adapter.empty()) {
      run = {.adapter = info.adapter_id,
             .config = info.config,
             .last_used_at = info.created_at};
    }
    run.checkpoints.push_back(info);
  }
  std::vector<Run> out;
  out.reserve(runs.size());
  for (auto& [name, run] : runs) out.push_back(std::move(run));
  std::ranges::stable_sort(out, std::greater(), &Run::last_used_at);
  return out;
}

absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                              const Json& all) {
  const auto total = static_cast<int64_t>(all.size());
  WEFT_ASSIGN_OR_RETURN(const int64_t limit,
                        QueryNumber(call, "limit", kDefaultLimit, kMaxLimit));
  WEFT_ASSIGN_OR_RETURN(const int64_t offset,
                        QueryNumber(call, "offset", 0, total));
  Json part = Json::array();
  for (int64_t i = offset; i < std::min(total, offset + limit); ++i) {
    part.push_back(all[static_cast<size_t>(i)]);
  }
  return Json{{name, part},
              {"cursor",
               {{"offset", offset}, {"limit", limit}, {"total_count", total}}}};
}

}  // namespace weft::server::tinker
