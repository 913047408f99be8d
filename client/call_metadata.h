// Adds metadata to a call.
#ifndef WEFT_CLIENT_CALL_METADATA_H_
#define WEFT_CLIENT_CALL_METADATA_H_

#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Adds the token as `authorization: Bearer ...` and the adapter's id as
// `weft-adapter-id`. A proxy in front of several servers uses the id to find
// the server that has the adapter. Omits empty values. Also omits an id with
// characters other than visible ASCII, because every server refuses such an id.
void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CALL_METADATA_H_
