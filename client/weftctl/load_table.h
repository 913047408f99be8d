// The table of `weftctl top`.
#ifndef WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
#define WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_

#include <optional>
#include <string>

#include "weft/v1/adapters.pb.h"
#include "weft/v1/server.pb.h"

namespace weft::weftctl {

// What a server said at one time.
struct LoadSample {
  double seconds = 0;  // The time when it said so.
  v1::ServerInfo info;
  v1::ListAdaptersResponse adapters;
};

// Returns two tables: the server, and its adapters with the latest used first,
// at most `max_adapters` of them. Rates compare with `before`; without it they
// are "-". A server that tells no load (to a tenant's token) has the adapters
// alone.
[[nodiscard]] std::string LoadTable(const std::optional<LoadSample>& before,
                                    const LoadSample& now, size_t max_adapters);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
