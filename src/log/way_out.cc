#include "src/log/way_out.h"

#include "absl/strings/str_cat.h"

namespace weft::log {

absl::Status WithWayOut(const absl::Status& status,
                        const EngineOptions& options) {
  if (!absl::IsDataLoss(status)) return status;
  if (options.state.empty()) {
    return absl::DataLossError(absl::StrCat(
        "the state folder is damaged: ", status.message(),
        ". `weftctl state restore BACKUP DIR` makes a folder from a backup; "
        "then start with --state-dir DIR"));
  }
  return absl::DataLossError(absl::StrCat(
      "the state ", options.state, " is damaged: ", status.message(),
      ". `weftctl state restore BACKUP s3://BUCKET/NEW` makes a state from a "
      "backup; then start with --state s3://BUCKET/NEW"));
}

}  // namespace weft::log
