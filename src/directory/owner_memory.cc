#include "src/directory/owner_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"

namespace weft::directory {
namespace {

// Adapters move seldom, and whoever gets a call for one that has moved says so.
constexpr absl::Duration kFreshLog = absl::Seconds(10);
constexpr size_t kMaxAdapters = 65536;
// A log gets another owner within seconds after its owner has died.
constexpr absl::Duration kFreshOwner = absl::Seconds(1);
constexpr size_t kMaxLogs = 1000;
constexpr absl::Duration kGood = absl::Minutes(5);
// More reads wait for none: what is old stays so until it is used again.
constexpr int kMaxWaiting = 64;

}  // namespace

OwnerMemory::OwnerMemory(ReadOwner read_owner, Find find)
    : read_owner_(std::move(read_owner)),
      find_(std::move(find)),
      logs_(kFreshLog, kGood, kMaxAdapters),
      owners_(kFreshOwner, kGood, kMaxLogs) {}

void OwnerMemory::Note(const std::string& adapter_id, int log,
                       const std::string& owner) {
  logs_.Put(adapter_id, log, SteadyNow());
  NoteOwner(log, owner);
}

void OwnerMemory::NoteOwner(int log, const std::string& owner) {
  owner.empty() ? owners_.Erase(log) : owners_.Put(log, owner, SteadyNow());
}

absl::StatusOr<std::string> OwnerMemory::Read(int log) {
  absl::StatusOr<std::string> owner = read_owner_(log);
  if (!owner.ok()) return owner;
  NoteOwner(log, *owner);
  if (!owner->empty()) return owner;
  return absl::UnavailableError(
      absl::StrCat("log ", log, " has no server now: try again"));
}

std::string OwnerMemory::Remembered(int log) {
  bool again = false;
  std::optional<std::string> owner = owners_.Get(log, SteadyNow(), &again);
  if (again) Learn([this, log] { Read(log).IgnoreError(); });
  return owner.value_or("");
}

std::string OwnerMemory::OwnerOf(const std::string& adapter_id) {
  bool again = false;
  const std::optional<int> log = logs_.Get(adapter_id, SteadyNow(), &again);
  if (!log) return "";
  std::string owner = Remembered(*log);
  if (again) Learn([this, adapter_id] { find_(adapter_id); });
  return owner;
}

bool OwnerMemory::Learn(std::function<void()> read) {
  if (num_waiting_.fetch_add(1) >= kMaxWaiting) {
    --num_waiting_;
    return false;
  }
  reads_.Post([this, read = std::move(read)] {
    --num_waiting_;
    read();
  });
  return true;
}

void OwnerMemory::FindOwner(
    const std::string& unit, const ReadLog& read_log,
    std::function<void(const absl::StatusOr<std::string>&)> done) {
  const std::string owner = OwnerOf(unit);
  if (!owner.empty()) return done(owner);
  const bool waits = Learn([this, unit, read_log, done] {
    // Others may have waited for the same read.
    const std::string learned = OwnerOf(unit);
    if (!learned.empty()) return done(learned);
    const absl::StatusOr<int> log = read_log();
    if (!log.ok()) return done(log.status());
    logs_.Put(unit, *log, SteadyNow());
    done(Read(*log));
  });
  if (!waits) done(absl::UnavailableError("too many look-ups: try again"));
}

}  // namespace weft::directory
