// The table of the scope that each RPC needs, and of the size of its requests.
#ifndef WEFT_SERVER_RPC_POLICY_H_
#define WEFT_SERVER_RPC_POLICY_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "src/base/tokens.h"

namespace weft {

// The most bytes of a request that carries only names and options.
inline constexpr int64_t kMaxSmallRequestBytes = int64_t{256} << 10;
// The most bytes of a request that carries a prompt.
inline constexpr int64_t kMaxPromptRequestBytes = int64_t{4} << 20;
// The only limit of a request that carries data is --max-message-bytes.
inline constexpr int64_t kNoOwnLimit = INT64_MAX;

struct RpcPolicy {
  absl::string_view path;  // "/package.Service/Method".
  Scope scope = Scope::kAdmin;
  int64_t max_request_bytes = kMaxSmallRequestBytes;
};

// Returns the policy of a method, or null if it has none. Nobody may call a
// method without a policy.
[[nodiscard]] const RpcPolicy* FindPolicy(absl::string_view path);

}  // namespace weft

#endif  // WEFT_SERVER_RPC_POLICY_H_
