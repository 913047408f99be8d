// An adapter's recent activity: its token totals, and a TrainPoint for each of
// the latest ForwardBackward steps.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_
#define WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "src/request/activity.h"
#include "src/request/train.h"

namespace weft::dispatch {

class TrainHistory {
 public:
  static constexpr size_t kMaxPoints = 256;

  void CountTrained(int64_t num_tokens) {
    train_tokens_ += static_cast<uint64_t>(num_tokens);
  }
  void CountSampled(int64_t num_tokens) {
    sampled_tokens_ += static_cast<uint64_t>(num_tokens);
  }
  // Adds the point of a step that has succeeded. Does nothing for a Forward. If
  // there are kMaxPoints already, the new point replaces the oldest one.
  void Add(const TrainRequest& request, const TrainResult& result,
           absl::Time now);

  // Returns the totals and the latest points, at most `max_points`.
  [[nodiscard]] AdapterActivity Latest(size_t max_points) const;

 private:
  std::vector<TrainPoint> ring_;
  size_t oldest_ = 0;  // The place of the oldest point in a full ring.
  uint64_t train_tokens_ = 0;
  uint64_t sampled_tokens_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_
