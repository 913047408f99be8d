// Listens for clients' connections. gRPC 1.51's own listener stops accepting
// forever when the process has no descriptor left (CVE-2023-4785). It also has
// no limit on connections. This listener waits for descriptors and has a limit.
#ifndef WEFT_SERVER_GRPC_LISTENER_H_
#define WEFT_SERVER_GRPC_LISTENER_H_

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
#include "src/base/files/file_io.h"
#include "src/base/observe/metrics.h"
#include "src/base/options/options.h"

namespace weft::server {

// Returns --max-connections; if it is 0, a third of the files that the process
// may open, at most 10000. gRPC and the Tinker API may each have so many.
size_t MaxConnections(const ServerOptions& options);

// Accepts connections on its own thread.
// Threads: one thread creates, starts and destroys it.
class Listener {
 public:
  // Binds HOST:PORT on every address of the host that can be bound. 0.0.0.0 and
  // [::] mean all addresses of both families. unix:PATH is a socket that the
  // process's user and group may use; a file that an ended server left there is
  // replaced. Connections wait in the kernel until Start. Errors: UNAVAILABLE
  // if no address can be bound, or if the port or path is taken; those of
  // ParseHostPort; those of ErrnoStatus.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(
      const std::string& listen, size_t max_connections,
      prometheus::Registry* registry);

  // Stops accepting connections. Open connections stay open. Removes the file
  // of a Unix socket.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Returns `listen`; if its port is 0, with the port that the system chose.
  const std::string& address() const { return address_; }

  // Passes accepted connections to `acceptor`. REQUIRES: the server of
  // `acceptor` runs.
  void Start(
      std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);

 private:
  Listener(size_t max_connections, prometheus::Registry* registry);

  absl::Status BindPort(const std::string& listen);
  absl::Status BindPath(const std::string& path);
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
  std::string address_;
  std::string path_;  // The file of a Unix socket; empty without one.
  ino_t inode_ = 0;   // Of path_.
  UniqueFd stop_;     // Becomes readable when the thread must end.
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  // Open connections: maps a descriptor to its socket's inode. If gRPC has
  // closed a connection, its descriptor is closed or belongs to another inode.
  // Only thread_ uses this member.
  std::unordered_map<int, ino_t> open_;
  absl::Time swept_ = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_LISTENER_H_
