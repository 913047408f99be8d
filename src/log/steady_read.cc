#include "src/log/steady_read.h"

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace weft::log {
namespace {

constexpr int kTries = 5;

using Newest = absl::StatusOr<std::optional<SnapshotFile>>;

// Returns whether two snapshots are one, or neither could be read.
bool Same(const Newest& a, const Newest& b) {
  const auto sequence = [](const Newest& newest) -> uint64_t {
    return newest.ok() && *newest ? (*newest)->next_sequence : 0;
  };
  return a.ok() == b.ok() && sequence(a) == sequence(b);
}

}  // namespace

absl::Status ReadSteadily(
    const State& state,
    const std::function<absl::Status(const std::optional<SnapshotFile>&)>&
        read) {
  Newest newest = state.ReadSnapshot();
  for (int i = 0; i < kTries; ++i) {
    const absl::Status status = newest.ok() ? read(*newest) : newest.status();
    if (status.ok()) return status;
    Newest now = state.ReadSnapshot();
    if (Same(newest, now)) return status;
    newest = std::move(now);
  }
  return absl::UnavailableError(absl::StrCat(
      "the server wrote a snapshot during each of ", kTries,
      " tries to read; raise --snapshot-log-bytes or read when it does less"));
}

}  // namespace weft::log
