#include "src/engine/moves/moves.h"

#include <utility>

namespace weft::engine {

absl::Status Moves::Check(bool is_replayed) const {
  if (!has_others()) {
    return absl::FailedPreconditionError(
        "this server has the only log: give several servers --state and "
        "--logs");
  }
  if (is_replayed) return absl::OkStatus();
  return absl::UnavailableError(
      "adapters are being restored; try again when all are");
}

void Moves::Start(const MoveAdapterRequest& request, bool is_replayed,
                  const Callback<bool>& done) {
  const absl::Status refused = Check(is_replayed);
  if (!refused.ok()) return done(refused);
  departure_.Start(UnitOf(request.adapter_id), request.log, done);
}

void Moves::DrainLog(bool is_replayed, const Callback<bool>& done) {
  const absl::Status refused = Check(is_replayed);
  refused.ok() ? drain_.Start(done) : done(refused);
}

void Moves::Resume(OpenMoves moves) {
  for (auto& [unit, leaving] : moves.leaving) departure_.Resume(leaving);
  for (auto& [unit, arriving] : moves.arriving) {
    arrival_.Resume(std::move(arriving));
  }
}

void Moves::GoOn(absl::Time now) {
  parts_.RunDue(now);
  if (!has_others() && parts_.open() == 0) return;
  drain_.GoOn();
  departure_.GoOn();
  arrival_.GoOn(now);
}

}  // namespace weft::engine
