// The table of the scope that each RPC needs.
#ifndef WEFT_SERVER_RPC_POLICY_H_
#define WEFT_SERVER_RPC_POLICY_H_

#include "absl/strings/string_view.h"
#include "src/auth/tokens.h"

namespace weft {

struct RpcPolicy {
  absl::string_view path;  // "/package.Service/Method".
  bool open = false;       // Needs no token.
  Scope scope = Scope::kAdmin;
};

// Returns null if there is no policy. Then no caller may use the method.
[[nodiscard]] const RpcPolicy* FindPolicy(absl::string_view path);

}  // namespace weft

#endif  // WEFT_SERVER_RPC_POLICY_H_
