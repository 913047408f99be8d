// Two methods of gRPC's context ask its core for the call, which a direct call
// does not have. The linker takes these here in place of the library's.
#include "tests/support/direct_call.h"

namespace grpc {

bool ServerContextBase::IsCancelled() const { return marked_cancelled_.load(); }

void ServerContextBase::TryCancel() const {
  const_cast<ServerContextBase*>(this)->marked_cancelled_.store(true);
}

}  // namespace grpc
