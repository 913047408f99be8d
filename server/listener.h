// Listens for clients' connections. gRPC 1.51's own listener stops accepting
// forever when the process has no descriptor left (CVE-2023-4785). It also has
// no limit on connections. This listener waits for descriptors and has a limit.
#ifndef WEFT_SERVER_LISTENER_H_
#define WEFT_SERVER_LISTENER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server_builder.h"
#include "prometheus/registry.h"
#include "src/files/file_io.h"
#include "src/metrics/metrics.h"

namespace weft {

// Accepts connections on its own thread.
// Threads: one thread creates, starts and destroys it.
class Listener {
 public:
  // Binds HOST:PORT on every address of the host that can be bound. 0.0.0.0 and
  // [::] mean all addresses of both families. Connections wait in the kernel
  // until Start. If max_connections is 0, the limit is half of the files that
  // the process may open, at most 10000. Errors: UNAVAILABLE if no address can
  // be bound, or if the port is taken on any address; those of ParseHostPort;
  // those of ErrnoStatus.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Listener>> Bind(
      const std::string& listen, int max_connections,
      prometheus::Registry* registry);

  // Stops accepting connections. Open connections stay open.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  [[nodiscard]] int port() const { return port_; }

  // Passes accepted connections to `acceptor`. REQUIRES: the server of
  // `acceptor` runs.
  void Start(
      std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);

 private:
  Listener(int max_connections, prometheus::Registry* registry);

  void Loop();
  // Accepts one connection from the socket `listener`. Returns false if no
  // descriptor or memory is left. The caller then waits before it tries again.
  [[nodiscard]] bool Accept(int listener);
  // Removes closed connections from open_.
  void Sweep();

  const size_t max_connections_;
  prometheus::Gauge& connections_;
  LabelledCounters refused_;
  std::vector<UniqueFd> sockets_;
  int port_ = 0;
  UniqueFd stop_;  // Becomes readable when the thread must end.
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  // Open connections: maps a descriptor to its socket's inode. If gRPC has
  // closed a connection, its descriptor is closed or belongs to another inode.
  // Only thread_ uses this member.
  std::unordered_map<int, ino_t> open_;
  absl::Time swept_ = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace weft

#endif  // WEFT_SERVER_LISTENER_H_
