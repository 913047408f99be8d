// Everything that listens: the gRPC server with its services, health and
// reflection, and the metrics endpoint.
#ifndef WEFT_SERVER_FRONTEND_H_
#define WEFT_SERVER_FRONTEND_H_

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/service_type.h"
#include "prometheus/registry.h"
#include "server/listener.h"
#include "server/metrics_server.h"
#include "server/service_core.h"
#include "server/tls.h"
#include "src/config/options.h"
#include "src/metrics/process_collector.h"

namespace weft {

// How old the engine's heartbeat gets before the engine counts as hanging. It
// beats between micro-batches: one takes a second on a GPU, and minutes at most
// where a large model runs on a CPU. deploy/prometheus warns before that.
inline constexpr absl::Duration kHeartbeatLimit = absl::Minutes(15);
// How long it may hang on before the process ends, for a supervisor to start
// it again. Liveness is red meanwhile: a probe may restart it sooner, and
// somebody may look.
inline constexpr absl::Duration kHangGrace = absl::Minutes(5);

// Health services: "" and "weft.v1.TrainingService" tell readiness; "liveness"
// is SERVING while the model loads, and then for as long as the engine's
// heartbeat is younger than kHeartbeatLimit.
//
// Threads: any, Shutdown once.
class Frontend {
 public:
  // Listens at once; every RPC but GetInfo answers UNAVAILABLE until SetEngine.
  // Errors: UNAVAILABLE when an address cannot be listened on; those of
  // TlsRotation; INTERNAL.
  // Writes options.port_file. `registry` is shared with the metrics endpoint,
  // which only observes it.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Frontend>> Start(
      const ServerOptions& options,
      std::shared_ptr<prometheus::Registry> registry);

  ~Frontend();
  Frontend(const Frontend&) = delete;
  Frontend& operator=(const Frontend&) = delete;

  // HOST:PORT with the ports that were chosen; metrics_address is empty when
  // there is no endpoint.
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] const std::string& metrics_address() const {
    return metrics_address_;
  }

  // Shows on the metrics page that the engine is being started.
  void SetLoading();

  // Serves with `engine`, which outlives Shutdown.
  void SetEngine(Engine* engine);

  // Has liveness tell what the engine's heartbeat says at `now`. To be called
  // again and again.
  void UpdateLiveness(absl::Time now);

  // Readiness turns NOT_SERVING, new work is refused. May be repeated.
  void StartDraining();
  [[nodiscard]] bool draining() const { return core_.engine.draining(); }

  // Ends open calls after `grace`, sooner when there are none, and then the
  // connections. The engine must be able to answer or cancel what it has
  // accepted.
  void Shutdown(absl::Duration grace);

 private:
  Frontend(const ServerOptions& options,
           std::shared_ptr<prometheus::Registry> registry);

  [[nodiscard]] absl::Status StartGrpc();
  [[nodiscard]] absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>>
  MakeCredentials();
  [[nodiscard]] absl::Status StartMetrics();
  [[nodiscard]] absl::Status WritePortFile() const;
  void SetReady(bool ready);
  void SetLive(bool live);

  ServiceCore core_;
  // Shared with the metrics page, which holds them weakly.
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<ProcessCollector> process_collector_;
  std::unique_ptr<TlsRotation> tls_;  // Null: plaintext.
  std::unique_ptr<grpc::Service> services_[4];
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<MetricsServer> metrics_;
  std::string address_;
  std::string metrics_address_;
  std::atomic<bool> live_{false};
};

}  // namespace weft

#endif  // WEFT_SERVER_FRONTEND_H_
