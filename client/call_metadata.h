// Adds metadata to a call.
#ifndef WEFT_CLIENT_CALL_METADATA_H_
#define WEFT_CLIENT_CALL_METADATA_H_

#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Adds the token as `authorization: Bearer ...` and the adapter's id as
// `weft-adapter-id`. By the id, a proxy in front of several servers finds the
// one that has the adapter. Leaves out empty values, and an id that metadata
// cannot hold, because every server refuses such an id.
void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CALL_METADATA_H_
