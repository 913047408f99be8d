#include "src/engine/device/engine_profile.h"

#include <utility>

namespace weft::engine {
namespace {

// The largest number of spans in a profile. They take about 10 MB, and their
// JSON 20 MB.
constexpr size_t kMaxSpans = 200000;

}  // namespace

EngineProfile::~EngineProfile() {
  std::optional<Job> job;
  {
    MutexLock lock(&mu_);
    job = std::exchange(job_, std::nullopt);
  }
  if (job) job->done(absl::UnavailableError("the server stopped"));
}

CancelHandle EngineProfile::Start(const ProfileRequest& request,
                                  Callback<std::string> done) {
  uint64_t id = 0;
  std::optional<Job> job = Job{.request = request, .done = std::move(done)};
  {
    MutexLock lock(&mu_);
    if (!job_) {
      id = next_id_++;
      std::swap(job_, job);
      cancelled_ = false;
      wanted_.store(true, std::memory_order_release);
    }
  }
  if (job) {
    job->done(absl::FailedPreconditionError(
        "another profile is running; wait for its end"));
    return {};
  }
  return CancelHandle([this, id] {
    MutexLock lock(&mu_);
    if (job_ && next_id_ == id + 1) cancelled_ = true;
  });
}

void EngineProfile::EndEarly() {
  MutexLock lock(&mu_);
  cancelled_ = true;
}

void EngineProfile::BetweenWork(bool worked, absl::Time now) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  bool cancelled = false;
  {
    MutexLock lock(&mu_);
    cancelled = cancelled_;
    if (recording_ == nullptr) {
      end_ = now + job_->request.duration;
      max_pieces_ = job_->request.steps;
    }
  }
  if (recording_ == nullptr) {
    pieces_ = 0;
    recording_ = std::make_shared<profile::Recording>(kMaxSpans);
    use_.emplace(recording_.get());
    return;
  }
  if (worked) ++pieces_;
  const bool enough = max_pieces_ > 0 && pieces_ >= max_pieces_;
  if (enough || now >= end_ || cancelled) End();
}

void EngineProfile::End() {
  use_.reset();
  Job job;
  {
    MutexLock lock(&mu_);
    job = *std::exchange(job_, std::nullopt);
    wanted_.store(false, std::memory_order_relaxed);
  }
  io_.Post([this, done = std::move(job.done),
            recording = std::exchange(recording_, nullptr)] {
    replies_.Post([done, json = profile::ToChromeTrace(
                             *recording, "weft-engine")] { done(json); });
  });
}

}  // namespace weft::engine
