// Serves --metrics-listen, the port for what watches weftd: /metrics for
// Prometheus, /livez and /readyz for probes, and /authorize for the edge.
#ifndef WEFT_SERVER_HTTP_METRICS_SERVER_H_
#define WEFT_SERVER_HTTP_METRICS_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "server/http/server.h"

namespace weft::server {

// Threads: one makes and destroys it; the functions of MetricsSources run on
// the server's own thread.
struct MetricsSources {
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables;
  std::function<bool()> live;
  std::function<bool()> ready;
  // Returns whether the request's token is good. The edge asks this before it
  // lets a call reach gRPC, which strangers must not reach. Returns HOST:PORT
  // of the server that is to get the call, or nothing for this one.
  std::function<absl::StatusOr<std::string>(const HttpRequest&)> authorize;
};

// Listens on HOST:PORT. Errors: those of HttpServer::Bind.
absl::StatusOr<std::unique_ptr<HttpServer>> StartMetricsServer(
    const std::string& listen, const HttpOptions& options,
    MetricsSources sources);

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_METRICS_SERVER_H_
