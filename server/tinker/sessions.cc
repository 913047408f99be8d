#include "server/tinker/sessions.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/http/replies.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/ledger.h"
#include "server/tinker/logs.h"
#include "server/tinker/training.h"
#include "server/tinker/wire/fields.h"
#include "server/wire/field_checks.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

void EndSession(Front& front, const std::string& id) {
  UnloadModelsOf(front, id);
  CancelSamples(front, absl::StrCat(id, ":"));
  DropSamplersOf(front, id);
  DropLossesOf(front, id);
  front.ledger.Erase(EntryKind::kSession, id);
  front.sessions.Take(id);
}

// Returns whether the session is on its way to another log, where alone it may
// end.
bool IsHeld(const Front& front, const std::string& id) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  return engine != nullptr && !engine->CheckHeld(id).ok();
}

Json MadeSession(const std::string& id) {
  return {{"type", "create_session"}, {"session_id", id}};
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
      front.ledger.Charge(session->owner, session->key.size() +
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
                  {"request", ShownBy(session)}}},
      std::move(done));
}

// Returns PERMISSION_DENIED if the session has models or sampling sessions that
// this caller's token could not have made. Another caller of the tenant may
// have made them.
absl::Status CheckEnd(const Front& front, const Call& call,
                      const std::string& id) {
  if (front.Permits(call, Rpc::kDeleteAdapter)) return absl::OkStatus();
  if (!front.models.OfSession(id).empty()) {
    return absl::PermissionDeniedError(
        "the session has models, which its end deletes: the token lacks the "
        "scope train");
  }
  if (!front.Permits(call, Rpc::kSample) &&
      !front.samplers.OfSession(id).empty()) {
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
    if (now - session.last_beat >= kSilence && !IsHeld(front, id)) {
      silent.push_back(&session);
    }
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

absl::StatusOr<Json> GetHealth(Front& front, const Call& /*call*/) {
  WEFT_RETURN_IF_ERROR(front.port.engine().status());
  return Json{{"status", "ok"}};
}

absl::StatusOr<Json> GetClientConfig(Front& front, const Call& /*call*/) {
  const ServerOptions& options = front.port.core()->options;
  return Json{
      {"pjwt_auth_enabled", true},
      {"credential_default_source", "api_key"},
      {"parallel_fwdbwd_chunks", true},
      {"proto_compress_fwdbwd", false},
      {"fwdbwd_max_chunk_len", std::min(1024, options.max_data_per_request)},
      {"fwdbwd_max_chunk_bytes_count",
       std::min<int64_t>(5'000'000, options.max_message_bytes / 2)},
      {"sample_use_retrieve_futures", false},
      {"custom_loss_server_side", true},
      {"sample_join_sampling_session", false}};
}

absl::StatusOr<Json> GetDynamicConfig(Front& /*front*/, const Call& /*call*/) {
  return Json{{"refresh_interval_sec", 300},
              {"sample_cancel_enabled", true},
              {"sample_cancel_max_batch_size", 64}};
}

absl::StatusOr<Json> GetCapabilities(Front& front, const Call& /*call*/) {
  WEFT_ASSIGN_OR_RETURN(const engine::Engine* const engine,
                        front.port.engine());
  Json models = Json::array();
  for (const std::string& name : front.model_names()) {
    models.push_back({{"model_name", name},
                      {"max_context_length", engine->info().context_length},
                      {"trainable", true},
                      {"sampleable", true}});
  }
  return Json{{"supported_models", models}};
}

absl::StatusOr<Json> TakeTelemetry(Front& /*front*/, const Call& /*call*/) {
  return Json{{"status", "accepted"}};
}

bool IsSessionId(absl::string_view id) {
  constexpr size_t kLength = 32;
  return id.size() == kLength && std::ranges::all_of(id, [](unsigned char c) {
           return absl::ascii_isalnum(c);
         });
}

absl::Status CreateSession(Front& front, const CallPtr& call,
                           const Respond& respond) {
  const std::string& key = call->http.idempotency_key;
  const Session* const earlier = FindByKey(front, call->owner(), key);
  if (earlier != nullptr) {
    respond(JsonReply(MadeSession(earlier->id)));
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const std::string id, NewSessionId(front));
  const std::string making =
      absl::StrCat("session ", call->owner(), " ", key.empty() ? id : key);
  // All requests with one key get the session that the first one made.
  const auto end = [&front, call, id, respond](const absl::Status& kept) {
    if (!kept.ok()) return Fail(respond, kept);
    const Session* const made =
        FindByKey(front, call->owner(), call->http.idempotency_key);
    respond(JsonReply(MadeSession(made == nullptr ? id : made->id)));
  };
  if (front.writes.Join(making, end)) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(MakeRoom(front, *call, SteadyNow()));
  Session session{
      .id = id,
      .caller = call->caller,
      .owner = call->owner(),
      .key = key,
      .last_beat = SteadyNow(),
      .created_at = absl::FromUnixMicros(absl::ToUnixMicros(absl::Now()))};
  WEFT_RETURN_IF_ERROR(ReadShown(front, call->body, &session));
  front.writes.Begin(making, end);
  KeepSession(front, session,
              [&front, session, making](const absl::Status& kept) {
                if (kept.ok()) {
                  front.sessions.Add(session.id, session);
                  SyncSession(front, session.id);  // Notes its version.
                }
                front.writes.End(making, kept);
              });
  return absl::OkStatus();
}

absl::StatusOr<Json> BeatSession(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, Text(call.body, "session_id"));
  const auto session = front.sessions.FindOf(call.owner(), id);
  if (!session.ok()) return absl::AbortedError("the session has ended");
  (*session)->last_beat = SteadyNow();
  return Json{{"type", "session_heartbeat"}};
}

absl::StatusOr<Json> FinishSession(Front& front, const Call& call) {
  const std::string& id = call.args[0];
  // A session that has already ended is no error.
  if (front.sessions.FindOf(call.owner(), id).ok()) {
    WEFT_RETURN_IF_ERROR(CheckEnd(front, call, id));
    EndSession(front, id);
  }
  return Json::object();
}

absl::StatusOr<Json> ListSessions(Front& front, const Call& call) {
  SyncSessions(front);
  const Json all = front.sessions.Where(
      [&](const Session& session) { return session.owner == call.owner(); });
  return PageJson(call, "sessions", all);
}

absl::StatusOr<Json> GetSession(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const Session* const session,
                        front.sessions.FindOf(call.owner(), call.args[0]));
  Json reply = ShownBy(*session);
  reply["training_run_ids"] = front.models.OfSession(session->id);
  reply["sampler_ids"] = front.samplers.OfSession(session->id);
  return reply;
}

void SweepSessions(Front& front, absl::Time now) {
  SyncSessions(front);
  const auto is_over = [&front, now](const Session& session) {
    return now - session.last_beat > kSessionTimeout &&
           !IsHeld(front, session.id);
  };
  for (const std::string& id : front.sessions.Where(is_over)) {
    EndSession(front, id);
  }
}

void LeaveSession(Front& front, const std::string& id) {
  front.futures.DropOpen(absl::StrCat(id, ":"));
  CancelSamples(front, absl::StrCat(id, ":"));
  for (const std::string& model : front.models.OfSession(id)) {
    front.models.Take(model);
  }
  for (const std::string& sampler : front.samplers.OfSession(id)) {
    front.samplers.Take(sampler);
  }
  for (const std::string& loss : front.losses.OfSession(id)) {
    front.losses.Take(loss);
  }
  front.sessions.Take(id);
}

void RestoreSessions(Front& front, absl::Time now, const std::string& only) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kSession, only)) {
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
    front.sessions.Add(entry.id, std::move(session));
  }
}

namespace {

constexpr int64_t kMaxPage = 200;

// A session's place in the order of the results.
using Place = std::pair<absl::Time, std::string>;

struct Search {
  std::string session_id;
  std::vector<std::string> words;  // Of the name, in lower case.
  Json user_metadata;
  bool active = true;  // Whether sessions that have not ended match.
  int64_t limit = 50;
  std::optional<Place> before;
};

absl::StatusOr<Search> ReadSearch(const Json& body) {
  if (AsksFor(body, "project_ids")) return NoProjects("project_ids");
  Search search;
  if (Find(body, "owner") != nullptr) {
    WEFT_ASSIGN_OR_RETURN(const Json* const owner, Object(body, "owner"));
    WEFT_ASSIGN_OR_RETURN(const std::string type, Text(*owner, "type", "own"));
    if (type != "own" && type != "accessible") {
      return absl::UnimplementedError(absl::StrCat(
          "owner of type ", Quoted(type),
          " is not offered: a token finds the sessions of its own tenant. "
          "Leave it out"));
    }
  }
  WEFT_ASSIGN_OR_RETURN(search.session_id, Text(body, "session_id", ""));
  WEFT_ASSIGN_OR_RETURN(const std::string name, Text(body, "display_name", ""));
  search.words =
      absl::StrSplit(absl::AsciiStrToLower(name), ' ', absl::SkipWhitespace());
  search.user_metadata = body.value("user_metadata", Json::object());
  if (!search.user_metadata.is_object()) {
    return BadField("user_metadata", "must be an object");
  }
  if (Find(body, "statuses") != nullptr) {
    WEFT_ASSIGN_OR_RETURN(const Json* const statuses,
                          List(body, "statuses", "statuses"));
    search.active = false;
    for (const Json& status : *statuses) {
      if (!status.is_object()) return BadField("statuses", "must have objects");
      WEFT_ASSIGN_OR_RETURN(const std::string type, Text(status, "type"));
      search.active |= type == "active";
    }
  }
  WEFT_ASSIGN_OR_RETURN(search.limit, Int(body, "limit", search.limit));
  WEFT_RETURN_IF_ERROR(CheckReal("limit", static_cast<double>(search.limit),
                                 {.low = 1, .high = kMaxPage}));
  if (Find(body, "cursor") == nullptr) return search;
  WEFT_ASSIGN_OR_RETURN(const Json* const cursor, Object(body, "cursor"));
  WEFT_ASSIGN_OR_RETURN(const std::string at, Text(*cursor, "last_created_at"));
  WEFT_ASSIGN_OR_RETURN(const std::string id, Text(*cursor, "last_session_id"));
  absl::Time time;
  if (!absl::ParseTime(absl::RFC3339_full, at, &time, nullptr)) {
    return BadField("cursor.last_created_at",
                    "must be the time of an earlier page");
  }
  search.before = Place(time, id);
  return search;
}

bool NameMatches(const Search& search, const Session& session) {
  const Json shown = Shown(session.display_name);
  const std::string name =
      shown.is_string() ? absl::AsciiStrToLower(shown.get<std::string>()) : "";
  return std::ranges::all_of(search.words, [&name](const std::string& word) {
    return absl::StrContains(name, word);
  });
}

bool SessionMatches(const Search& search, const Session& session) {
  const bool by_id = session.id == search.session_id;
  const bool any_id = search.session_id.empty();
  // With both an id and a name, one of the two is enough.
  const bool found = search.words.empty()
                         ? any_id || by_id
                         : (!any_id && by_id) || NameMatches(search, session);
  if (!found || !search.active) return false;
  if (search.user_metadata.empty()) return true;
  const Json metadata = Shown(session.user_metadata);
  for (const auto& [name, value] : search.user_metadata.items()) {
    const auto has = metadata.find(name);  // The end if it is no object.
    if (has == metadata.end() || *has != value) return false;
  }
  return true;
}

Place PlaceOf(const Session& session) {
  return {session.created_at, session.id};
}

Json SummaryOf(const Session& session, const Checkpoints& checkpoints) {
  const std::string models =
      AdapterOfModel(absl::StrCat(session.id, ":train:"));
  int64_t count = 0;
  int64_t bytes = 0;
  for (const CheckpointInfo& info : checkpoints) {
    if (!absl::StartsWith(info.adapter_id, models)) continue;
    ++count;
    bytes += static_cast<int64_t>(info.size_bytes);
  }
  Json out = {{"session_id", session.id},
              {"created_at", TimeText(session.created_at)},
              {"owner", session.owner},
              {"project_id", ""},
              {"status", {{"type", "active"}}},
              {"checkpoints_count", count},
              {"checkpoint_storage_bytes", bytes}};
  if (!session.display_name.empty()) {
    out["display_name"] = Shown(session.display_name);
  }
  ShowMetadata(session.user_metadata, &out);
  return out;
}

// Returns the sessions of the page, and one more if there are more.
std::vector<const Session*> FindPage(const Front& front, const Call& call,
                                     const Search& search) {
  std::vector<const Session*> found;
  for (const auto& [id, session] : front.sessions) {
    if (session.owner == call.owner() && SessionMatches(search, session) &&
        (!search.before || PlaceOf(session) < *search.before)) {
      found.push_back(&session);
    }
  }
  std::ranges::sort(found, [](const Session* a, const Session* b) {
    return PlaceOf(*b) < PlaceOf(*a);
  });
  found.resize(std::min(found.size(), static_cast<size_t>(search.limit) + 1));
  return found;
}

}  // namespace

absl::Status SearchSessions(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Search search, ReadSearch(call->body));
  return ListCheckpoints(
      front, call, "",
      ReplyWith(respond, [&front, call, search](const Checkpoints& listed) {
        SyncSessions(front);
        const auto found = FindPage(front, *call, search);
        const auto size =
            std::min(found.size(), static_cast<size_t>(search.limit));
        Json sessions = Json::array();
        for (size_t i = 0; i < size; ++i) {
          sessions.push_back(SummaryOf(*found[i], listed));
        }
        Json reply = {{"sessions", sessions}};
        if (found.size() > size) {
          reply["next_cursor"] = {
              {"last_created_at", TimeText(found[size - 1]->created_at)},
              {"last_session_id", found[size - 1]->id}};
        }
        return reply;
      }));
}

}  // namespace weft::server::tinker
