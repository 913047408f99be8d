#include "server/tinker/ledger.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/log.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// The most bytes of LedgerEntry::bytes that may wait to be written. If no bytes
// wait, an entry of any size may wait.
constexpr size_t kMaxWaitingBytes = size_t{256} << 20;

constexpr const char* kPrefixes[] = {"session-",    "model-",  "sampler-",
                                     "checkpoint-", "orphan-", "step-"};

const char* PrefixOf(EntryKind kind) {
  return kPrefixes[static_cast<size_t>(kind)];
}

// Returns the part of a file's name that stands for an id. The id itself may be
// too long for a file's name, or have characters that are not allowed there.
std::string Hash(absl::string_view id) {
  return absl::BytesToHexString(Sha256(std::string(id)).substr(0, 16));
}

std::string StepPrefix(absl::string_view model) {
  return absl::StrCat(PrefixOf(EntryKind::kStep), Hash(model), "-");
}

std::string FileName(EntryKind kind, absl::string_view id) {
  if (kind != EntryKind::kStep) return absl::StrCat(PrefixOf(kind), Hash(id));
  const size_t colon = id.rfind(':');
  return absl::StrCat(StepPrefix(id.substr(0, colon)), id.substr(colon + 1));
}

std::string TextOf(const LedgerEntry& entry) {
  const Json head = {{"id", entry.id}, {"fields", entry.fields}};
  return absl::StrCat(head.dump(-1, ' ', false, Json::error_handler_t::replace),
                      "\n");
}

// Parses a file: one line of JSON, then LedgerEntry::bytes.
std::optional<LedgerEntry> Parse(std::string text) {
  const size_t end = text.find('\n');
  if (end == std::string::npos) return std::nullopt;
  Json head = Json::parse(text.begin(), text.begin() + static_cast<long>(end),
                          /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!head.is_object() || !head["id"].is_string()) return std::nullopt;
  text.erase(0, end + 1);
  return LedgerEntry{.id = head["id"].get<std::string>(),
                     .fields = std::move(head["fields"]),
                     .bytes = std::move(text)};
}

absl::Status DiskIsSlow() {
  return WithReason(
      absl::ResourceExhaustedError("too many requests wait for the disk"),
      {.name = "QUEUE_FULL", .values = {}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ledger>> Ledger::Open(
    const std::string& state_dir, Post post) {
  std::unique_ptr<Ledger> ledger(new Ledger(std::move(post)));
  if (state_dir.empty()) return ledger;
  ledger->path_ = absl::StrCat(state_dir, "/tinker");
  std::error_code error;
  std::filesystem::create_directories(ledger->path_, error);
  if (error) return ErrnoStatus(error.value(), "the folder tinker");
  WEFT_ASSIGN_OR_RETURN(ledger->folder_,
                        OpenDirectory(ledger->path_, "the folder tinker"));
  return ledger;
}

void Ledger::Put(EntryKind kind, LedgerEntry entry,
                 std::function<void(absl::Status)> done) {
  if (!keeps()) return done(absl::OkStatus());
  const size_t bytes = entry.bytes.size();
  if (waiting_bytes_ > 0 && waiting_bytes_ + bytes > kMaxWaitingBytes) {
    return done(DiskIsSlow());
  }
  waiting_bytes_ += bytes;
  disk_.Post(
      [this, kind, bytes, entry = std::move(entry), done = std::move(done)] {
        const std::string head = TextOf(entry);
        const absl::Status put =
            PublishFileAt(folder_.get(), FileName(kind, entry.id),
                          {head, entry.bytes}, /*replace=*/true);
        post_([this, bytes, put, done] {
          waiting_bytes_ -= bytes;
          done(put);
        });
      });
}

void Ledger::Remove(const std::string& name) const {
  const absl::Status erased = RemoveFileAt(folder_.get(), name);
  if (erased.ok() || absl::IsNotFound(erased)) return;
  Log(LogLevel::kWarning, "an entry of the Tinker front stays",
      {{"error", std::string(erased.message())}});
}

void Ledger::Erase(EntryKind kind, const std::string& id) {
  if (!keeps()) return;
  disk_.Post([this, name = FileName(kind, id)] { Remove(name); });
}

void Ledger::EraseSteps(const std::string& model) {
  if (!keeps()) return;
  disk_.Post([this, prefix = StepPrefix(model)] {
    for (const std::string& name : Names(prefix)) Remove(name);
  });
}

std::vector<std::string> Ledger::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(path_, error)) {
    std::string name = file.path().filename().string();
    if (absl::StartsWith(name, prefix)) names.push_back(std::move(name));
  }
  return names;
}

std::optional<LedgerEntry> Ledger::Read(const std::string& name) const {
  auto text = ReadFileAt(folder_.get(), name);
  const bool gone = absl::IsNotFound(text.status());
  auto entry = text.ok() ? Parse(*std::move(text)) : std::nullopt;
  if (!entry && !gone) {
    Log(LogLevel::kError, "an entry of the Tinker front cannot be read",
        {{"file", name}});
  }
  return entry;
}

std::vector<LedgerEntry> Ledger::ReadAll(EntryKind kind) const {
  std::vector<LedgerEntry> entries;
  if (!keeps()) return entries;
  for (const std::string& name : Names(PrefixOf(kind))) {
    auto entry = Read(name);
    if (entry) entries.push_back(*std::move(entry));
  }
  return entries;
}

void Ledger::ListSteps(std::function<void(std::vector<StepFile>)> done) {
  if (!keeps()) return done({});
  disk_.Post([this, done = std::move(done)] {
    std::vector<StepFile> files;
    for (std::string& name : Names(PrefixOf(EntryKind::kStep))) {
      StepFile file{.name = std::move(name)};
      const size_t dash = file.name.rfind('-');
      if (absl::SimpleAtoi(file.name.substr(dash + 1), &file.seq)) {
        files.push_back(std::move(file));
      }
    }
    std::ranges::sort(files, {}, &StepFile::seq);
    post_([done, files = std::move(files)] { done(files); });
  });
}

void Ledger::ReadStep(const StepFile& file,
                      std::function<void(std::optional<LedgerEntry>)> done) {
  disk_.Post([this, name = file.name, done = std::move(done)] {
    auto entry = Read(name);
    post_(
        [done, entry = std::move(entry)]() mutable { done(std::move(entry)); });
  });
}

}  // namespace weft::tinker
