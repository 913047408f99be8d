// Two methods of gRPC's context ask its core for the call, but a direct call
// has none. The linker uses these methods instead of the library's.
#include "tests/support/direct_call.h"

namespace grpc {

bool ServerContextBase::IsCancelled() const { return marked_cancelled_.load(); }

void ServerContextBase::TryCancel() const {
  const_cast<ServerContextBase*>(this)->marked_cancelled_.store(true);
}

}  // namespace grpc
