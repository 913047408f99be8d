// All listeners: the gRPC server with its services, health and reflection, the
// metrics port, the Tinker API and the console.
#ifndef WEFT_SERVER_DAEMON_LISTENERS_H_
#define WEFT_SERVER_DAEMON_LISTENERS_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/service_type.h"
#include "prometheus/registry.h"
#include "server/call/service_core.h"
#include "server/console/console.h"
#include "server/grpc/listener.h"
#include "server/http/metrics_server.h"
#include "server/tinker/tinker_front.h"
#include "src/base/clock.h"
#include "src/base/observe/metrics.h"
#include "src/base/observe/process_collector.h"
#include "src/base/options/options.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// The engine counts as hung if its heartbeat is older than this. The engine's
// thread renews the heartbeat while idle and after each piece of work. The
// longest piece is a micro-batch. It takes about a second on a GPU, and at most
// minutes for a large model on a CPU. An alert in deploy/prometheus fires
// earlier.
inline constexpr absl::Duration kHeartbeatLimit = absl::Minutes(15);
// If the engine hangs for kHeartbeatLimit plus this time, the process ends, so
// that a supervisor restarts it. During kHangGrace, liveness is NOT_SERVING. A
// probe may then restart the process sooner, or an operator may inspect it.
inline constexpr absl::Duration kHangGrace = absl::Minutes(5);

// Serves all listeners. Readiness, which /readyz and the health services "" and
// "weft.v1.TrainingService" report, is whether the server takes work. Liveness
// (/livez, "liveness") is true while the model loads, and later while the
// engine's heartbeat is younger than kHeartbeatLimit.
//
// Threads: one; but any thread may call StartDraining() and draining().
class Listeners {
 public:
  // Listens at once and writes options.port_file. Until SetEngine, every RPC of
  // weft.v1 except GetInfo and GetTokenizer answers UNAVAILABLE. Errors:
  // UNAVAILABLE if an address cannot be bound or port_file cannot be written;
  // INTERNAL if gRPC cannot start its server; those of Listener::Bind,
  // StartMetricsServer, Authenticator::Start and TinkerFront::Start.
  static absl::StatusOr<std::unique_ptr<Listeners>> Start(
      const ServerOptions& options,
      std::shared_ptr<prometheus::Registry> registry,
      TokenizerFiles tokenizer = {});

  ~Listeners();
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  // Return HOST:PORT with the port that was chosen. metrics_address() is empty
  // if there is no metrics endpoint.
  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }

  // Returns the URL of the console; empty if there is none.
  std::string console_url() const;

  // Shows on the metrics page that the model is loading.
  void SetLoading();

  // Answers calls with `owner`, the address of the process that has the state
  // (MovedTo), until SetEngine. Any thread may call it.
  void SetStandby(const std::string& owner);

  // Serves with `engine` from now on, unless draining. REQUIRES: `engine`
  // outlives Shutdown.
  void SetEngine(engine::Engine* engine);

  // Sets liveness by the age of the engine's heartbeat at `now`. Counts how
  // often liveness turns NOT_SERVING. Call it periodically.
  void UpdateLiveness(absl::Time now);

  // Cancels the gRPC calls whose clients are late at `now` (StalledCalls). Call
  // it periodically.
  void CancelStalledCalls(absl::Time now);

  // Remembers the load for the console. Call it periodically.
  void RecordLoad(absl::Time now) { core_.history.Record(now, *registry_); }

  // Turns readiness NOT_SERVING and refuses new work, for good. A repeated call
  // is harmless.
  void StartDraining();
  bool draining() const { return core_.engine.draining(); }

  // Waits until no call is open, or `grace` has passed. Then cancels open calls
  // and closes the connections. During `grace` the engine can answer or cancel
  // accepted work.
  void Shutdown(absl::Duration grace);

 private:
  Listeners(const ServerOptions& options,
            std::shared_ptr<prometheus::Registry> registry);

  absl::Status StartGrpc();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials();
  absl::Status StartMetrics();
  // Judges the token of a call at the edge. Returns HOST:PORT of another edge,
  // if the call is known to be for a server behind it; never waits for that.
  absl::StatusOr<std::string> Authorize(const HttpRequest& request);
  // Returns where the owner of the caller's adapter is, or of the state while
  // this process stands by; for a sample from a checkpoint, which any process
  // can draw, where that is to be. Empty if that is here or not known.
  std::string OwnerOf(const Caller& caller, const HttpRequest& request) const;
  absl::Status StartTinker();
  absl::Status StartConsole();
  // For Drain and Undrain of clients. EndDrain fails after StartDraining.
  void BeginDrain(Callback<bool> done);
  absl::Status EndDrain();
  void RefuseWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drain_mu_);
  absl::Status WritePortFile() const;
  void SetReady(bool ready);
  void SetLive(bool live);
  // Returns what was last set for a health service.
  bool IsServing(const char* service) const;

  ServiceCore core_;
  // Keeps the registry alive, because the metrics endpoint does not.
  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Counter& watchdog_trips_;
  const absl::Time started_ = SteadyNow();
  const std::shared_ptr<ProcessCollector> process_collector_;
  std::unique_ptr<grpc::Service> services_[5];
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<HttpServer> metrics_;
  std::unique_ptr<tinker::TinkerFront> tinker_;  // Null: no Tinker API.
  std::shared_ptr<HttpServer> console_;          // Null: none of its own.
  Mutex drain_mu_;
  std::string address_;
  std::string metrics_address_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_DAEMON_LISTENERS_H_
