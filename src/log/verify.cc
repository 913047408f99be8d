#include "src/log/verify.h"

#include <limits>
#include <optional>

#include "src/base/status_macros.h"
#include "src/log/image.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "src/log/steady_read.h"

namespace weft::log {

namespace {

absl::StatusOr<StateReport> Verify(const State& state,
                                   const std::optional<SnapshotFile>& file) {
  StateReport report;
  const auto check_image = [&](const std::string& name,
                               size_t num_blocks) -> absl::Status {
    WEFT_ASSIGN_OR_RETURN(const uint64_t bytes,
                          CheckImage(state, name, num_blocks));
    ++report.images;
    report.bytes += bytes;
    return absl::OkStatus();
  };
  WEFT_ASSIGN_OR_RETURN(const Snapshot snapshot, ToSnapshot(file));
  for (const StoredAdapter& adapter : snapshot.adapters) {
    if (!adapter.image) continue;
    WEFT_RETURN_IF_ERROR(check_image(
        adapter.image->file, kStateBlocks + adapter.image->versions.size()));
  }
  WEFT_ASSIGN_OR_RETURN(
      const LogSummary log,
      ReadLog(state, snapshot,
              {.max_resident = std::numeric_limits<size_t>::max(),
               .check_image = check_image,
               .cuts = false}));
  report.adapters = log.adapters.size();
  report.records = log.num_records;
  report.bytes += log.num_bytes;
  report.torn_bytes = log.torn_bytes;
  return report;
}

}  // namespace

absl::StatusOr<StateReport> VerifyState(const State& state) {
  StateReport report;
  WEFT_RETURN_IF_ERROR(ReadSteadily(
      state, [&](const std::optional<SnapshotFile>& snapshot) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(report, Verify(state, snapshot));
        return absl::OkStatus();
      }));
  return report;
}

}  // namespace weft::log
