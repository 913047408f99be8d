// An adapter's recent activity: its token totals, a TrainPoint for each of the
// latest ForwardBackward steps, an UpdatePoint for each of the latest
// OptimSteps, and the curves that the client reports. It takes at most about
// 60 KiB.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_
#define WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
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
           uint64_t optim_steps, absl::Time now);

  void Add(const OptimStepResult& result) {
    updates_.Add({.step = result.step,
                  .grad_norm = static_cast<float>(result.grad_norm)});
  }

  // Adds the values to their curves. A name that would be one more than
  // kMaxMetricCurves takes the place of the one reported longest ago.
  void Add(const MetricReport& report, uint64_t optim_steps);

  // Returns the totals and the latest points, updates and points of each curve,
  // at most `max_points` of each.
  AdapterActivity Latest(size_t max_points) const;

 private:
  // The latest kMaxPoints points.
  template <typename Point>
  class Ring {
   public:
    void Add(const Point& point) {
      if (points_.size() < kMaxPoints) {
        points_.push_back(point);
        return;
      }
      points_[oldest_] = point;
      oldest_ = (oldest_ + 1) % kMaxPoints;
    }
    std::vector<Point> Latest(size_t max_points) const {
      std::vector<Point> latest;
      const size_t count = std::min(max_points, points_.size());
      for (size_t i = points_.size() - count; i < points_.size(); ++i) {
        latest.push_back(points_[(oldest_ + i) % points_.size()]);
      }
      return latest;
    }

   private:
    std::vector<Point> points_;
    size_t oldest_ = 0;  // The place of the oldest point in a full ring.
  };

  struct Curve {
    Ring<MetricCurve::Point> points;
    uint64_t last_report = 0;
  };

  Ring<TrainPoint> trained_;
  Ring<UpdatePoint> updates_;
  std::map<std::string, Curve> curves_;
  uint64_t num_reports_ = 0;
  uint64_t train_tokens_ = 0;
  uint64_t sampled_tokens_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_TRAIN_HISTORY_H_
