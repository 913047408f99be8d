// Bookkeeping that unary and streaming calls share.
#ifndef WEFT_SERVER_CALL_H_
#define WEFT_SERVER_CALL_H_

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/service_core.h"
#include "src/base/mutex.h"
#include "src/engine/engine.h"

namespace weft {

// One call from its arrival to its status: metrics, log line, trailers.
// Threads: Close exactly once, from any thread; the rest from any.
class CallRecord {
 public:
  // `core` outlives the call; `context` lives until its OnDone.
  CallRecord(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc);
  ~CallRecord() { core_->open_calls.fetch_sub(1); }
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  // The client's deadline; InfiniteFuture when it gave none.
  [[nodiscard]] absl::Time deadline() const;

  // The engine for new work. DEADLINE_EXCEEDED when the deadline has passed,
  // UNAVAILABLE while starting or draining.
  [[nodiscard]] absl::StatusOr<Engine*> Admit() const;

  // Marks the reply as a stored one.
  void MarkReplayed();

  // Counts and logs the outcome; returns what to give to Finish.
  [[nodiscard]] grpc::Status Close(const absl::Status& status);

  [[nodiscard]] ServiceCore* core() const { return core_; }
  [[nodiscard]] grpc::CallbackServerContext* context() const {
    return context_;
  }

 private:
  void CountRefusal(const absl::Status& status);

  ServiceCore* const core_;
  grpc::CallbackServerContext* const context_;
  const Rpc rpc_;
  const absl::Time start_;
};

// Joins the client's cancellation with the engine's handle, which may come in
// either order. Threads: any.
class CancelSlot {
 public:
  // Cancels at once when Cancel came before.
  void Set(CancelHandle handle) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  // Drops the handle, and with it whatever it keeps alive.
  void Clear() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool cleared_ ABSL_GUARDED_BY(mu_) = false;
  CancelHandle handle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_SERVER_CALL_H_
