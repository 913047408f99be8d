#include "server/tinker/weights.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/models.h"
#include "server/tinker/samplers.h"
#include "server/tinker/steps.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

using Done = Callback<FutureResult>;

struct Save {
  CheckpointPath path;
  bool overwrite = false;
  const char* type = "save_weights";
};

absl::Status StartSave(Front& front, const CallPtr& call, const Save& save,
                       uint64_t step, Done done) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointExtras extras, ReadExtras(call->body));
  v1::SaveCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(save.path.run));
  request.set_name(save.path.WeftName());
  request.set_overwrite(save.overwrite);
  request.set_step(step);
  return front.port.Call<StepReply<CheckpointInfo>>(
      call->origin(), Rpc::kSaveCheckpoint, request,
      [](Engine& engine, SaveCheckpointRequest plain, auto then) {
        engine.SaveCheckpoint(std::move(plain), std::move(then));
      },
      [&front, call, save, extras, done = std::move(done)](
          const absl::StatusOr<StepReply<CheckpointInfo>>& reply) {
        if (!reply.ok()) return done(reply.status());
        KeepExtras(front, call->caller, save.path, extras);
        done(FutureResult::Of(
            {{"path", save.path.ToString()}, {"type", save.type}}));
      });
}

absl::Status PromiseSave(Front& front, const CallPtr& call, const char* kind,
                         const char* type, const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string model,
                        StringField(call->body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntField(call->body, "seq_id"));
  const auto read = [call, model, seq, kind, type]() -> absl::StatusOr<Save> {
    const std::string unnamed = absl::StrCat("step-", seq);
    WEFT_ASSIGN_OR_RETURN(const std::string name,
                          StringOr(call->body, "path", unnamed.c_str()));
    Save save{.type = type};
    WEFT_ASSIGN_OR_RETURN(
        save.path, ParseCheckpointId(model, absl::StrCat(kind, "/", name)));
    WEFT_ASSIGN_OR_RETURN(save.overwrite,
                          BoolOr(call->body, "overwrite", false));
    return save;
  };
  return PromiseStep(
      front, call, model, seq,
      [&front, call, read](uint64_t step, Done done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(const Save save, read());
        return StartSave(front, call, save, step, std::move(done));
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
  if (Find(body, "weights_access_token") != nullptr) {
    return absl::UnimplementedError(
        "weights_access_token is not offered: checkpoints are their tenant's");
  }
  return load;
}

// Loads into the model's adapter, and makes it if it is not there. `seq` is the
// load's own number, 0 for a model's first request.
absl::Status StartLoad(Front& front, const CallPtr& call, const Model& model,
                       int64_t seq, uint64_t step, const Done& done) {
  WEFT_ASSIGN_OR_RETURN(const Load load, ReadLoad(call->body));
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(model.adapter);
  request.set_source_adapter_id(AdapterOfModel(load.path.run));
  request.set_name(load.path.WeftName());
  request.set_weights_only(!load.with_optimizer);
  request.set_step(step);
  return front.port.Call<StepReply<AdapterInfo>>(
      call->origin(), Rpc::kLoadCheckpoint, request,
      [](Engine& engine, LoadCheckpointRequest plain, auto then) {
        engine.LoadCheckpoint(std::move(plain), std::move(then));
      },
      [&front, id = model.id, seq, path = load.path.ToString(),
       done](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        const auto found = front.models.find(id);
        absl::Status status = reply.status();
        if (found != front.models.end()) {
          EndLoad(front, found->second, seq,
                  reply.ok() ? std::optional(reply->result.last_step)
                             : std::nullopt);
          if (reply.ok()) status = KeepModel(front, found->second);
        }
        if (!status.ok()) return done(status);
        done(FutureResult::Of(
            {{"path", path}, {"model_id", id}, {"type", "load_weights"}}));
      });
}

absl::Status LoadNewModel(Front& front, const CallPtr& call,
                          const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Model* const model, OpenModel(front, *call));
  const std::string id = model->id;
  return Promise(
      front, call, {.model = id, .seq = 0},
      [&front, call, id](const Done& done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(
            const std::string base,
            StringOr(call->body, "base_model", front.model_name().c_str()));
        WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
        WEFT_RETURN_IF_ERROR(CheckOptimizer(call->body));
        return StartLoad(front, call, front.models.at(id), 0, 0, done);
      },
      respond);
}

}  // namespace

absl::Status SaveWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  return PromiseSave(front, call, "weights", "save_weights", respond);
}

absl::Status SaveWeightsForSampler(Front& front, const CallPtr& call,
                                   const Respond& respond) {
  if (Find(call->body, "sampling_session_seq_id") != nullptr) {
    return PublishSampler(front, call, respond);
  }
  return PromiseSave(front, call, "sampler_weights", "save_weights_for_sampler",
                     respond);
}

absl::Status SaveWeightsExternal(Front& front, const CallPtr& call,
                                 const Respond& respond) {
  return PromiseSave(front, call, "external_weights", "save_weights_external",
                     respond);
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
      front, call, id, seq,
      [&front, call, id, seq](uint64_t step, const Done& done) {
        Model& model = front.models.at(id);
        BeginLoad(model, seq);
        const absl::Status refused =
            StartLoad(front, call, model, seq, step, done);
        if (!refused.ok()) EndLoad(front, model, seq, std::nullopt);
        return refused;
      },
      respond);
}

}  // namespace weft::tinker
