#include "server/tinker/sessions.h"

#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/tinker/custom_losses.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sampling.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

void EndSession(Front& front, const std::string& id) {
  UnloadModelsOf(front, id);
  if (const auto found = front.sessions.find(id);
      found != front.sessions.end()) {
    CancelSamplesOf(front, found->second.owner, id);
  }
  DropSamplersOf(front, id);
  DropLossesOf(front, id);
  front.ledger.Erase(EntryKind::kSession, id);
  front.sessions.erase(id);
}

void RespondSession(const std::string& id, const Respond& respond) {
  respond(JsonReply({{"type", "create_session"}, {"session_id", id}}));
}

// Returns the owner's session that a request with this key made; nullptr if
// there is none, or if the key is empty.
const Session* FindByKey(const Front& front, const std::string& owner,
                         const std::string& key) {
  if (key.empty()) return nullptr;
  for (const auto& [id, session] : front.sessions) {
    if (session.key == key && session.owner == owner) return &session;
  }
  return nullptr;
}

// Reads what the session shows, and charges its owner.
absl::Status ReadShown(const Front& front, const Json& body, Session* session) {
  WEFT_ASSIGN_OR_RETURN(session->user_metadata,
                        ShownField(body, "user_metadata"));
  WEFT_ASSIGN_OR_RETURN(session->display_name,
                        ShownField(body, "display_name"));
  WEFT_ASSIGN_OR_RETURN(
      session->charge,
      front.ChargeEntry(session->owner, session->key.size() +
                                            session->user_metadata.size() +
                                            session->display_name.size()));
  return absl::OkStatus();
}

// Returns the fields that ReadShown has read.
Json ShownBy(const Session& session) {
  Json shown = Json::object();
  if (!session.user_metadata.empty()) {
    shown["user_metadata"] = Shown(session.user_metadata);
  }
  if (!session.display_name.empty()) {
    shown["display_name"] = Shown(session.display_name);
  }
  return shown;
}

// Writes the session to the ledger. `done` gets the outcome after the write.
void KeepSession(Front& front, const Session& session,
                 std::function<void(const absl::Status&)> done) {
  front.ledger.Put(
      EntryKind::kSession,
      {.id = session.id,
       .fields = {{"caller", CallerToJson(session.caller)},
                  {"key", session.key},
                  {"created_at", absl::ToUnixMicros(session.created_at)},
                  {"request", ShownBy(session)}},
       .bytes = ""},
      std::move(done));
}

// Returns PERMISSION_DENIED if the session has models or sampling sessions that
// this caller's token could not have made. Another caller of the tenant may
// have made them.
absl::Status CheckEnd(const Front& front, const Call& call,
                      const std::string& id) {
  const auto belongs = [&id](const auto& entry) {
    return entry.second.session == id;
  };
  if (call.may_delete) return absl::OkStatus();
  if (std::ranges::any_of(front.models, belongs)) {
    return absl::PermissionDeniedError(
        "the session has models, which its end deletes: the token lacks the "
        "scope train");
  }
  if (!call.may_sample && std::ranges::any_of(front.samplers, belongs)) {
    return absl::PermissionDeniedError(
        "the session has sampling sessions, which its end ends: the token "
        "lacks the scope sample");
  }
  return absl::OkStatus();
}

// Makes room for one more session of the caller's owner. If the owner has
// kMaxSessions sessions, ends the session that has been silent for longest,
// among those that the caller may end. Errors: RESOURCE_EXHAUSTED if the caller
// may end no session that has been silent for kSilence.
absl::Status MakeRoom(Front& front, const Call& call, absl::Time now) {
  size_t count = 0;
  std::vector<const Session*> silent;
  for (const auto& [id, session] : front.sessions) {
    if (session.owner != call.owner()) continue;
    ++count;
    if (now - session.last_beat >= kSilence) silent.push_back(&session);
  }
  if (count < kMaxSessions) return absl::OkStatus();
  std::ranges::sort(silent, {}, &Session::last_beat);
  const auto oldest = std::ranges::find_if(silent, [&](const Session* session) {
    return CheckEnd(front, call, session->id).ok();
  });
  if (oldest == silent.end()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", count, " sessions: finish some first"));
  }
  EndSession(front, std::string((*oldest)->id));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> NewId() {
  unsigned char bytes[16];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) {
    return absl::InternalError("no randomness for an id");
  }
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes), sizeof(bytes)));
}

absl::Status GetHealth(Front& front, const CallPtr& /*call*/,
                       const Respond& respond) {
  WEFT_RETURN_IF_ERROR(front.port.engine().status());
  respond(JsonReply({{"status", "ok"}}));
  return absl::OkStatus();
}

absl::Status GetClientConfig(Front& front, const CallPtr& /*call*/,
                             const Respond& respond) {
  const ServerOptions& options = front.port.core()->options;
  respond(JsonReply(
      {{"pjwt_auth_enabled", true},
       {"credential_default_source", "api_key"},
       {"parallel_fwdbwd_chunks", true},
       {"proto_compress_fwdbwd", false},
       {"fwdbwd_max_chunk_len", std::min(1024, options.max_data_per_request)},
       {"fwdbwd_max_chunk_bytes_count",
        std::min<int64_t>(5'000'000, options.max_message_bytes / 2)},
       {"sample_use_retrieve_futures", false},
       {"custom_loss_server_side", true},
       {"sample_join_sampling_session", false}}));
  return absl::OkStatus();
}

absl::Status GetDynamicConfig(Front& /*front*/, const CallPtr& /*call*/,
                              const Respond& respond) {
  respond(JsonReply({{"refresh_interval_sec", 300},
                     {"sample_cancel_enabled", true},
                     {"sample_cancel_max_batch_size", 64}}));
  return absl::OkStatus();
}

absl::Status GetCapabilities(Front& front, const CallPtr& /*call*/,
                             const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Engine* const engine, front.port.engine());
  Json models = Json::array();
  for (const std::string& name : front.model_names()) {
    models.push_back({{"model_name", name},
                      {"max_context_length", engine->info().context_length},
                      {"trainable", true},
                      {"sampleable", true}});
  }
  respond(JsonReply({{"supported_models", models}}));
  return absl::OkStatus();
}

absl::Status TakeTelemetry(Front& /*front*/, const CallPtr& /*call*/,
                           const Respond& respond) {
  respond(JsonReply({{"status", "accepted"}}));
  return absl::OkStatus();
}

absl::Status CreateSession(Front& front, const CallPtr& call,
                           const Respond& respond) {
  const std::string& key = call->http.idempotency_key;
  const Session* const earlier = FindByKey(front, call->owner(), key);
  if (earlier != nullptr) {
    RespondSession(earlier->id, respond);
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const std::string id, NewId());
  const std::string making =
      absl::StrCat(call->owner(), " ", key.empty() ? id : key);
  const auto waiting = front.making_sessions.find(making);
  if (waiting != front.making_sessions.end()) {
    waiting->second.push_back(respond);
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(MakeRoom(front, *call, SteadyNow()));
  Session session{
      .id = id,
      .caller = call->caller,
      .owner = call->owner(),
      .key = key,
      .last_beat = SteadyNow(),
      .created_at = absl::FromUnixMicros(absl::ToUnixMicros(absl::Now()))};
  WEFT_RETURN_IF_ERROR(ReadShown(front, call->body, &session));
  front.making_sessions[making].push_back(respond);
  KeepSession(front, session,
              [&front, session, making](const absl::Status& kept) {
                if (kept.ok()) front.sessions.emplace(session.id, session);
                const auto askers = front.making_sessions.extract(making);
                for (const Respond& asker : askers.mapped()) {
                  kept.ok() ? RespondSession(session.id, asker)
                            : asker(ErrorReply(kept));
                }
              });
  return absl::OkStatus();
}

absl::Status BeatSession(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(call->body, "session_id"));
  const auto session = front.FindSession(*call, id);
  if (!session.ok()) return absl::AbortedError("the session has ended");
  (*session)->last_beat = SteadyNow();
  respond(JsonReply({{"type", "session_heartbeat"}}));
  return absl::OkStatus();
}

absl::Status FinishSession(Front& front, const CallPtr& call,
                           const Respond& respond) {
  const std::string& id = call->args[0];
  // A session that has already ended is no error.
  if (front.FindSession(*call, id).ok()) {
    WEFT_RETURN_IF_ERROR(CheckEnd(front, *call, id));
    EndSession(front, id);
  }
  respond(JsonReply(Json::object()));
  return absl::OkStatus();
}

absl::Status ListSessions(Front& front, const CallPtr& call,
                          const Respond& respond) {
  Json all = Json::array();
  for (const auto& [id, session] : front.sessions) {
    if (session.owner == call->owner()) all.push_back(id);
  }
  WEFT_ASSIGN_OR_RETURN(const Json page, PageJson(*call, "sessions", all));
  respond(JsonReply(page));
  return absl::OkStatus();
}

absl::Status RefuseProject(Front& /*front*/, const CallPtr& /*call*/,
                           const Respond& /*respond*/) {
  return NoProjects("project_id");
}

absl::Status RefuseTrace(Front& /*front*/, const CallPtr& /*call*/,
                         const Respond& /*respond*/) {
  return absl::UnimplementedError(
      "a session has no trace of its own: `weftctl profile --time 10s -o "
      "trace.json`, with a token of scope admin, records what the engine does "
      "for all sessions, and https://ui.perfetto.dev shows it");
}

absl::Status GetSession(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Session* const session,
                        front.FindSession(*call, call->args[0]));
  Json models = Json::array();
  for (const auto& [id, model] : front.models) {
    if (model.session == session->id) models.push_back(id);
  }
  Json samplers = Json::array();
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.session == session->id) samplers.push_back(id);
  }
  Json reply = ShownBy(*session);
  reply["training_run_ids"] = models;
  reply["sampler_ids"] = samplers;
  respond(JsonReply(reply));
  return absl::OkStatus();
}

void SweepSessions(Front& front, absl::Time now) {
  std::vector<std::string> over;
  for (const auto& [id, session] : front.sessions) {
    if (now - session.last_beat > kSessionTimeout) over.push_back(id);
  }
  for (const std::string& id : over) EndSession(front, id);
}

void RestoreSessions(Front& front, absl::Time now) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kSession)) {
    const Caller caller = CallerFromJson(entry.fields["caller"]);
    Session session{.id = entry.id,
                    .caller = caller,
                    .owner = OwnerKey(caller),
                    .key = entry.fields.value("key", ""),
                    .last_beat = now,
                    .created_at = absl::FromUnixMicros(
                        entry.fields.value("created_at", int64_t{0}))};
    // A session is kept even if its tenant is over its share by now.
    ReadShown(front, entry.fields.value("request", Json::object()), &session)
        .IgnoreError();
    front.sessions.emplace(entry.id, std::move(session));
  }
}

}  // namespace weft::tinker
