#include "server/tinker/ledger.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/routes.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/training.h"
#include "server/wire/status_conversion.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"

namespace weft::server::tinker {
namespace {

constexpr const char* kKindNames[] = {"session", "model", "sampler", "orphan",
                                      "step",    "loss",  "usage",   "event"};

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

void Ledger::EraseSteps(const std::string& model) const {
  if (!keeps()) return;
  const std::string prefix = NameOf(EntryKind::kStep, absl::StrCat(model, ":"));
  for (const auto& [name, value] : engine().NotesWith(prefix)) {
    engine().EraseNote(name);
  }
}

absl::StatusOr<std::shared_ptr<void>> Ledger::Charge(const std::string& owner,
                                                     size_t text_bytes) const {
  return port_.core()->memory->Reserve(
      owner, kEntryBytes + static_cast<int64_t>(text_bytes));
}

std::vector<LedgerEntry> Ledger::ReadAll(EntryKind kind) const {
  std::vector<LedgerEntry> entries;
  for (const auto& [name, value] : engine().NotesWith(NameOf(kind, ""))) {
    std::optional<LedgerEntry> entry = Parse(name, *value);
    if (entry) entries.push_back(*std::move(entry));
  }
  return entries;
}

std::vector<std::string> Ledger::StepIds() const {
  std::multimap<int64_t, std::string> ids;
  const std::string prefix = NameOf(EntryKind::kStep, "");
  for (const auto& [name, value] : engine().NotesWith(prefix)) {
    int64_t seq = 0;
    if (absl::SimpleAtoi(name.substr(name.rfind(':') + 1), &seq)) {
      ids.emplace(seq, name.substr(prefix.size()));
    }
  }
  std::vector<std::string> sorted;
  for (auto& [seq, id] : ids) sorted.push_back(std::move(id));
  return sorted;
}

std::optional<LedgerEntry> Ledger::ReadStep(const std::string& id) const {
  const std::string name = NameOf(EntryKind::kStep, id);
  const Notes notes = engine().NotesWith(name);
  const auto note = notes.find(name);
  return note == notes.end() ? std::nullopt : Parse(name, *note->second);
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

// The pause before the next try if a step is refused, or if an adapter is not
// restored yet.
constexpr absl::Duration kPause = absl::Milliseconds(200);

// Sets Model::made if there is an adapter. Returns false if the adapter is not
// restored yet.
bool PlaceLine(Front& front, Model& model) {
  const absl::Status asked = GetAdapterOf(
      front, {.caller = model.caller}, model.adapter,
      [&front, id = model.id](const absl::StatusOr<AdapterInfo>& info) {
        Model* const found = front.models.Find(id);
        if (info.ok() && found != nullptr) found->made = true;
      });
  // If the process ended before the adapter was made, there is no adapter.
  if (asked.ok() || absl::IsNotFound(asked)) return true;
  if (absl::IsUnavailable(asked) || RetryMillis(asked)) return false;
  Log(LogLevel::kWarning, "a model's place is not known",
      {{"model", model.id}, {"error", std::string(asked.message())}});
  return true;
}

CallPtr CallOf(LedgerEntry entry) {
  auto call = std::make_shared<Call>();
  call->http.method = "POST";
  call->http.target = entry.fields.value("target", "");
  call->http.content_type = entry.fields.value("content_type", "");
  call->http.body = std::move(entry.bytes);
  call->caller = CallerFromJson(entry.fields["caller"]);
  call->kept = true;
  return call;
}

// Has a step fail in its turn with `status`, so that the steps after it run.
void FailInTurn(Front& front, const LedgerEntry& entry, const Call& call,
                const absl::Status& status) {
  Log(LogLevel::kWarning, "an accepted step cannot run again",
      {{"step", entry.id}, {"error", std::string(status.message())}});
  if (!front.futures.Open(entry.id, call.owner(), Scope::kTrain)) return;
  EnterStep(
      front, entry.fields.value("model", ""),
      entry.fields.value("seq", int64_t{0}),
      {.future = entry.id,
       .origin = call.origin(),
       .rpc = Rpc::kForwardBackward,
       .task = [status](const CallOrigin&, const Callback<FutureResult>&) {
         return status;
       }});
}

// Runs the request of a step again. Returns an error only if the request may
// succeed later. Erases a request whose model is gone.
absl::Status RunStep(Front& front, const std::string& id) {
  std::optional<LedgerEntry> entry = front.ledger.ReadStep(id);
  if (!entry) return absl::OkStatus();
  if (!front.models.Has(entry->fields.value("model", ""))) {
    front.ledger.Erase(EntryKind::kStep, id);
    return absl::OkStatus();
  }
  const CallPtr call = CallOf(*entry);
  const absl::Status run = ServeAgain(front, call);
  if (run.ok() || RetryMillis(run).has_value()) return run;
  FailInTurn(front, *entry, *call, run);
  return absl::OkStatus();
}

// Runs the requests of steps in order, one at a time, so that few are in memory
// twice. After an error, goes on later.
void RunSteps(Front& front, std::vector<std::string> ids, size_t next) {
  for (; next < ids.size(); ++next) {
    if (RunStep(front, ids[next]).ok()) continue;
    return front.after(kPause, [&front, ids = std::move(ids), next] {
      RunSteps(front, ids, next);
    });
  }
  front.ready = true;
}

}  // namespace

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
  RunSteps(front, front.ledger.StepIds(), 0);
}

}  // namespace weft::server::tinker
