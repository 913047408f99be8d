// What a call carries beside its message.
#ifndef WEFT_CLIENT_CALL_METADATA_H_
#define WEFT_CLIENT_CALL_METADATA_H_

#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Adds the token as `authorization: Bearer ...` and the adapter's id as
// `weft-adapter-id`, by which a proxy in front of several servers finds the one
// that holds the adapter; empty ones are left out. So is an id that metadata
// cannot hold: it is no adapter's, and any server refuses it.
void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CALL_METADATA_H_
