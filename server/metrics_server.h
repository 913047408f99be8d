// Serves the metrics page /metrics with prometheus-cpp and its server,
// civetweb.
#ifndef WEFT_SERVER_METRICS_SERVER_H_
#define WEFT_SERVER_METRICS_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"

namespace weft {

// Threads: any.
class MetricsServer {
 public:
  // Listens on HOST:PORT. Each scrape collects from the collectables, which the
  // server does not keep alive. Errors: UNAVAILABLE if the address cannot be
  // bound.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& listen,
      const std::vector<std::shared_ptr<prometheus::Collectable>>&
          collectables);

  // Takes some milliseconds, or up to 2 s if a client holds a connection open
  // without a request.
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // Returns HOST:PORT with the port that was chosen.
  [[nodiscard]] const std::string& address() const { return address_; }

 private:
  MetricsServer(std::unique_ptr<prometheus::Exposer> exposer,
                std::string address);

  std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string address_;
};

}  // namespace weft

#endif  // WEFT_SERVER_METRICS_SERVER_H_
