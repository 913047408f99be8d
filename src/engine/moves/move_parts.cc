#include "src/engine/moves/move_parts.h"

#include "src/base/observe/log.h"

namespace weft::engine {

MoveMetrics::MoveMetrics(prometheus::Registry* registry)
    : results(registry, "weft_log_moves_total",
              "Moves of adapters between logs, by how they ended here.",
              "result", {"left", "stayed", "arrived", "refused", "dropped"}) {}

void MoveParts::Again(const std::string& adapter_id, const absl::Status& error,
                      std::function<void()> task) {
  Log(LogLevel::kWarning, "the move of an adapter waits for the store",
      {{"adapter", adapter_id}, {"reason", error.message()}});
  context_.when_store_answers(
      [task = std::move(task)](const absl::Status& open) {
        if (open.ok()) task();
      });
}

void MoveParts::RunDue(absl::Time now) {
  while (!later_.empty() && later_.begin()->first <= now) {
    const auto due = later_.extract(later_.begin());
    due.mapped()();
  }
}

}  // namespace weft::engine
