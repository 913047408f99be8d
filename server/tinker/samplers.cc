#include "server/tinker/samplers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/steps.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/request/digest.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

using Done = Callback<FutureResult>;

absl::Status Keep(Front& front, const Sampler& sampler) {
  WEFT_RETURN_IF_ERROR(front.ledger.Put(
      EntryKind::kSampler, {.id = sampler.id,
                            .fields = {{"session", sampler.session},
                                       {"adapter", sampler.adapter},
                                       {"snapshot", sampler.snapshot},
                                       {"model_path", sampler.model_path}}}));
  front.samplers.insert_or_assign(sampler.id, sampler);
  return absl::OkStatus();
}

void RespondSampler(const Sampler& sampler, const Respond& respond) {
  respond(JsonReply({{"type", "create_sampling_session"},
                     {"sampling_session_id", sampler.id}}));
}

std::string SamplerId(absl::string_view session, int64_t number) {
  return absl::StrCat(session, ":sample:", number);
}

absl::Status StartPublish(Front& front, const CallPtr& call, Sampler sampler,
                          uint64_t step, const Done& done) {
  v1::PublishSnapshotRequest request;
  request.set_adapter_id(sampler.adapter);
  request.set_name(sampler.snapshot);
  request.set_step(step);
  return front.port.Call<StepReply<PublishedSnapshot>>(
      call->origin(), Rpc::kPublishSnapshot, request,
      [](Engine& engine, PublishSnapshotRequest plain, auto then) {
        engine.PublishSnapshot(std::move(plain), std::move(then));
      },
      [&front, sampler = std::move(sampler),
       done](const absl::StatusOr<StepReply<PublishedSnapshot>>& reply) {
        absl::Status status = reply.status();
        if (status.ok()) status = Keep(front, sampler);
        if (!status.ok()) return done(status);
        done(FutureResult::Of({{"type", "save_weights_for_sampler"},
                               {"path", nullptr},
                               {"sampling_session_id", sampler.id}}));
      });
}

// The name of the adapter for a checkpoint. An overwritten checkpoint is
// another one: sessions of the old one stay as they are.
std::string AdapterOfCheckpoint(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)));
}

bool IsUsed(const Front& front, const std::string& adapter) {
  return std::any_of(
      front.samplers.begin(), front.samplers.end(),
      [&](const auto& entry) { return entry.second.adapter == adapter; });
}

absl::Status LoadSampler(Front& front, const CallPtr& call,
                         const Sampler& sampler, const CheckpointInfo& info,
                         const Respond& respond) {
  const auto finish = [&front, sampler, respond](const absl::Status& loaded) {
    const absl::Status kept = loaded.ok() ? Keep(front, sampler) : loaded;
    if (!kept.ok()) return respond(ErrorReply(kept));
    RespondSampler(sampler, respond);
  };
  if (IsUsed(front, sampler.adapter)) {
    finish(absl::OkStatus());
    return absl::OkStatus();
  }
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(sampler.adapter);
  request.set_source_adapter_id(info.adapter_id);
  request.set_name(info.name);
  request.set_weights_only(true);
  return front.port.Call<StepReply<AdapterInfo>>(
      call->origin(), Rpc::kLoadCheckpoint, request,
      [](Engine& engine, LoadCheckpointRequest plain, auto then) {
        engine.LoadCheckpoint(std::move(plain), std::move(then));
      },
      [finish](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        finish(reply.status());
      });
}

absl::Status CreateFromPath(Front& front, const CallPtr& call, Sampler sampler,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path));
  return FindCheckpoint(
      front, call, path,
      [&front, call, sampler,
       respond](const absl::StatusOr<CheckpointInfo>& info) mutable {
        if (!info.ok()) return respond(ErrorReply(info.status()));
        sampler.adapter = AdapterOfCheckpoint(*info);
        const absl::Status refused =
            LoadSampler(front, call, sampler, *info, respond);
        if (!refused.ok()) respond(ErrorReply(refused));
      });
}

void DeleteSamplerAdapter(Front& front, const Caller& caller,
                          const std::string& adapter) {
  v1::DeleteAdapterRequest request;
  request.set_adapter_id(adapter);
  const absl::Status deleted = front.port.Call<bool>(
      {.caller = caller}, Rpc::kDeleteAdapter, request,
      [](Engine& engine, std::string id, auto then) {
        engine.DeleteAdapter(std::move(id), std::move(then));
      },
      [](const absl::StatusOr<bool>& /*result*/) {});
  if (deleted.ok() || absl::IsNotFound(deleted)) return;
  Log(LogLevel::kWarning, "the adapter of an ended sampling session stays",
      {{"adapter", adapter}, {"error", std::string(deleted.message())}});
}

}  // namespace

absl::Status PublishSampler(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(call->body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const Model* const model, front.FindModel(*call, id));
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntField(call->body, "seq_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        IntField(call->body, "sampling_session_seq_id"));
  WEFT_ASSIGN_OR_RETURN(const std::string kind,
                        StringOr(call->body, "kind", "snapshot"));
  const Sampler sampler{.id = SamplerId(model->session, number),
                        .owner = model->owner,
                        .session = model->session,
                        .adapter = model->adapter,
                        .snapshot = absl::StrCat("sample-", number)};
  return PromiseStep(
      front, call, id, seq,
      [&front, call, sampler, kind](uint64_t step,
                                    const Done& done) -> absl::Status {
        if (kind != "snapshot") {
          return absl::UnimplementedError(
              absl::StrCat("kind ", Quoted(kind),
                           " is not offered: use snapshot, which takes no "
                           "longer"));
        }
        return StartPublish(front, call, sampler, step, done);
      },
      respond);
}

absl::Status CreateSampler(Front& front, const CallPtr& call,
                           const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string session,
                        StringField(call->body, "session_id"));
  WEFT_RETURN_IF_ERROR(front.FindSession(*call, session).status());
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        IntField(call->body, "sampling_session_seq_id"));
  Sampler sampler{.id = SamplerId(session, number),
                  .owner = call->owner(),
                  .session = session};
  if (front.samplers.contains(sampler.id)) {
    RespondSampler(sampler, respond);
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(sampler.model_path,
                        StringOr(call->body, "model_path", ""));
  if (!sampler.model_path.empty()) {
    return CreateFromPath(front, call, std::move(sampler), respond);
  }
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        StringField(call->body, "base_model"));
  WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
  WEFT_RETURN_IF_ERROR(Keep(front, sampler));
  RespondSampler(sampler, respond);
  return absl::OkStatus();
}

absl::Status GetSampler(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler* const sampler,
                        front.FindSampler(*call, call->args[0]));
  Json reply = {{"sampler_id", sampler->id},
                {"base_model", front.model_name()}};
  if (!sampler->model_path.empty()) reply["model_path"] = sampler->model_path;
  respond(JsonReply(reply));
  return absl::OkStatus();
}

void DropSamplersOf(Front& front, const std::string& session) {
  std::vector<Sampler> gone;
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.session == session) gone.push_back(sampler);
  }
  for (const Sampler& sampler : gone) {
    front.ledger.Erase(EntryKind::kSampler, sampler.id);
    front.samplers.erase(sampler.id);
    if (sampler.model_path.empty() || IsUsed(front, sampler.adapter)) continue;
    DeleteSamplerAdapter(front, front.CallerOf(session), sampler.adapter);
  }
}

void RestoreSamplers(Front& front) {
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kSampler)) {
    Sampler sampler{.id = entry.id,
                    .session = entry.fields.value("session", ""),
                    .adapter = entry.fields.value("adapter", ""),
                    .snapshot = entry.fields.value("snapshot", ""),
                    .model_path = entry.fields.value("model_path", "")};
    sampler.owner = OwnerKey(front.CallerOf(sampler.session));
    front.samplers.emplace(entry.id, std::move(sampler));
  }
}

}  // namespace weft::tinker
