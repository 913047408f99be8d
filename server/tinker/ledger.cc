#include "server/tinker/ledger.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/log.h"

namespace weft::tinker {
namespace {

constexpr const char* kKindNames[] = {"session",    "model",  "sampler",
                                      "checkpoint", "orphan", "step",
                                      "loss",       "usage",  "event"};

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
  TokenRecord record{.id = json.value("token", ""),
                     .tenant = json.value("tenant", "")};
  record.scopes.insert(json.value("admin", false) ? Scope::kAdmin
                                                  : Scope::kTrain);
  return Caller(record);
}

}  // namespace weft::tinker
