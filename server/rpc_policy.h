// The table of the scope that each RPC needs.
#ifndef WEFT_SERVER_RPC_POLICY_H_
#define WEFT_SERVER_RPC_POLICY_H_

#include "absl/strings/string_view.h"
#include "src/base/tokens.h"

namespace weft {

struct RpcPolicy {
  absl::string_view path;  // "/package.Service/Method".
  Scope scope = Scope::kAdmin;
};

// Returns the policy of a method, or null if it has none. Nobody may call a
// method without a policy.
[[nodiscard]] const RpcPolicy* FindPolicy(absl::string_view path);

}  // namespace weft

#endif  // WEFT_SERVER_RPC_POLICY_H_
