#include "server/tinker/weights.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/models.h"
#include "server/tinker/reaper.h"
#include "server/tinker/samplers.h"
#include "server/tinker/step_output.h"
#include "server/tinker/steps.h"
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
  const std::string adapter = model->second.adapter;
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(AdapterOfModel(load.path.run));
  request.set_name(load.path.WeftName());
  request.set_weights_only(!load.with_optimizer);
  request.set_step(static_cast<uint64_t>(seq));
  return front.port.Call(
      call->origin(), Rpc::kLoadCheckpoint, request, &Engine::LoadCheckpoint,
      [&front, call, adapter, id, loaded,
       done](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        if (!reply.ok()) return done(reply.status());
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
        WEFT_RETURN_IF_ERROR(CheckOptimizer(call->body));
        return StartLoad(front, call, model.id, kCreateSeq, done);
      });
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
