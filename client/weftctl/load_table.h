// Formats the tables of `weftctl top`.
#ifndef WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
#define WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_

#include <optional>
#include <string>

#include "weft/v1/adapters.pb.h"
#include "weft/v1/server.pb.h"

namespace weft::weftctl {

// The load that a server reported at one time.
struct LoadSample {
  double seconds = 0;  // Unix time of the report.
  v1::ServerInfo info;
  v1::ListAdaptersResponse adapters;
};

// Returns two tables: one of the server, and one of at most `max_adapters`
// adapters, the latest used first. Rates are averages since `before`; without
// `before` they are "-". A server with tokens reports its load only to admins.
// Without a load, the table of the server is missing.
[[nodiscard]] std::string LoadTable(const std::optional<LoadSample>& before,
                                    const LoadSample& now, size_t max_adapters);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_LOAD_TABLE_H_
