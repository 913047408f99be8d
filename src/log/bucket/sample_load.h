// How much this process has to sample, for those who share samples out.
#ifndef WEFT_SRC_LOG_BUCKET_SAMPLE_LOAD_H_
#define WEFT_SRC_LOG_BUCKET_SAMPLE_LOAD_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "src/base/observe/metrics.h"

namespace weft::log {

// Threads: any.
class SampleLoad {
 public:
  explicit SampleLoad(prometheus::Registry* registry)
      : queued_(AddGauge(registry, "weft_sample_queued_tokens",
                         "With --state, tokens of the samples that wait or "
                         "run: their prompts, and what they may draw.")) {}

  // Says whether the process takes samples. At first it does not.
  void SetOpen(bool open) { open_.store(open); }

  // Counts a sample of so many tokens until the last copy of the result is
  // destroyed, which the object outlives.
  [[nodiscard]] std::shared_ptr<void> Add(int64_t tokens) {
    // It may lose an update: nothing depends on it but a guess.
    mean_.store(mean_.load() + (tokens - mean_.load()) / kMemory);
    queued_.Increment(static_cast<double>(tokens));
    return {nullptr, [this, tokens](void*) {
              queued_.Decrement(static_cast<double>(tokens));
            }};
  }

  // Returns the tokens of all samples that wait or run; none if the process
  // takes no samples now.
  std::optional<uint64_t> queued_tokens() const {
    if (!open_.load()) return std::nullopt;
    return static_cast<uint64_t>(std::max(0.0, queued_.Value()));
  }
  // Returns about how many tokens one more sample has.
  uint64_t tokens_of_one() const {
    return static_cast<uint64_t>(std::max<int64_t>(1, mean_.load()));
  }

 private:
  static constexpr int64_t kMemory = 8;  // Samples.

  prometheus::Gauge& queued_;
  std::atomic<bool> open_{false};
  std::atomic<int64_t> mean_{512};
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_SAMPLE_LOAD_H_
