#include "server/tinker/weights.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/audit.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/models.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/reaper.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/step_output.h"
#include "server/tinker/steps.h"
#include "server/tinker/usage.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

using Done = Callback<FutureResult>;

struct Save {
  CheckpointPath path;
  bool overwrite = false;
  int64_t seq = 0;
};

// Begins to save a checkpoint. When the save has succeeded, stores the
// checkpoint's extras.
absl::Status StartSave(Front& front, const CallPtr& call, const Save& save,
                       const Done& done) {
  WEFT_ASSIGN_OR_RETURN(CheckpointExtras extras, ReadExtras(call->body));
  const auto model = front.models.find(save.path.run);
  if (model != front.models.end()) extras.base_model = model->second.base_model;
  WEFT_ASSIGN_OR_RETURN(
      extras.charge,
      front.ChargeEntry(call->owner(), extras.user_metadata.size() +
                                           extras.base_model.size()));
  v1::SaveCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(save.path.run));
  request.set_name(save.path.WeftName());
  request.set_overwrite(save.overwrite);
  request.set_step(static_cast<uint64_t>(save.seq));
  return front.port.Call(
      call->origin(), Rpc::kSaveCheckpoint, request, &Engine::SaveCheckpoint,
      [&front, call, save, extras,
       done](const absl::StatusOr<StepReply<CheckpointInfo>>& reply) {
        if (!reply.ok()) return done(reply.status());
        KeepExtras(front, call->caller, save.path, extras);
        if (!reply->replayed) {
          NoteEvent(front, call->caller, "create", save.path);
          CountUsage(front, call->owner(), front.SessionOf(save.path.run),
                     {.checkpoints = 1});
        }
        done(OutputOf(save.path.run, reply->result));
      });
}

// Promises a step that saves a checkpoint.
absl::Status PromiseSave(Front& front, const CallPtr& call, CheckpointKind kind,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string model,
                        StringField(call->body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntField(call->body, "seq_id"));
  const auto read = [call, model, seq, kind]() -> absl::StatusOr<Save> {
    const std::string unnamed = absl::StrCat("step-", seq);
    WEFT_ASSIGN_OR_RETURN(const std::string name,
                          StringOr(call->body, "path", unnamed.c_str()));
    Save save{.path = {}, .seq = seq};
    WEFT_ASSIGN_OR_RETURN(save.path, NameCheckpoint("name", model, kind, name));
    WEFT_ASSIGN_OR_RETURN(save.overwrite,
                          BoolOr(call->body, "overwrite", false));
    return save;
  };
  return PromiseStep(
      front, call, Rpc::kSaveCheckpoint, model, seq, /*bytes=*/0,
      [&front, call, read](const Done& done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(const Save save, read());
        return StartSave(front, call, save, done);
      },
      respond);
}

struct Load {
  CheckpointPath path;
  bool with_optimizer = false;
};

absl::StatusOr<Load> ReadLoad(const Json& body) {
  Load load;
  WEFT_ASSIGN_OR_RETURN(const std::string path, StringField(body, "path"));
  WEFT_ASSIGN_OR_RETURN(load.path, ParseCheckpointPath(path));
  WEFT_ASSIGN_OR_RETURN(load.with_optimizer, BoolOr(body, "optimizer", false));
  return load;
}

// Begins to load the checkpoint into the model's adapter, or to make the
// adapter if there is none. `seq` is kCreateSeq if the load makes the model.
absl::Status StartLoad(Front& front, const CallPtr& call, const std::string& id,
                       int64_t seq, const Done& done) {
  WEFT_ASSIGN_OR_RETURN(const Load load, ReadLoad(call->body));
  const auto model = front.models.find(id);
  if (model == front.models.end()) return absl::NotFoundError("no such model");
  const FutureResult loaded = FutureResult::Of({{"path", load.path.ToString()},
                                                {"model_id", id},
                                                {"type", "load_weights"}});
  if (seq == kCreateSeq && model->second.made) {
    done(loaded);
    return absl::OkStatus();
  }
  if (seq != kCreateSeq && AsksFor(call->body, "optimizer_config")) {
    return BadField("optimizer_config",
                    "is set, but the model has an optimizer: leave it out");
  }
  // From here on the checkpoint's optimizer is the model's, also for the steps
  // behind this one.
  if (load.with_optimizer && !model->second.optimizer.empty()) {
    model->second.optimizer.clear();
    KeepModel(front, model->second, [](const absl::Status& /*kept*/) {});
  }
  const std::string adapter = model->second.adapter;
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(AdapterOfModel(load.path.run));
  request.set_name(load.path.WeftName());
  request.set_weights_only(!load.with_optimizer);
  request.set_step(static_cast<uint64_t>(seq));
  return front.port.Call(
      call->origin(), Rpc::kLoadCheckpoint, request, &Engine::LoadCheckpoint,
      [&front, call, adapter, id, loaded, path = load.path,
       done](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        if (!reply.ok()) return done(reply.status());
        NoteEvent(front, call->caller, "read", path, "load");
        if (front.models.contains(id)) return done(loaded);
        // The model is gone. An earlier DeleteOrphan may have run before the
        // load made the adapter, so this one deletes the adapter.
        DeleteOrphan(front, call->caller, adapter);
        done(absl::NotFoundError("the session has ended"));
      });
}

absl::Status LoadNewModel(Front& front, const CallPtr& call,
                          const Respond& respond) {
  return MakeModel(
      front, call, respond,
      [&front, call](const Model& model, const Done& done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(
            const std::string base,
            StringOr(call->body, "base_model", front.model_name().c_str()));
        WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
        WEFT_RETURN_IF_ERROR(ReadOptimizer(call->body).status());
        return StartLoad(front, call, model.id, kCreateSeq, done);
      });
}

// Returns the run that shall have the copy of a checkpoint: the one that the
// body names, else a new one. A repeated request gets the same run. Like all
// projects, `destination_project_id` is dropped; the SDK always sends one.
absl::StatusOr<std::string> RunOfCopy(Front& front, const Call& call,
                                      const CheckpointPath& from) {
  if (Find(call.body, "session_id") == nullptr) {
    const std::string& key = call.http.idempotency_key;
    if (key.empty()) return NewId();
    return absl::BytesToHexString(
        Sha256(
            absl::StrCat("copy ", call.owner(), " ", from.ToString(), " ", key))
            .substr(0, 16));
  }
  WEFT_ASSIGN_OR_RETURN(const std::string session,
                        StringField(call.body, "session_id"));
  WEFT_RETURN_IF_ERROR(front.FindSession(call, session).status());
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        IntField(call.body, "model_seq_id"));
  const std::string run = absl::StrCat(session, ":train:", number);
  if (number >= 0 && !front.models.contains(run)) return run;
  return BadField("model_seq_id",
                  absl::StrCat("is ", number, ", must be that of no model"));
}

// Stores the extras of a copy that the engine has made. A request that comes
// again gets the same copy from the engine, also if a crash came between the
// copy and this. Returns the error that the client gets.
absl::Status EndCopy(Front& front, const Caller& caller,
                     const CheckpointPath& to, const CheckpointExtras& extras,
                     const absl::Status& copied) {
  const bool repeats =
      FindExtras(front, caller, to).copied_from == extras.copied_from;
  // The source may be another one by now.
  if (repeats && absl::IsAlreadyExists(copied)) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(copied);
  KeepExtras(front, caller, to, extras);
  if (!repeats) NoteEvent(front, caller, "copy", to);
  return absl::OkStatus();
}

}  // namespace

absl::Status SaveWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  return PromiseSave(front, call, CheckpointKind::kTraining, respond);
}

absl::Status SaveWeightsForSampler(Front& front, const CallPtr& call,
                                   const Respond& respond) {
  if (Find(call->body, "sampling_session_seq_id") != nullptr) {
    return PublishSampler(front, call, respond);
  }
  return PromiseSave(front, call, CheckpointKind::kSampler, respond);
}

absl::Status SaveWeightsExternal(Front& front, const CallPtr& call,
                                 const Respond& respond) {
  return PromiseSave(front, call, CheckpointKind::kExternal, respond);
}

absl::Status CopyWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_ASSIGN_OR_RETURN(const std::string source,
                        StringField(call->body, "source_path"));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath from, ParseCheckpointPath(source));
  CheckpointPath to = from;
  WEFT_ASSIGN_OR_RETURN(to.run, RunOfCopy(front, *call, from));
  WEFT_ASSIGN_OR_RETURN(const CheckpointExtras given, ReadExtras(call->body));
  CheckpointExtras extras = FindExtras(front, call->caller, from);
  extras.expires_at = given.expires_at;
  extras.copied_from = from.ToString();
  WEFT_ASSIGN_OR_RETURN(
      extras.charge,
      front.ChargeEntry(call->owner(), extras.user_metadata.size() +
                                           extras.base_model.size() +
                                           extras.copied_from.size()));
  // This message has what a copy needs, and its validation.
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(to.run));
  request.set_source_adapter_id(AdapterOfModel(from.run));
  request.set_name(from.WeftName());
  if (!front.copying.insert(call->owner()).second) {
    return WithReason(
        absl::ResourceExhaustedError("another copy has not ended yet"),
        {.name = "QUEUE_FULL", .values = {}});
  }
  const absl::Status refused = front.port.CallWith<CheckpointInfo>(
      call->origin(), Rpc::kUploadCheckpoint, request,
      [](Engine& engine, LoadCheckpointRequest plain, auto then) {
        engine.UploadCheckpoint(
            {.adapter_id = std::move(plain.adapter_id),
             .name = std::move(plain.name),
             .tenant = std::move(plain.tenant),
             .files = {},
             .source_adapter_id = std::move(plain.source_adapter_id)},
            std::move(then));
      },
      [&front, call, to, extras,
       respond](const absl::StatusOr<CheckpointInfo>& info) {
        front.copying.erase(call->owner());
        const absl::Status copied =
            EndCopy(front, call->caller, to, extras, info.status());
        respond(copied.ok() ? JsonReply({{"tinker_path", to.ToString()}})
                            : ErrorReply(copied));
      });
  if (!refused.ok()) front.copying.erase(call->owner());
  return refused;
}

absl::Status LoadWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  if (Find(call->body, "model_id") == nullptr) {
    return LoadNewModel(front, call, respond);
  }
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(call->body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntField(call->body, "seq_id"));
  return PromiseStep(
      front, call, Rpc::kLoadCheckpoint, id, seq, /*bytes=*/0,
      [&front, call, id, seq](const Done& done) {
        return StartLoad(front, call, id, seq, done);
      },
      respond);
}

}  // namespace weft::tinker
