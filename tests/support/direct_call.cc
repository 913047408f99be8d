// Replaces two methods of gRPC's context. The library's versions need a call of
// gRPC's core, which a direct call does not have. The linker uses the methods
// below instead.
#include "tests/support/direct_call.h"

namespace grpc {

bool ServerContextBase::IsCancelled() const { return marked_cancelled_.load(); }

void ServerContextBase::TryCancel() const {
  const_cast<ServerContextBase*>(this)->marked_cancelled_.store(true);
}

}  // namespace grpc
