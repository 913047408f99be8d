#include "server/grpc/cancel_slot.h"

#include <utility>

namespace weft::server {

void CancelSlot::Set(CancelHandle handle) {
  {
    MutexLock lock(&mu_);
    if (cleared_) return;
    if (!cancelled_) {
      handle_ = std::move(handle);
      return;
    }
  }
  handle.Cancel();
}

void CancelSlot::Cancel() {
  CancelHandle handle;
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
    handle = std::exchange(handle_, CancelHandle());
  }
  handle.Cancel();
}

void CancelSlot::Clear() {
  CancelHandle handle;  // Destroyed after the lock is released.
  MutexLock lock(&mu_);
  cleared_ = true;
  handle = std::exchange(handle_, CancelHandle());
}

}  // namespace weft::server
