#include "client/call_metadata.h"

#include <algorithm>

#include "absl/strings/ascii.h"

namespace weft::client {

void AddCallMetadata(grpc::ClientContext& context, const std::string& token,
                     absl::string_view adapter_id) {
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  const bool visible =
      std::all_of(adapter_id.begin(), adapter_id.end(),
                  [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (visible && !adapter_id.empty()) {
    context.AddMetadata("weft-adapter-id", std::string(adapter_id));
  }
}

}  // namespace weft::client
