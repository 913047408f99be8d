#include "server/tinker/ledger.h"

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/request/digest.h"

namespace weft::tinker {
namespace {

constexpr const char* kPrefixes[] = {"session-", "model-", "sampler-",
                                     "checkpoint-", "step-"};

const char* PrefixOf(EntryKind kind) {
  return kPrefixes[static_cast<size_t>(kind)];
}

// Ids have characters and lengths that file names do not.
std::string FileName(EntryKind kind, const std::string& id) {
  return absl::StrCat(PrefixOf(kind),
                      absl::BytesToHexString(Sha256(id).substr(0, 16)));
}

// A line of JSON, then the bytes.
std::optional<LedgerEntry> Parse(const std::string& text) {
  const size_t end = text.find('\n');
  if (end == std::string::npos) return std::nullopt;
  Json head = Json::parse(text.begin(), text.begin() + static_cast<long>(end),
                          /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!head.is_object() || !head["id"].is_string()) return std::nullopt;
  return LedgerEntry{.id = head["id"].get<std::string>(),
                     .fields = std::move(head["fields"]),
                     .bytes = text.substr(end + 1)};
}

}  // namespace

absl::StatusOr<Ledger> Ledger::Open(const std::string& state_dir) {
  Ledger ledger;
  if (state_dir.empty()) return ledger;
  ledger.path_ = absl::StrCat(state_dir, "/tinker");
  std::error_code error;
  std::filesystem::create_directories(ledger.path_, error);
  if (error) return ErrnoStatus(error.value(), "the folder tinker");
  WEFT_ASSIGN_OR_RETURN(ledger.folder_,
                        OpenDirectory(ledger.path_, "the folder tinker"));
  return ledger;
}

absl::Status Ledger::Put(EntryKind kind, const LedgerEntry& entry) {
  if (!keeps()) return absl::OkStatus();
  const std::string head =
      absl::StrCat(Json{{"id", entry.id}, {"fields", entry.fields}}.dump(
                       -1, ' ', false, Json::error_handler_t::replace),
                   "\n");
  return PublishFileAt(folder_.get(), FileName(kind, entry.id),
                       {head, entry.bytes}, /*replace=*/true);
}

void Ledger::Erase(EntryKind kind, const std::string& id) {
  if (!keeps()) return;
  const absl::Status erased = RemoveFileAt(folder_.get(), FileName(kind, id));
  if (erased.ok() || absl::IsNotFound(erased)) return;
  Log(LogLevel::kWarning, "an entry of the Tinker front stays",
      {{"error", std::string(erased.message())}});
}

std::vector<LedgerEntry> Ledger::ReadAll(EntryKind kind) const {
  std::vector<LedgerEntry> entries;
  if (!keeps()) return entries;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(path_, error)) {
    const std::string name = file.path().filename().string();
    if (!absl::StartsWith(name, PrefixOf(kind))) continue;
    const auto text = ReadFileAt(folder_.get(), name);
    auto entry = text.ok() ? Parse(*text) : std::nullopt;
    if (entry) {
      entries.push_back(*std::move(entry));
    } else {
      Log(LogLevel::kError, "an entry of the Tinker front cannot be read",
          {{"file", name}});
    }
  }
  return entries;
}

}  // namespace weft::tinker
