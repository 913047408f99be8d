#include "server/tinker/ledger.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/log.h"

namespace weft::tinker {
namespace {

constexpr const char* kNames[] = {"session",    "model",  "sampler",
                                  "checkpoint", "orphan", "step"};

std::string NameOf(EntryKind kind, absl::string_view id) {
  return absl::StrCat("tinker/", kNames[static_cast<size_t>(kind)], "/", id);
}

std::string TextOf(const LedgerEntry& entry) {
  const Json head = {{"id", entry.id}, {"fields", entry.fields}};
  return absl::StrCat(head.dump(-1, ' ', false, Json::error_handler_t::replace),
                      "\n", entry.bytes);
}

// Parses a note: one line of JSON, then LedgerEntry::bytes.
std::optional<LedgerEntry> Parse(absl::string_view text) {
  const size_t end = text.find('\n');
  if (end == absl::string_view::npos) return std::nullopt;
  Json head = Json::parse(text.begin(), text.begin() + static_cast<long>(end),
                          /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!head.is_object() || !head["id"].is_string()) return std::nullopt;
  return LedgerEntry{.id = head["id"].get<std::string>(),
                     .fields = std::move(head["fields"]),
                     .bytes = std::string(text.substr(end + 1))};
}

}  // namespace

void Ledger::Put(EntryKind kind, const LedgerEntry& entry,
                 std::function<void(absl::Status)> done) const {
  if (!keeps()) return done(absl::OkStatus());
  engine().PutNote(NameOf(kind, entry.id), TextOf(entry),
                   [this, done = std::move(done)](const absl::Status& put) {
                     port_.Post([done, put] { done(put); });
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
    std::optional<LedgerEntry> entry = Parse(*value);
    if (entry) {
      entries.push_back(*std::move(entry));
    } else {
      Log(LogLevel::kError, "an entry of the Tinker front cannot be read",
          {{"note", name}});
    }
  }
  return entries;
}

}  // namespace weft::tinker
