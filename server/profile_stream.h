// The reactor of ServerService.Profile. It frees itself.
#ifndef WEFT_SERVER_PROFILE_STREAM_H_
#define WEFT_SERVER_PROFILE_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/service_core.h"
#include "weft/v1/server.pb.h"

namespace weft {

// Sends the trace in pieces of at most 1 MiB when the profile has ended. If the
// client goes away, the profile ends early.
[[nodiscard]] grpc::ServerWriteReactor<grpc::ByteBuffer>* StartProfile(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);

}  // namespace weft

#endif  // WEFT_SERVER_PROFILE_STREAM_H_
