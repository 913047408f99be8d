#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/tinker/accounts.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/wire/field_checks.h"
#include "server/wire/response_conversion.h"
#include "server/wire/status_conversion.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/request/adapter.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

std::string KeyOf(const Caller& caller, const std::string& adapter) {
  return absl::StrCat(OwnerKey(caller), " ", adapter);
}

// Writes to the ledger that the adapter is to be deleted, by the next process
// if this one does not do it (RestoreOrphans).
void DeleteAtNextStart(Front& front, const Caller& caller,
                       const std::string& adapter) {
  front.ledger.Put(
      EntryKind::kOrphan,
      {.id = KeyOf(caller, adapter),
       .fields = {{"caller", CallerToJson(caller)}, {"adapter", adapter}}},
      [](const absl::Status& /*put*/) {});
}

// Asks the engine to delete the adapter of front.orphans[key], unless such a
// request is running already. An adapter that does not exist counts as deleted.
void Try(Front& front, const std::string& key) {
  Orphan& orphan = front.orphans.at(key);
  if (std::exchange(orphan.running, true)) return;
  const Callback<bool> end = [&front, key](const absl::StatusOr<bool>& gone) {
    const auto found = front.orphans.find(key);
    if (found == front.orphans.end()) return;
    found->second.running = false;
    if (!gone.ok() && !absl::IsNotFound(gone.status())) return;
    front.orphans.erase(found);
    front.ledger.Erase(EntryKind::kOrphan, key);
  };
  const absl::Status refused =
      DeleteAdapterOf(front, {.caller = orphan.caller}, orphan.adapter, end);
  if (!refused.ok()) end(refused);
}

}  // namespace

absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                             const std::string& adapter, Callback<bool> done) {
  v1::DeleteAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kDeleteAdapter, request,
                         &engine::Engine::DeleteAdapter, std::move(done));
}

absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                          const std::string& adapter,
                          Callback<AdapterInfo> done) {
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kGetAdapter, request,
                         &engine::Engine::GetAdapter, std::move(done));
}

void DeleteOrphan(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const std::string key = KeyOf(caller, adapter);
  Orphan& orphan = front.orphans[key];
  orphan.caller = caller;
  orphan.adapter = adapter;
  DeleteAtNextStart(front, caller, adapter);
  Try(front, key);
}

void SweepOrphans(Front& front) {
  const auto all = [](const Orphan& /*orphan*/) { return true; };
  for (const std::string& key : IdsWhere(front.orphans, all)) {
    if (front.orphans.contains(key)) Try(front, key);
  }
}

void RestoreOrphans(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kOrphan)) {
    if (front.loaded.contains(entry.id)) continue;
    front.orphans.try_emplace(
        entry.id, Orphan{.caller = CallerFromJson(entry.fields["caller"]),
                         .adapter = entry.fields.value("adapter", "")});
  }
}

namespace {

// Returns the beginning of the names of a checkpoint's adapters.
std::string StemOf(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)), ".");
}

// Returns the first of the checkpoint's adapters, or the end of `loaded`.
template <typename Loaded>
auto FindLoaded(Loaded& loaded, const Caller& caller,
                const CheckpointInfo& info) {
  const std::string stem = KeyOf(caller, StemOf(info));
  const auto found = loaded.lower_bound(stem);
  const bool has =
      found != loaded.end() && absl::StartsWith(found->first, stem);
  return has ? found : loaded.end();
}

// Handles the end of a load, and tells the outcome to all sessions that wait.
void EndLoad(Front& front, const CallOrigin& origin, const std::string& adapter,
             const absl::Status& loaded) {
  const auto entry = front.loaded.find(KeyOf(*origin.caller, adapter));
  const auto waiting = std::exchange(entry->second.waiting, {});
  if (loaded.ok()) {
    entry->second.ready = true;
    entry->second.users = static_cast<int>(waiting.size());
  } else {
    front.loaded.erase(entry);
    DeleteOrphan(front, *origin.caller, adapter);
  }
  for (const auto& done : waiting) {
    loaded.ok() ? done(adapter) : done(loaded);
  }
}

void StartLoad(Front& front, const CallOrigin& origin,
               const CheckpointInfo& info, Callback<std::string> done) {
  const absl::StatusOr<std::string> id = NewId();
  if (!id.ok()) return done(id.status());
  const std::string adapter = absl::StrCat(StemOf(info), id->substr(0, 8));
  front.loaded[KeyOf(*origin.caller, adapter)].waiting.push_back(
      std::move(done));
  DeleteAtNextStart(front, *origin.caller, adapter);
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(info.adapter_id);
  request.set_name(info.name);
  request.set_weights_only(true);
  const absl::Status refused = front.port.Call(
      origin, Rpc::kLoadCheckpoint, request, &engine::Engine::LoadCheckpoint,
      [&front, origin,
       adapter](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        EndLoad(front, origin, adapter, reply.status());
      });
  if (!refused.ok()) EndLoad(front, origin, adapter, refused);
}

// Does what UseCheckpoint does for a checkpoint that was found.
void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info, Callback<std::string> done);

// Counts a user of an adapter that is ready. If a client has deleted the
// adapter over gRPC, loads another one.
void UseReady(Front& front, const CallOrigin& origin,
              const std::string& adapter, const CheckpointInfo& info,
              const Callback<std::string>& done) {
  const Callback<AdapterInfo> end =
      [&front, origin, adapter, info,
       done](const absl::StatusOr<AdapterInfo>& got) {
        const auto entry = front.loaded.find(KeyOf(*origin.caller, adapter));
        // The last user may have left during the call of GetAdapter.
        if (entry != front.loaded.end() && !absl::IsNotFound(got.status())) {
          if (!got.ok()) return done(got.status());
          ++entry->second.users;
          return done(adapter);
        }
        if (entry != front.loaded.end()) {
          front.ledger.Erase(EntryKind::kOrphan, entry->first);
          front.loaded.erase(entry);
        }
        UseAdapter(front, origin, info, done);
      };
  const absl::Status refused = GetAdapterOf(front, origin, adapter, end);
  if (!refused.ok()) end(refused);
}

void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info, Callback<std::string> done) {
  const auto found = FindLoaded(front.loaded, *origin.caller, info);
  if (found == front.loaded.end()) {
    return StartLoad(front, origin, info, std::move(done));
  }
  if (!found->second.ready) {
    return found->second.waiting.push_back(std::move(done));
  }
  UseReady(front, origin, found->first.substr(KeyOf(*origin.caller, "").size()),
           info, done);
}

}  // namespace

absl::Status UseCheckpoint(Front& front, const CallPtr& call,
                           const std::string& model_path, bool note,
                           const Callback<std::string>& done) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(model_path));
  const auto use = [&front, call, path, note,
                    done](const CheckpointInfo& info) {
    const bool notes = note || FindLoaded(front.loaded, call->caller, info) ==
                                   front.loaded.end();
    UseAdapter(front, call->origin(), info,
               IfOk(done, [&front, call, path, notes,
                           done](const std::string& adapter) {
                 if (notes) {
                   NoteEvent(front, call->caller, "read", path, "sample");
                 }
                 done(adapter);
               }));
  };
  return FindCheckpoint(front, call, path, IfOk(done, use));
}

void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const auto found = front.loaded.find(KeyOf(caller, adapter));
  if (found == front.loaded.end() || --found->second.users > 0) return;
  front.loaded.erase(found);
  DeleteOrphan(front, caller, adapter);
}

void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter) {
  LoadedAdapter& loaded = front.loaded[KeyOf(caller, adapter)];
  loaded.ready = true;
  ++loaded.users;
}

namespace {

// The most models of one owner. The engine limits how many of them have
// adapters.
constexpr size_t kMaxModels = 4096;

absl::Status CheckModelCount(const Front& front, const std::string& owner) {
  const auto is_own = [&](const Model& model) { return model.owner == owner; };
  const size_t count = IdsWhere(front.models, is_own).size();
  if (count < kMaxModels) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("there are ", count, " models: unload some first"));
}

// Reads `lora_config` of the body. `projections` are those of EngineInfo.
// Errors: INVALID_ARGUMENT; UNIMPLEMENTED if `lora_config` is absent.
absl::Status ReadLora(const Json& body,
                      const std::vector<TargetModule>& projections,
                      v1::LoraConfig* out) {
  if (Find(body, "lora_config") == nullptr) {
    return absl::UnimplementedError(
        "lora_config is absent: only LoRA is offered");
  }
  WEFT_ASSIGN_OR_RETURN(const Json* const lora, Object(body, "lora_config"));
  WEFT_ASSIGN_OR_RETURN(const int64_t rank, Int(*lora, "rank", 32));
  WEFT_RETURN_IF_ERROR(CheckReal("lora_config.rank", static_cast<double>(rank),
                                 {.low = 1, .high = 1e9}));
  out->set_rank(static_cast<uint32_t>(rank));
  if (Find(*lora, "seed") != nullptr) {
    WEFT_ASSIGN_OR_RETURN(const int64_t seed, Int(*lora, "seed"));
    out->set_seed(static_cast<uint64_t>(seed));
  }
  WEFT_ASSIGN_OR_RETURN(const bool attention, Bool(*lora, "train_attn", true));
  WEFT_ASSIGN_OR_RETURN(const bool mlp, Bool(*lora, "train_mlp", true));
  WEFT_ASSIGN_OR_RETURN(const bool head, Bool(*lora, "train_unembed", true));
  for (const TargetModule module : projections) {
    const bool in_mlp = module == TargetModule::kGateProj ||
                        module == TargetModule::kUpProj ||
                        module == TargetModule::kDownProj;
    if (in_mlp ? mlp : attention) out->add_target_modules(ToProto(module));
  }
  if (head) out->add_target_modules(v1::TARGET_MODULE_LM_HEAD);
  if (!out->target_modules().empty()) return absl::OkStatus();
  return BadField("lora_config", "trains nothing");
}

// Begins to create the model's adapter.
absl::Status StartCreation(Front& front, const CallPtr& call,
                           const Model& model, Callback<FutureResult> done) {
  WEFT_RETURN_IF_ERROR(CheckBaseModel(front, Text(call->body, "base_model")));
  WEFT_RETURN_IF_ERROR(ReadOptimizer(call->body).status());
  v1::CreateAdapterRequest request;
  request.set_adapter_id(model.adapter);
  WEFT_ASSIGN_OR_RETURN(const engine::Engine* const engine,
                        front.port.engine());
  WEFT_RETURN_IF_ERROR(ReadLora(call->body, engine->info().projections,
                                request.mutable_config()));
  return front.port.Call(
      call->origin(), Rpc::kCreateAdapter, request,
      &engine::Engine::CreateAdapter,
      [&front, id = model.id, caller = model.caller, adapter = model.adapter,
       done](const absl::StatusOr<AdapterInfo>& info) {
        // If the model is gone, DeleteOrphan may have run before the adapter
        // was made. So DeleteOrphan runs again.
        if (!front.models.contains(id)) DeleteOrphan(front, caller, adapter);
        if (!info.ok()) return done(info.status());
        done(FutureResult::Of({{"type", "create_model"}, {"model_id", id}}));
      });
}

// Returns Model::base_model for the model that the body asks for. If the body
// has no base_model but a checkpoint's path, the checkpoint has the name.
absl::StatusOr<std::string> NamedBase(const Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        Text(call.body, "base_model", ""));
  if (absl::EqualsIgnoreCase(base, front.model_name())) return "";
  if (!base.empty()) return base;
  const absl::StatusOr<CheckpointPath> path =
      ParseCheckpointPath(Text(call.body, "path", ""));
  // A bad path fails the model's future later.
  if (!path.ok()) return "";
  return FindExtras(front, call.caller, *path).base_model;
}

// Adds the model that the body names to front.models and to the ledger, unless
// it is there. Returns its id. The log keeps the order of its notes. So when it
// has the request that makes the model (Promise), it has the model, too.
absl::StatusOr<std::string> OpenModel(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const Session* const session,
                        front.FindSession(call, Text(call.body, "session_id")));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, Int(call.body, "model_seq_id"));
  if (number < 0) return BadField("model_seq_id", "must not be negative");
  std::string id = absl::StrCat(session->id, ":train:", number);
  if (front.models.contains(id)) return id;
  WEFT_RETURN_IF_ERROR(CheckModelCount(front, call.owner()));
  WEFT_ASSIGN_OR_RETURN(std::string base, NamedBase(front, call));
  WEFT_ASSIGN_OR_RETURN(std::string metadata,
                        ShownField(call.body, "user_metadata"));
  WEFT_ASSIGN_OR_RETURN(
      std::shared_ptr<void> charge,
      front.ChargeEntry(call.owner(), base.size() + metadata.size()));
  Model& model = front.models[id];
  model.id = id;
  model.caller = call.caller;
  model.owner = call.owner();
  model.session = session->id;
  model.adapter = AdapterOfModel(id);
  model.base_model = std::move(base);
  // A bad one fails the model's future later.
  model.optimizer = ReadOptimizer(call.body).value_or("");
  model.line.held = true;
  model.user_metadata = std::move(metadata);
  model.charge = std::move(charge);
  KeepModel(front, model, [&front, id](const absl::Status& kept) {
    if (!kept.ok()) ForgetModel(front, id);
  });
  return id;
}

// Runs `start`, which begins to make the adapter of the model `id`. The model's
// steps wait until the work of `start` has ended.
absl::Status StartModel(Front& front, const std::string& id,
                        const ModelStart& start,
                        const Callback<FutureResult>& done) {
  Model* const model = front.FindModel(id);
  if (model == nullptr) return absl::NotFoundError("the model is gone");
  model->line.held = true;
  absl::Status refused = start(
      *model, [&front, id, done](const absl::StatusOr<FutureResult>& result) {
        Model* const made = front.FindModel(id);
        if (result.ok() && made != nullptr) made->made = true;
        OpenLine(front, id);
        done(result);
      });
  if (!refused.ok() && !RetryMillis(refused)) OpenLine(front, id);
  return refused;
}

Json InfoOf(const Front& front, const engine::Engine& engine,
            const std::string& model, const std::string& base,
            const std::string& optimizer, const AdapterInfo& info) {
  return {
      {"type", "get_info"},
      {"model_id", model},
      {"model_name", front.model_name()},
      {"model_data",
       {{"arch", engine.info().architecture},
        {"model_name", base},
        {"tokenizer_id", base}}},
      {"is_lora", true},
      {"lora_rank", info.config.rank},
      {"optimizer_config",
       OptimizerJson(optimizer.empty() ? TypeOf(info.optimizer) : optimizer)}};
}

}  // namespace

std::string AdapterOfModel(absl::string_view model_id) {
  return absl::StrReplaceAll(model_id, {{":train:", ".train."}});
}

std::string ModelOfAdapter(absl::string_view adapter_id) {
  constexpr size_t kSessionLength = 32;
  if (adapter_id.size() <= kSessionLength ||
      !absl::StartsWith(adapter_id.substr(kSessionLength), ".train.")) {
    return std::string(adapter_id);
  }
  return absl::StrReplaceAll(adapter_id, {{".train.", ":train:"}});
}

absl::Status CheckBaseModel(const Front& front, const Front::Id& base_model) {
  WEFT_RETURN_IF_ERROR(base_model.status());
  for (const std::string& name : front.model_names()) {
    if (absl::EqualsIgnoreCase(*base_model, name) ||
        absl::EndsWithIgnoreCase(*base_model, absl::StrCat("/", name))) {
      return absl::OkStatus();
    }
  }
  return absl::UnimplementedError(absl::StrCat(
      "base_model ", Quoted(*base_model), " is not served: use ",
      front.model_name(), ", or add the name to the server's --model-alias"));
}

void KeepModel(Front& front, const Model& model,
               std::function<void(absl::Status)> done) {
  front.ledger.Put(EntryKind::kModel,
                   {.id = model.id,
                    .fields = {{"session", model.session},
                               {"caller", CallerToJson(model.caller)},
                               {"base_model", model.base_model},
                               {"optimizer", model.optimizer},
                               {"user_metadata", Shown(model.user_metadata)}}},
                   std::move(done));
}

absl::Status MakeModel(Front& front, const CallPtr& call,
                       const Respond& respond, const ModelStart& start) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, OpenModel(front, *call));
  return Promise(
      front, call, {.model = id, .seq = kCreateSeq},
      [&front, id, start](const Callback<FutureResult>& done) {
        return StartModel(front, id, start, done);
      },
      respond);
}

absl::Status CreateModel(Front& front, const CallPtr& call,
                         const Respond& respond) {
  return MakeModel(
      front, call, respond,
      [&front, call](const Model& model, const Callback<FutureResult>& done) {
        return StartCreation(front, call, model, done);
      });
}

absl::Status GetModelInfo(Front& front, const CallPtr& call,
                          const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Model* const model,
                        front.FindModel(*call, Text(call->body, "model_id")));
  WEFT_ASSIGN_OR_RETURN(const engine::Engine* const engine,
                        front.port.engine());
  const std::string base =
      model->base_model.empty() ? front.model_name() : model->base_model;
  return GetAdapterOf(
      front, call->origin(), model->adapter,
      ReplyWith(respond,
                [&front, engine, id = model->id, base,
                 optimizer = model->optimizer](const AdapterInfo& info) {
                  return InfoOf(front, *engine, id, base, optimizer, info);
                }));
}

absl::Status UnloadModel(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Model* const model,
                        front.FindModel(*call, Text(call->body, "model_id")));
  const auto start = [&front, call, id = model->id, adapter = model->adapter](
                         const Callback<FutureResult>& done) {
    return DeleteAdapterOf(
        front, call->origin(), adapter,
        IfOk(done, [&front, id, done](bool /*deleted*/) {
          ForgetModel(front, id);
          done(FutureResult::Of({{"type", "unload_model"}, {"model_id", id}}));
        }));
  };
  return Promise(front, call, {.model = model->id, .name = "unload"}, start,
                 respond);
}

void ForgetModel(Front& front, const std::string& id) {
  const auto found = front.models.find(id);
  if (found == front.models.end()) return;
  const Model model = std::move(found->second);
  front.models.erase(found);
  DropSnapshotsOf(front, model);
  front.ledger.EraseSteps(id);
  front.ledger.Erase(EntryKind::kModel, id);
  const FutureResult gone =
      FutureResult::Failed(absl::NotFoundError("the model is gone"));
  for (const auto& [seq, step] : model.line.waiting) {
    front.futures.Finish(step.future, gone);
  }
}

void UnloadModelsOf(Front& front, const std::string& session) {
  for (const std::string& id : IdsOf(front.models, session)) {
    const Model& model = front.models.at(id);
    // DeleteOrphan comes first: after a crash between the two calls, the ledger
    // still says that the adapter is to be deleted.
    DeleteOrphan(front, model.caller, model.adapter);
    ForgetModel(front, id);
  }
}

void RestoreModels(Front& front) {
  std::vector<std::string> orphans;
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kModel)) {
    Model& model = front.models[entry.id];
    model.id = entry.id;
    model.session = entry.fields.value("session", "");
    model.caller = CallerFromJson(entry.fields.value("caller", Json()));
    model.owner = OwnerKey(model.caller);
    model.adapter = AdapterOfModel(entry.id);
    model.base_model = entry.fields.value("base_model", "");
    model.optimizer = entry.fields.value("optimizer", kAdamType);
    model.user_metadata =
        ShownField(entry.fields, "user_metadata").value_or("");
    model.charge = front.ChargeIfRoom(
        model.owner, model.base_model.size() + model.user_metadata.size());
    if (!front.sessions.contains(model.session)) orphans.push_back(entry.id);
  }
  // A model has no session if a crash came between the ends of the two.
  for (const std::string& id : orphans) {
    DeleteOrphan(front, front.models.at(id).caller,
                 front.models.at(id).adapter);
    ForgetModel(front, id);
  }
}

}  // namespace weft::server::tinker
