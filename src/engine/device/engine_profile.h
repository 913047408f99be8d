// Profiles the engine thread when a client asks for it. A profile begins and
// ends between two pieces of the thread's work.
#ifndef WEFT_SRC_ENGINE_DEVICE_ENGINE_PROFILE_H_
#define WEFT_SRC_ENGINE_DEVICE_ENGINE_PROFILE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "src/base/observe/profile.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"
#include "src/request/profile.h"
#include "src/request/reply.h"

namespace weft::engine {

class EngineProfile {
 public:
  // `io` converts a trace to JSON. `replies` passes the JSON to the callback.
  // Both workers outlive the engine thread, and this object outlives both.
  EngineProfile(Worker* io, Worker* replies) : io_(*io), replies_(*replies) {}
  // Answers UNAVAILABLE to a caller that still waits.
  ~EngineProfile();
  EngineProfile(const EngineProfile&) = delete;
  EngineProfile& operator=(const EngineProfile&) = delete;

  // Any thread may call the methods below.

  // Begins to record after the present piece of work. `done` gets a Chrome
  // trace. A cancelled profile ends early, and `done` gets the trace up to
  // then. Errors: FAILED_PRECONDITION while another profile waits or runs,
  // UNAVAILABLE if the engine ends first.
  CancelHandle Start(const ProfileRequest& request, Callback<std::string> done);

  // Ends a running profile early, so that it does not delay the server's end.
  // Its `done` gets the trace up to then.
  void EndEarly();

  // The engine thread calls the method below, between two pieces of work.

  // Begins a requested recording, or ends one that is complete or cancelled.
  // `worked` is true if a micro-batch, a step or a decode iteration has run
  // since the last call.
  void BetweenWork(bool worked, absl::Time now);

 private:
  struct Job {
    ProfileRequest request;
    Callback<std::string> done;
  };

  void End();

  Worker& io_;
  Worker& replies_;
  Mutex mu_;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  std::optional<Job> job_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  // True while a job waits or runs. The engine thread reads it without a lock.
  std::atomic<bool> wanted_ = false;
  // Only the engine thread uses the members below.
  std::shared_ptr<profile::Recording> recording_;
  std::optional<profile::Use> use_;
  absl::Time end_;
  int64_t pieces_ = 0;
  int64_t max_pieces_ = 0;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DEVICE_ENGINE_PROFILE_H_
