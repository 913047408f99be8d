#include <utility>

#include "absl/strings/str_cat.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

using Done = Callback<FutureResult>;

// Begins to save a checkpoint.
absl::Status StartSave(Front& front, const CallPtr& call,
                       const CallOrigin& origin, CheckpointKind kind,
                       const StepPlace& place, const StepDone& done) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string name,
      Text(call->body, "path", absl::StrCat("step-", place.seq)));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        NameCheckpoint("name", place.model, kind, name));
  WEFT_ASSIGN_OR_RETURN(const bool overwrite,
                        Bool(call->body, "overwrite", false));
  WEFT_ASSIGN_OR_RETURN(const uint64_t ttl, ReadTtl(call->body));
  WEFT_ASSIGN_OR_RETURN(std::string shown,
                        ShownField(call->body, "user_metadata"));
  auto request = RequestOf<v1::SaveCheckpointRequest>(place);
  request.set_name(path.WeftName());
  request.set_overwrite(overwrite);
  request.set_ttl_seconds(ttl);
  auto& metadata = *request.mutable_metadata();
  if (!shown.empty()) metadata[kUserMetadata] = std::move(shown);
  const Model* const model = front.models.Find(place.model);
  if (model != nullptr && !model->base_model.empty()) {
    metadata[kBaseModel] = model->base_model;
  }
  return front.port.Submit(
      origin, Rpc::kSaveCheckpoint, request, [](auto* /*plain*/) {}, done);
}

// Promises a step that saves a checkpoint.
absl::Status PromiseSave(Front& front, const CallPtr& call, CheckpointKind kind,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  return PromiseStep(
      front, call, Rpc::kSaveCheckpoint, place,
      {{kCaller, CallerToJson(call->caller)}},
      [&front, call, kind, place](const CallOrigin& origin,
                                  const StepDone& done) {
        return StartSave(front, call, origin, kind, place, done);
      },
      respond);
}

// Reads the request of a load into the model's adapter.
absl::StatusOr<v1::LoadCheckpointRequest> ReadLoad(const Call& call,
                                                   const StepPlace& place) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call.body, "path")));
  WEFT_ASSIGN_OR_RETURN(const bool with_optimizer,
                        Bool(call.body, "optimizer", false));
  auto request = RequestOf<v1::LoadCheckpointRequest>(place);
  request.set_source_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  request.set_weights_only(!with_optimizer);
  return request;
}

// Begins to load the checkpoint into the model's adapter.
absl::Status StartLoad(Front& front, const Call& call, const CallOrigin& origin,
                       const StepPlace& place, const StepDone& done) {
  WEFT_ASSIGN_OR_RETURN(const v1::LoadCheckpointRequest request,
                        ReadLoad(call, place));
  if (AsksFor(call.body, "optimizer_config")) {
    return BadField("optimizer_config",
                    "is set, but the model has an optimizer: leave it out");
  }
  const Model* const model = front.models.Find(place.model);
  if (model == nullptr) return absl::NotFoundError("no such model");
  return front.port.Submit(
      origin, Rpc::kLoadCheckpoint, request,
      [optimizer = OptimizerOf(model->optimizer)](auto* plain) {
        plain->optimizer = optimizer;
      },
      done);
}

// Begins to make the adapter of a model from the checkpoint, unless it is made.
absl::Status StartModelLoad(Front& front, const CallPtr& call,
                            const Model& model, const Done& done) {
  WEFT_ASSIGN_OR_RETURN(
      const v1::LoadCheckpointRequest request,
      ReadLoad(*call, {.model = model.id, .seq = kCreateSeq}));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call->body, "path")));
  const FutureResult loaded = FutureResult::Of({{"path", path.ToString()},
                                                {"model_id", model.id},
                                                {"type", "load_weights"}});
  if (model.made) {
    done(loaded);
    return absl::OkStatus();
  }
  return front.port.CallWith<StepReply<AdapterInfo>>(
      call->origin(), Rpc::kLoadCheckpoint, request,
      [optimizer = OptimizerOf(model.optimizer)](
          engine::Engine& engine, LoadCheckpointRequest plain, auto then) {
        plain.optimizer = optimizer;
        engine.LoadCheckpoint(std::move(plain), std::move(then));
      },
      IfOk(done, [&front, call, id = model.id, loaded, path,
                  done](const StepReply<AdapterInfo>& reply) {
        front.accounts.Note(call->caller, "read", path, "load");
        if (Model* const made = front.models.Find(id)) {
          made->optimizer = TypeOf(reply.result.optimizer);
          return done(loaded);
        }
        // The model is gone. An earlier deletion may have run before the
        // load made the adapter, so this one deletes the adapter.
        front.adapters.Delete(call->caller, AdapterOfModel(id));
        done(absl::NotFoundError("the session has ended"));
      }));
}

// Gives the model that was loaded from a checkpoint the name that the
// checkpoint has for the base model, unless the client has named it.
void NameBase(Front& front, const CallPtr& call, const std::string& id,
              const std::function<void()>& end) {
  if (AsksFor(call->body, "base_model")) return end();
  const Callback<CheckpointInfo> name =
      [&front, id, end](const absl::StatusOr<CheckpointInfo>& info) {
        Model* const model = front.models.Find(id);
        if (info.ok() && model != nullptr) {
          model->base_model = EntryOf(*info, kBaseModel);
          KeepModel(front, *model, [](const absl::Status& /*kept*/) {});
        }
        end();
      };
  const auto path = ParseCheckpointPath(Text(call->body, "path"));
  const absl::Status refused =
      path.ok() ? FindCheckpoint(front, call, *path, name) : path.status();
  if (!refused.ok()) name(refused);
}

absl::Status LoadNewModel(Front& front, const CallPtr& call,
                          const Respond& respond) {
  return MakeModel(
      front, call, respond,
      [&front, call](const Model& model, const Done& done) -> absl::Status {
        WEFT_RETURN_IF_ERROR(CheckBaseModel(
            front, Text(call->body, "base_model", front.model_name())));
        WEFT_RETURN_IF_ERROR(ReadOptimizer(call->body).status());
        const auto end = [&front, call, id = model.id,
                          done](const FutureResult& loaded) {
          NameBase(front, call, id, [done, loaded] { done(loaded); });
        };
        return StartModelLoad(front, call, model, IfOk(done, end));
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
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  return PromiseStep(
      front, call, Rpc::kLoadCheckpoint, place,
      {{kPath, Text(call->body, "path").value_or("")},
       {kOptimizer, Bool(call->body, "optimizer", false).value_or(false)},
       {kCaller, CallerToJson(call->caller)}},
      [&front, call, place](const CallOrigin& origin, const StepDone& done) {
        return StartLoad(front, *call, origin, place, done);
      },
      respond);
}

}  // namespace weft::server::tinker
