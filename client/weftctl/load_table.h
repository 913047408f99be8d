// Formats the tables of `weftctl top`.
#ifndef WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
#define WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_

#include <optional>
#include <string>

#include "weft/v1/adapters.pb.h"
#include "weft/v1/server.pb.h"

namespace weft::client::weftctl {

// Returns what the server does now, such as "restoring 3 of 5 adapters, about
// 80 s left".
[[nodiscard]] std::string DescribeState(const v1::ServerInfo& info);
// Returns "restoring" or "ready".
[[nodiscard]] std::string DescribeState(const v1::Adapter& adapter);

// The load that a server reported at one time.
struct LoadSample {
  double seconds = 0;  // When it was read, by SteadyNow.
  v1::ServerInfo info;
  v1::ListAdaptersResponse adapters;
};

// Returns two tables: one of the server, and one of at most `max_adapters`
// adapters, the most recently used first. Rates are averages since `before`;
// without `before` they are "-". The server's table has only its state if the
// server reported no load. A server that requires bearer tokens reports its
// load only to admins.
[[nodiscard]] std::string LoadTable(const std::optional<LoadSample>& before,
                                    const LoadSample& now, size_t max_adapters);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
