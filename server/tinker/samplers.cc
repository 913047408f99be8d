#include "server/tinker/samplers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/fields.h"
#include "server/tinker/loaded_adapters.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/step_output.h"
#include "server/tinker/steps.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

void RespondSampler(const std::string& id, const Respond& respond) {
  respond(JsonReply(
      {{"type", "create_sampling_session"}, {"sampling_session_id", id}}));
}

// Writes the sampler to the ledger, and then adds it to front.samplers. `done`
// gets ALREADY_EXISTS if an equal call has added the sampler meanwhile,
// NOT_FOUND if the session has ended meanwhile, or the error of the write.
void Keep(Front& front, const Sampler& sampler,
          const std::function<void(absl::Status)>& done) {
  front.ledger.Put(
      EntryKind::kSampler,
      {.id = sampler.id,
       .fields = {{"session", sampler.session},
                  {"adapter", sampler.adapter},
                  {"snapshot", sampler.snapshot},
                  {"in_flight", sampler.in_flight},
                  {"model_path", sampler.model_path}},
       .bytes = ""},
      [&front, sampler, done](absl::Status put) {
        if (put.ok() && !front.sessions.contains(sampler.session)) {
          front.ledger.Erase(EntryKind::kSampler, sampler.id);
          put = absl::NotFoundError("the session has ended");
        }
        if (!put.ok()) return done(put);
        const auto [entry, added] =
            front.samplers.try_emplace(sampler.id, sampler);
        TouchSampler(front, entry->second);
        done(added ? absl::OkStatus()
                   : absl::AlreadyExistsError("the session is there"));
      });
}

void KeepAndRespond(Front& front, const Sampler& sampler,
                    const Respond& respond,
                    const std::function<void()>& unused) {
  Keep(front, sampler,
       [id = sampler.id, respond, unused](const absl::Status& kept) {
         if (!kept.ok()) unused();
         if (!kept.ok() && !absl::IsAlreadyExists(kept)) {
           return respond(ErrorReply(kept));
         }
         RespondSampler(id, respond);
       });
}

void Forget(Front& front, const std::string& id) {
  front.ledger.Erase(EntryKind::kSampler, id);
  front.samplers.erase(id);
}

// Releases the sampler's snapshot. `end` gets OK also if there is none.
void Release(Front& front, const CallOrigin& origin, const Sampler& sampler,
             const std::function<void(const absl::Status&)>& end) {
  v1::ReleaseSnapshotRequest request;
  request.set_adapter_id(sampler.adapter);
  request.set_name(sampler.snapshot);
  const auto gone = [end](const absl::Status& released) {
    end(absl::IsNotFound(released) ? absl::OkStatus() : released);
  };
  const absl::Status refused = front.port.Call(
      origin, Rpc::kReleaseSnapshot, request, &Engine::ReleaseSnapshot,
      [gone](const absl::StatusOr<bool>& released) {
        gone(released.status());
      });
  if (!refused.ok()) gone(refused);
}

// If the adapter of `newest` has too many snapshots, releases the snapshot that
// was used least recently, and forgets its sampling session. If the release
// fails, the next publication tries again.
void ReleaseOldest(Front& front, const CallOrigin& origin,
                   const Sampler& newest) {
  const Sampler* oldest = nullptr;
  size_t count = 0;
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.adapter != newest.adapter || sampler.snapshot.empty()) continue;
    ++count;
    if (oldest == nullptr || sampler.used < oldest->used) oldest = &sampler;
  }
  if (count <= kMaxSnapshots) return;
  Release(front, origin, *oldest,
          [&front, id = oldest->id](const absl::Status& released) {
            if (released.ok()) Forget(front, id);
          });
}

// Begins to publish the snapshot. When the engine has published it, writes the
// sampler to the ledger, and then gives `done` the result.
absl::Status StartPublish(Front& front, const CallOrigin& origin,
                          const Sampler& sampler, int64_t seq,
                          const Callback<FutureResult>& done) {
  v1::PublishSnapshotRequest request;
  request.set_adapter_id(sampler.adapter);
  request.set_name(sampler.snapshot);
  request.set_step(static_cast<uint64_t>(seq));
  return front.port.Call(
      origin, Rpc::kPublishSnapshot, request, &Engine::PublishSnapshot,
      [&front, origin, sampler,
       done](const absl::StatusOr<StepReply<PublishedSnapshot>>& reply) {
        if (!reply.ok()) return done(reply.status());
        const FutureResult output =
            OutputOf(ModelOfAdapter(sampler.adapter), reply->result);
        Keep(front, sampler,
             [&front, origin, sampler, output, done](const absl::Status& kept) {
               if (!kept.ok() && !absl::IsAlreadyExists(kept)) {
                 return done(kept);
               }
               ReleaseOldest(front, origin, sampler);
               // If the release fails, ReleaseOldest tries again.
               if (sampler.in_flight) {
                 Release(front, origin, sampler, [](const absl::Status&) {});
               }
               done(output);
             });
      });
}

// Makes a sampling session from the checkpoint `sampler.model_path`.
absl::Status CreateFromPath(Front& front, const CallPtr& call, Sampler sampler,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path));
  return FindCheckpoint(
      front, call, path,
      [&front, call, sampler,
       respond](const absl::StatusOr<CheckpointInfo>& info) {
        if (!info.ok()) return respond(ErrorReply(info.status()));
        UseAdapter(front, call->origin(), *info,
                   [&front, call, sampler,
                    respond](const absl::StatusOr<std::string>& used) mutable {
                     if (!used.ok()) return respond(ErrorReply(used.status()));
                     sampler.adapter = *used;
                     KeepAndRespond(
                         front, sampler, respond, [&front, call, sampler] {
                           LeaveAdapter(front, call->caller, sampler.adapter);
                         });
                   });
      });
}

absl::Status CheckSamplerCount(const Front& front, const std::string& session) {
  const auto count =
      std::ranges::count_if(front.samplers, [&](const auto& entry) {
        return entry.second.session == session && entry.second.snapshot.empty();
      });
  if (count < kMaxSamplers) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the session has ", count, " sampling sessions, as many as it may"));
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
  Sampler sampler{.id = SamplerId(model->session, number),
                  .owner = model->owner,
                  .session = model->session,
                  .adapter = model->adapter,
                  .snapshot = SnapshotName(number),
                  .in_flight = kind == "inflight"};
  WEFT_ASSIGN_OR_RETURN(sampler.charge, front.ChargeEntry(sampler.owner, 0));
  return PromiseStep(
      front, call, Rpc::kPublishSnapshot, id, seq, /*bytes=*/0,
      [&front, origin = call->origin(), sampler, kind,
       seq](const Callback<FutureResult>& done) -> absl::Status {
        if (kind != "snapshot" && !sampler.in_flight) {
          return absl::UnimplementedError(
              absl::StrCat("kind ", Quoted(kind),
                           " is not offered: use snapshot or inflight"));
        }
        return StartPublish(front, origin, sampler, seq, done);
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
    RespondSampler(sampler.id, respond);
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_RETURN_IF_ERROR(CheckSamplerCount(front, session));
  WEFT_ASSIGN_OR_RETURN(sampler.model_path,
                        StringOr(call->body, "model_path", ""));
  WEFT_ASSIGN_OR_RETURN(
      sampler.charge,
      front.ChargeEntry(sampler.owner, sampler.model_path.size()));
  if (!sampler.model_path.empty()) {
    return CreateFromPath(front, call, std::move(sampler), respond);
  }
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        StringField(call->body, "base_model"));
  WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
  KeepAndRespond(front, sampler, respond, [] {});
  return absl::OkStatus();
}

absl::Status GetSampler(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler* const sampler,
                        front.FindSampler(*call, call->args[0]));
  Json reply = {{"sampler_id", sampler->id},
                {"base_model", front.model_name()}};
  if (!sampler->model_path.empty()) {
    WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                          ParseCheckpointPath(sampler->model_path));
    reply["model_path"] = sampler->model_path;
    reply["base_model"] = BaseModelOf(front, call->caller, path);
  }
  respond(JsonReply(reply));
  return absl::OkStatus();
}

void TouchSampler(Front& front, Sampler& sampler) {
  sampler.used = ++front.sampler_uses;
}

void DropSamplersOf(Front& front, const std::string& session) {
  std::vector<Sampler> gone;
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.session == session) gone.push_back(sampler);
  }
  for (const Sampler& sampler : gone) {
    Forget(front, sampler.id);
    if (sampler.model_path.empty()) continue;
    LeaveAdapter(front, front.CallerOf(session), sampler.adapter);
  }
}

void DropSnapshotsOf(Front& front, const Model& model) {
  std::vector<std::string> gone;
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.owner == model.owner && sampler.adapter == model.adapter) {
      gone.push_back(id);
    }
  }
  for (const std::string& id : gone) Forget(front, id);
}

void RestoreSamplers(Front& front) {
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kSampler)) {
    Sampler sampler{.id = entry.id,
                    .session = entry.fields.value("session", ""),
                    .adapter = entry.fields.value("adapter", ""),
                    .snapshot = entry.fields.value("snapshot", ""),
                    .in_flight = entry.fields.value("in_flight", false),
                    .model_path = entry.fields.value("model_path", "")};
    if (!front.sessions.contains(sampler.session)) {
      front.ledger.Erase(EntryKind::kSampler, entry.id);
      continue;
    }
    const Caller caller = front.CallerOf(sampler.session);
    sampler.owner = OwnerKey(caller);
    sampler.charge = front.ChargeEntry(sampler.owner, sampler.model_path.size())
                         .value_or(nullptr);
    if (!sampler.model_path.empty()) {
      HaveAdapter(front, caller, sampler.adapter);
    }
    front.samplers.emplace(entry.id, std::move(sampler));
  }
}

}  // namespace weft::tinker
