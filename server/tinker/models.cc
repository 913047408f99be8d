#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/wire/field_checks.h"
#include "server/wire/response_conversion.h"
#include "server/wire/status_conversion.h"
#include "src/base/status_macros.h"
#include "src/request/adapter.h"
#include "src/request/move_unit.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

// The most models of one owner. The engine limits how many of them have
// adapters.
constexpr size_t kMaxModels = 4096;

absl::Status CheckModelCount(const Front& front, const std::string& owner) {
  const auto is_own = [&](const Model& model) { return model.owner == owner; };
  const size_t count = front.models.Where(is_own).size();
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
  return front.port.CallWith<AdapterInfo>(
      call->origin(), Rpc::kCreateAdapter, request,
      [optimizer = OptimizerOf(model.optimizer)](
          engine::Engine& engine_now, CreateAdapterRequest plain, auto then) {
        plain.optimizer = optimizer;
        engine_now.CreateAdapter(std::move(plain), std::move(then));
      },
      [&front, id = model.id, caller = model.caller, adapter = model.adapter,
       done](const absl::StatusOr<AdapterInfo>& info) {
        // If the model is gone, a deletion may have run before the adapter
        // was made. So it runs again.
        if (!info.ok()) return done(info.status());
        if (!front.models.Has(id)) front.adapters.Delete(caller, adapter);
        done(FutureResult::Of({{"type", "create_model"}, {"model_id", id}}));
      });
}

// Returns Model::base_model for the model that the body asks for. Checkpoints
// keep the name, too, so it must be short.
absl::StatusOr<std::string> NamedBase(const Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        Text(call.body, "base_model", ""));
  if (base.size() > kMaxShownBytes) {
    return BadField("base_model",
                    absl::StrCat("has ", base.size(),
                                 " bytes, must have at most ", kMaxShownBytes));
  }
  return absl::EqualsIgnoreCase(base, front.model_name()) ? "" : base;
}

// Adds the model that the body names to front.models and to the ledger, unless
// it is there. Returns its id. The log keeps the order of its notes. So when it
// has the request that makes the model (Promise), it has the model, too.
absl::StatusOr<std::string> OpenModel(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(
      const Session* const session,
      front.sessions.FindOf(call.owner(), Text(call.body, "session_id")));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, Int(call.body, "model_seq_id"));
  if (number < 0) return BadField("model_seq_id", "must not be negative");
  std::string id = absl::StrCat(session->id, ":train:", number);
  if (front.models.Has(id)) return id;
  WEFT_RETURN_IF_ERROR(CheckModelCount(front, call.owner()));
  WEFT_ASSIGN_OR_RETURN(std::string base, NamedBase(front, call));
  WEFT_ASSIGN_OR_RETURN(std::string metadata,
                        ShownField(call.body, "user_metadata"));
  WEFT_ASSIGN_OR_RETURN(
      std::shared_ptr<void> charge,
      front.ledger.Charge(call.owner(), base.size() + metadata.size()));
  Model model{.id = id,
              .caller = call.caller,
              .owner = call.owner(),
              .session = session->id,
              .adapter = AdapterOfModel(id),
              .base_model = std::move(base),
              // A bad one fails the model's future later.
              .optimizer = ReadOptimizer(call.body).value_or(""),
              .user_metadata = std::move(metadata),
              .charge = std::move(charge)};
  model.making = true;
  KeepModel(front, *front.models.Add(id, std::move(model)).first,
            [&front, id](const absl::Status& kept) {
              if (!kept.ok()) ForgetModel(front, id);
            });
  return id;
}

// Runs `start`, which begins to make the adapter of the model `id`. The model's
// steps wait until the work of `start` has ended.
absl::Status StartModel(Front& front, const std::string& id,
                        const ModelStart& start,
                        const Callback<FutureResult>& done) {
  Model* const model = front.models.Find(id);
  if (model == nullptr) return absl::NotFoundError("the model is gone");
  model->making = true;
  absl::Status refused = start(
      *model, [&front, id, done](const absl::StatusOr<FutureResult>& result) {
        Model* const made = front.models.Find(id);
        if (made != nullptr) {
          made->made |= result.ok();
          made->making = false;
        }
        done(result);
      });
  if (!refused.ok() && !RetryMillis(refused)) model->making = false;
  return refused;
}

// Ends Tinker's names of variants of a model, before the most tokens of a
// sequence: "NAME:peft:N".
constexpr absl::string_view kVariant = ":peft:";

absl::string_view WithoutVariant(absl::string_view base_model) {
  return base_model.substr(0, base_model.find(kVariant));
}

// Returns INVALID_ARGUMENT if the name is that of a variant with longer
// sequences than this server has, or with no number.
absl::Status CheckVariant(const Front& front, const std::string& base_model) {
  const size_t plain = WithoutVariant(base_model).size();
  if (plain == base_model.size()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const engine::Engine* const engine,
                        front.port.engine());
  const int most = engine->info().context_length;
  int asked = 0;
  if (absl::SimpleAtoi(base_model.substr(plain + kVariant.size()), &asked) &&
      asked >= 1 && asked <= most) {
    return absl::OkStatus();
  }
  return BadField(
      "base_model",
      absl::StrCat("is ", Quoted(base_model), ", the number must be in [1, ",
                   most, "]: use ", Quoted(WithoutVariant(base_model)),
                   ", or a server with a larger --max-context"));
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
        {"tokenizer_id", std::string(WithoutVariant(base))}}},
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
  if (UnitOf(adapter_id) == adapter_id) return std::string(adapter_id);
  return absl::StrReplaceAll(adapter_id, {{".train.", ":train:"}});
}

absl::Status CheckBaseModel(const Front& front,
                            const absl::StatusOr<std::string>& base_model) {
  WEFT_RETURN_IF_ERROR(base_model.status());
  const absl::string_view plain = WithoutVariant(*base_model);
  for (const std::string& name : front.model_names()) {
    if (absl::EqualsIgnoreCase(plain, name) ||
        absl::EndsWithIgnoreCase(plain, absl::StrCat("/", name))) {
      return CheckVariant(front, *base_model);
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
  WEFT_ASSIGN_OR_RETURN(
      const Model* const model,
      front.models.FindOf(call->owner(), Text(call->body, "model_id")));
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
  WEFT_ASSIGN_OR_RETURN(
      const Model* const model,
      front.models.FindOf(call->owner(), Text(call->body, "model_id")));
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
  const std::optional<Model> model = front.models.Take(id);
  if (!model) return;
  DropSnapshotsOf(front, *model);
  front.ledger.Erase(EntryKind::kMaking, id);
  front.ledger.Erase(EntryKind::kModel, id);
}

void UnloadModelsOf(Front& front, const std::string& session) {
  for (const std::string& id : front.models.OfSession(session)) {
    const Model& model = *front.models.Find(id);
    // The deletion comes first: after a crash between the two calls, the ledger
    // still says that the adapter is to be deleted.
    front.adapters.Delete(model.caller, model.adapter);
    ForgetModel(front, id);
  }
}

void RestoreModels(Front& front, const std::string& session) {
  std::vector<std::string> orphans;
  for (const LedgerEntry& entry :
       front.ledger.ReadAll(EntryKind::kModel, session)) {
    Model& model = *front.models.Add(entry.id, {}).first;
    model.id = entry.id;
    model.session = entry.fields.value("session", "");
    model.caller = CallerFromJson(entry.fields.value("caller", Json()));
    model.owner = OwnerKey(model.caller);
    model.adapter = AdapterOfModel(entry.id);
    model.base_model = entry.fields.value("base_model", "");
    model.optimizer = entry.fields.value("optimizer", kAdamType);
    model.user_metadata =
        ShownField(entry.fields, "user_metadata").value_or("");
    model.charge = front.ledger.ChargeIfRoom(
        model.owner, model.base_model.size() + model.user_metadata.size());
    if (!front.sessions.Has(model.session)) orphans.push_back(entry.id);
  }
  // A model has no session if a crash came between the ends of the two.
  for (const std::string& id : orphans) {
    const Model& model = *front.models.Find(id);
    front.adapters.Delete(model.caller, model.adapter);
    ForgetModel(front, id);
  }
}

}  // namespace weft::server::tinker
