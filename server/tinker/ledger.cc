#include "server/tinker/ledger.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/training.h"
#include "server/tinker/wire/body.h"
#include "server/wire/status_conversion.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"

namespace weft::server::tinker {
namespace {

constexpr char kSigningSecret[] = "signing";

constexpr const char* kKindNames[] = {"session", "model",  "sampler",
                                      "orphan",  "making", "loss",
                                      "usage",   "event",  "secret"};

// The memory of an entry of a table besides its text: the entry's fields, its
// place in the table, and what the ledger remembers of it.
constexpr int64_t kEntryBytes = 1024;

std::string NameOf(EntryKind kind, absl::string_view id) {
  return absl::StrCat("tinker/", kKindNames[static_cast<size_t>(kind)], "/",
                      id);
}

std::string TextOf(const LedgerEntry& entry) {
  const Json head = {{"id", entry.id}, {"fields", entry.fields}};
  return absl::StrCat(head.dump(-1, ' ', false, Json::error_handler_t::replace),
                      "\n", entry.bytes);
}

// Parses a note: one line of JSON, then LedgerEntry::bytes. Logs a note that is
// something else.
std::optional<LedgerEntry> Parse(const std::string& name,
                                 absl::string_view text) {
  const size_t end = std::min(text.find('\n'), text.size());
  Json head = Json::parse(text.begin(), text.begin() + static_cast<long>(end),
                          /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (end == text.size() || !head.is_object() || !head["id"].is_string()) {
    Log(LogLevel::kError, "an entry of the Tinker front cannot be read",
        {{"note", name}});
    return std::nullopt;
  }
  return LedgerEntry{.id = head["id"].get<std::string>(),
                     .fields = std::move(head["fields"]),
                     .bytes = std::string(text.substr(end + 1))};
}

}  // namespace

void Ledger::Put(EntryKind kind, const LedgerEntry& entry,
                 std::function<void(absl::Status)> done) const {
  if (!keeps()) return done(absl::OkStatus());
  engine().PutNote(
      NameOf(kind, entry.id), TextOf(entry),
      [port = port_, done = std::move(done)](const absl::Status& put) {
        // The front may be gone by now.
        port.Post([done, put] { done(put); });
      });
}

void Ledger::Erase(EntryKind kind, const std::string& id) const {
  if (keeps()) engine().EraseNote(NameOf(kind, id));
}

absl::StatusOr<std::shared_ptr<void>> Ledger::Charge(const std::string& owner,
                                                     size_t text_bytes) const {
  return port_.core()->memory->Reserve(
      owner, kEntryBytes + static_cast<int64_t>(text_bytes));
}

std::vector<LedgerEntry> Ledger::ReadAll(EntryKind kind,
                                         const std::string& prefix) const {
  std::vector<LedgerEntry> entries;
  for (const auto& [name, value] : engine().NotesWith(NameOf(kind, prefix))) {
    std::optional<LedgerEntry> entry = Parse(name, *value);
    if (entry) entries.push_back(*std::move(entry));
  }
  return entries;
}

std::shared_ptr<const std::string> Ledger::Version(
    EntryKind kind, const std::string& id) const {
  const std::string name = NameOf(kind, id);
  const Notes notes = engine().NotesWith(name);
  const auto found = notes.find(name);
  return found == notes.end() ? nullptr : found->second;
}

std::vector<std::string> Ledger::Ids(EntryKind kind) const {
  const std::string prefix = NameOf(kind, "");
  std::vector<std::string> ids;
  for (const auto& [name, value] : engine().NotesWith(prefix)) {
    ids.push_back(name.substr(prefix.size()));
  }
  return ids;
}

Json CallerToJson(const Caller& caller) {
  return {{"token", caller.token_id()},
          {"tenant", caller.tenant()},
          {"admin", caller.sees_all()}};
}

Caller CallerFromJson(const Json& json) {
  if (!json.is_object() || json.value("tenant", "").empty()) return Caller();
  TokenEntry record{.id = json.value("token", ""),
                    .tenant = json.value("tenant", "")};
  record.scopes.insert(json.value("admin", false) ? Scope::kAdmin
                                                  : Scope::kTrain);
  return Caller(record);
}

namespace {

// The pause before the next try if a model cannot be made yet, or if an adapter
// is not restored yet.
constexpr absl::Duration kPause = absl::Milliseconds(200);

// Sets what the model's adapter says of it, if there is one, and then runs
// `then`. Returns false if the adapter is not restored yet.
bool PlaceLine(
    Front& front, Model& model, const std::function<void()>& then = [] {}) {
  const absl::Status asked = GetAdapterOf(
      front, {.caller = model.caller}, model.adapter,
      [&front, id = model.id, then](const absl::StatusOr<AdapterInfo>& info) {
        Model* const found = front.models.Find(id);
        if (!info.ok() || found == nullptr) return then();
        found->made = true;
        found->optimizer = TypeOf(info->optimizer);
        for (const std::string& name : info->snapshots) {
          KeepPublished(front, *found, name, [](const absl::Status&) {});
        }
        then();
      });
  if (asked.ok()) return true;
  // If the process ended before the adapter was made, there is no adapter.
  if (!absl::IsNotFound(asked)) {
    if (absl::IsUnavailable(asked) || RetryMillis(asked)) return false;
    Log(LogLevel::kWarning, "a model's place is not known",
        {{"model", model.id}, {"error", std::string(asked.message())}});
  }
  then();
  return true;
}

// Makes a model, as the request of the entry asks. Returns an error only if the
// request may succeed later. Erases a request whose model is gone.
absl::Status MakeAgain(Front& front, const LedgerEntry& entry) {
  if (!front.models.Has(entry.id)) {
    front.ledger.Erase(EntryKind::kMaking, entry.id);
    return absl::OkStatus();
  }
  const auto call = std::make_shared<Call>();
  call->caller = CallerFromJson(entry.fields.value("caller", Json()));
  call->body = ParseObject(entry.bytes).value_or(Json::object());
  call->kept = true;
  const auto make =
      entry.fields.value("loads", false) ? LoadWeights : CreateModel;
  const absl::Status made =
      make(front, call, [](const HttpReply& /*reply*/) {});
  return RetryMillis(made) ? made : absl::OkStatus();
}

// Makes models one after the other, and then runs `then`. After an error, goes
// on later.
void MakeModels(Front& front, std::vector<LedgerEntry> entries, size_t next,
                const std::function<void()>& then) {
  for (; next < entries.size(); ++next) {
    if (MakeAgain(front, entries[next]).ok()) continue;
    return front.after(kPause,
                       [&front, entries = std::move(entries), next, then] {
                         MakeModels(front, entries, next, then);
                       });
  }
  then();
}

// Asks for the adapters of these models of a session that has come. Then makes
// the models that are not made, and lets clients use the session.
void PlaceLines(Front& front, const std::string& session,
                std::vector<std::string> models) {
  const auto go_on = [&front, session](std::vector<std::string> left) {
    PlaceLines(front, session, std::move(left));
  };
  if (models.empty()) {
    return MakeModels(front, front.ledger.ReadAll(EntryKind::kMaking, session),
                      0, [&front, session] { front.arriving.erase(session); });
  }
  std::vector<std::string> left(models.begin(), models.end() - 1);
  Model* const model = front.models.Find(models.back());
  if (model == nullptr) return go_on(std::move(left));
  if (PlaceLine(front, *model, [go_on, left] { go_on(left); })) return;
  front.after(kPause, [go_on, models] { go_on(models); });
}

// Takes the secret that all logs of the state have, or gives them this one's.
void ShareSecret(Front& front, const std::string& secret,
                 const std::function<void()>& then) {
  const auto take = [&front, secret,
                     then](const absl::StatusOr<std::string>& shared) {
    if (shared.ok() && TakeSigningSecret(*shared)) return then();
    front.after(kPause,
                [&front, secret, then] { ShareSecret(front, secret, then); });
  };
  front.port.core()->engine.Peek()->Agree(
      kSigningSecret, secret,
      [port = front.port, take](const absl::StatusOr<std::string>& shared) {
        port.Post([take, shared] { take(shared); });
      });
}

}  // namespace

void RestoreSecret(Front& front, const std::function<void()>& then) {
  const std::vector<LedgerEntry> kept =
      front.ledger.ReadAll(EntryKind::kSecret);
  const bool taken = !kept.empty() && TakeSigningSecret(kept.front().bytes);
  const absl::StatusOr<std::string> secret = SigningSecret();
  if (!secret.ok()) return then();  // Then signing fails, and says so.
  if (front.port.core()->engine.Peek()->info().num_logs > 1) {
    return ShareSecret(front, *secret, then);
  }
  if (!taken) {
    front.ledger.Put(
        EntryKind::kSecret,
        {.id = kSigningSecret, .fields = Json::object(), .bytes = *secret},
        [](const absl::Status&) {});
  }
  then();
}

void RestoreTables(Front& front) {
  RestoreSessions(front, SteadyNow());
  RestoreModels(front);
  RestoreSamplers(front);
  RestoreLosses(front);
  front.accounts.Restore();
  front.adapters.Restore();
  front.restored = true;
}

void RestoreSteps(Front& front) {
  for (auto& [id, model] : front.models) {
    if (PlaceLine(front, model)) continue;
    return front.after(kPause, [&front] { RestoreSteps(front); });
  }
  MakeModels(front, front.ledger.ReadAll(EntryKind::kMaking), 0, [&front] {
    AttachSteps(front);
    front.ready = true;
  });
}

void SyncSession(Front& front, const std::string& id) {
  // Only with the whole id the ledger finds one entry at most.
  if (!front.restored || !front.ledger.keeps() || !IsSessionId(id)) return;
  const auto kept = front.ledger.Version(EntryKind::kSession, id);
  Session* const session = front.sessions.Find(id);
  if (session != nullptr && session->version == nullptr) {
    session->version = kept;
  }
  const bool is_same = session == nullptr
                           ? kept == nullptr
                           : kept != nullptr && session->version == kept;
  if (is_same) return;
  if (session != nullptr) {
    Log(LogLevel::kInfo, "a session has gone to another log",
        {{"session", id}});
    LeaveSession(front, id);
  }
  if (kept == nullptr) return;
  Log(LogLevel::kInfo, "a session has come from another log",
      {{"session", id}});
  RestoreSessions(front, SteadyNow(), id);
  if (Session* const come = front.sessions.Find(id)) come->version = kept;
  RestoreModels(front, id);
  RestoreSamplers(front, id);
  RestoreLosses(front, id);
  front.arriving.insert(id);
  PlaceLines(front, id, front.models.OfSession(id));
}

void SyncSessions(Front& front) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  if (engine == nullptr || engine->info().num_logs == 1 || !front.restored) {
    return;
  }
  for (const std::string& id : front.ledger.Ids(EntryKind::kSession)) {
    SyncSession(front, id);
  }
  for (const std::string& id :
       front.sessions.Where([](const Session& /*session*/) { return true; })) {
    SyncSession(front, id);
  }
}

}  // namespace weft::server::tinker
