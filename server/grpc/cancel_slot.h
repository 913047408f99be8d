// Passes the cancellation of a call on to the engine.
#ifndef WEFT_SERVER_GRPC_CANCEL_SLOT_H_
#define WEFT_SERVER_GRPC_CANCEL_SLOT_H_

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"
#include "src/engine/engine.h"

namespace weft::server {

// Cancels the engine's work when the client cancels the call. The client's
// cancellation and the engine's handle may arrive in either order. Threads:
// any.
class CancelSlot {
 public:
  // Sets the handle. Cancels at once if Cancel was called before.
  void Set(CancelHandle handle) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  // Drops the handle and all that it keeps alive. A later Set has no effect.
  void Clear() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool cleared_ ABSL_GUARDED_BY(mu_) = false;
  CancelHandle handle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_CANCEL_SLOT_H_
