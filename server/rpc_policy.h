// Which scope each RPC wants: the one table of who may call what.
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

// Null: no policy, so nobody may call it.
[[nodiscard]] const RpcPolicy* FindPolicy(absl::string_view path);

}  // namespace weft

#endif  // WEFT_SERVER_RPC_POLICY_H_
