// The metadata of a call.
#ifndef WEFT_CLIENT_CALL_METADATA_H_
#define WEFT_CLIENT_CALL_METADATA_H_

#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Adds the token as `authorization: Bearer ...` and the adapter's id as
// `weft-adapter-id`, by which a proxy in front of several servers finds the
// server that has the adapter. Leaves out empty values. Also leaves out an id
// that metadata cannot hold, because no adapter has such an id and every server
// refuses it.
void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CALL_METADATA_H_
