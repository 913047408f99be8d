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
                       const StepPlace& place, const Done& done) {
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
  return front.port.Call(
      origin, Rpc::kSaveCheckpoint, request, &engine::Engine::SaveCheckpoint,
      IfOk(done, [&front, call, path,
                  done](const StepReply<CheckpointInfo>& reply) {
        if (!reply.replayed) {
          front.accounts.Note(call->caller, "create", path);
          front.accounts.Count(call->owner(), std::string(SessionOf(path.run)),
                               {.checkpoints = 1});
        }
        done(OutputOf(path.run, reply.result));
      }));
}

// Promises a step that saves a checkpoint.
absl::Status PromiseSave(Front& front, const CallPtr& call, CheckpointKind kind,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  return PromiseStep(
      front, call, Rpc::kSaveCheckpoint, place, /*cost=*/{},
      [&front, call, kind, place](const CallOrigin& origin, const Done& done) {
        return StartSave(front, call, origin, kind, place, done);
      },
      respond);
}

// Ends a load of a checkpoint with its optimizer, which becomes the model's.
void EndLoad(Front& front, const std::string& id,
             const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
  Model* const model = front.models.Find(id);
  if (model == nullptr) return;
  --model->loads;
  if (!reply.ok()) return;
  std::string type = TypeOf(reply->result.optimizer);
  if (type == model->optimizer) return;
  model->optimizer = std::move(type);
  KeepModel(front, *model, [](const absl::Status& /*kept*/) {});
}

// Begins to load the checkpoint into the model's adapter, or to make the
// adapter if there is none. The number is kCreateSeq if the load makes the
// model.
absl::Status StartLoad(Front& front, const CallPtr& call,
                       const CallOrigin& origin, const StepPlace& place,
                       const Done& done) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call->body, "path")));
  WEFT_ASSIGN_OR_RETURN(const bool with_optimizer,
                        Bool(call->body, "optimizer", false));
  Model* const model = front.models.Find(place.model);
  if (model == nullptr) return absl::NotFoundError("no such model");
  const FutureResult loaded = FutureResult::Of({{"path", path.ToString()},
                                                {"model_id", place.model},
                                                {"type", "load_weights"}});
  if (place.seq == kCreateSeq && model->made) {
    done(loaded);
    return absl::OkStatus();
  }
  if (place.seq != kCreateSeq && AsksFor(call->body, "optimizer_config")) {
    return BadField("optimizer_config",
                    "is set, but the model has an optimizer: leave it out");
  }
  auto request = RequestOf<v1::LoadCheckpointRequest>(place);
  request.set_source_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  request.set_weights_only(!with_optimizer);
  const Callback<StepReply<AdapterInfo>> end =
      IfOk(done, [&front, call, id = place.model, loaded, path,
                  done](const StepReply<AdapterInfo>& /*reply*/) {
        front.accounts.Note(call->caller, "read", path, "load");
        if (front.models.Has(id)) return done(loaded);
        // The model is gone. An earlier deletion may have run before the
        // load made the adapter, so this one deletes the adapter.
        front.adapters.Delete(call->caller, AdapterOfModel(id));
        done(absl::NotFoundError("the session has ended"));
      });
  if (with_optimizer) ++model->loads;
  const absl::Status refused = front.port.CallWith<StepReply<AdapterInfo>>(
      origin, Rpc::kLoadCheckpoint, request,
      [optimizer = OptimizerOf(model->optimizer)](
          engine::Engine& engine, LoadCheckpointRequest plain, auto then) {
        plain.optimizer = optimizer;
        engine.LoadCheckpoint(std::move(plain), std::move(then));
      },
      [&front, id = place.model, with_optimizer,
       end](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        if (with_optimizer) EndLoad(front, id, reply);
        end(reply);
      });
  if (with_optimizer && !refused.ok()) --model->loads;
  return refused;
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
        return StartLoad(front, call, call->origin(),
                         {.model = model.id, .seq = kCreateSeq},
                         IfOk(done, end));
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
      front, call, Rpc::kLoadCheckpoint, place, /*cost=*/{},
      [&front, call, place](const CallOrigin& origin, const Done& done) {
        return StartLoad(front, call, origin, place, done);
      },
      respond);
}

}  // namespace weft::server::tinker
