#include "server/grpc/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/address.h"
#include "src/base/clock.h"
#include "src/base/options/options.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr size_t kMaxDefault = 10000;
constexpr int kBacklog = 1024;
constexpr absl::Duration kSweepInterval = absl::Seconds(1);
constexpr int kIdleMillis = 1000;
constexpr int kBackOffMillis = 100;

enum Refusal : uint8_t { kLimit, kNoDescriptor };

// Listens on `address` with the port `*port`. Returns the descriptor and sets
// `*port` to the port that was chosen. Returns -errno if it cannot listen.
int Open(const addrinfo& address, int* port) {
  UniqueFd fd(
      socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return -errno;
  const int on = 1;
  // Permits a port that still has closed connections in TIME_WAIT. bind still
  // refuses a port on which another socket listens.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage name = {};
  std::memcpy(&name, address.ai_addr, address.ai_addrlen);
  if (address.ai_family == AF_INET6) {
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&name);
    v6->sin6_port = htons(static_cast<uint16_t>(*port));
    const int v6_only = IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr) ? 0 : 1;
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only));
  } else {
    reinterpret_cast<sockaddr_in*>(&name)->sin_port =
        htons(static_cast<uint16_t>(*port));
  }
  auto* const raw = reinterpret_cast<sockaddr*>(&name);
  socklen_t size = address.ai_addrlen;
  if (bind(fd.get(), raw, size) != 0 || listen(fd.get(), kBacklog) != 0 ||
      getsockname(fd.get(), raw, &size) != 0) {
    return -errno;
  }
  *port = ntohs(address.ai_family == AF_INET6
                    ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                    : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
  return fd.Release();
}

// The addresses of a host; null if there are none.
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses Resolve(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "0", &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

// Returns whether a server listens on the Unix socket.
bool IsTaken(const sockaddr_un& place) {
  const UniqueFd probe(
      socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // EAGAIN: the server has too many connections that it has not accepted.
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&place),
                 sizeof(place)) == 0 ||
         errno == EAGAIN;
}

absl::Status Refused(const std::string& listen, const std::string& problem) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on --listen=", listen, ": ", problem));
}

}  // namespace

size_t MaxConnections(const ServerOptions& options) {
  if (options.max_connections > 0) {
    return static_cast<size_t>(options.max_connections);
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMaxDefault;
  return std::clamp<size_t>(limit.rlim_cur / 3, 1, kMaxDefault);
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(
    const std::string& listen, size_t max_connections,
    prometheus::Registry* registry) {
  std::unique_ptr<Listener> listener(new Listener(max_connections, registry));
  const std::string path = UnixSocketPath(listen);
  WEFT_RETURN_IF_ERROR(path.empty() ? listener->BindPort(listen)
                                    : listener->BindPath(path));
  listener->stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (listener->stop_.get() < 0) return ErrnoStatus(errno, "making an event");
  return listener;
}

absl::Status Listener::BindPort(const std::string& listen) {
  WEFT_ASSIGN_OR_RETURN(HostPort place, ParseHostPort("listen", listen));
  int port = place.port;
  int error = 0;  // EADDRINUSE if any Open failed with it; else the last errno.
  const auto open_all = [&](const std::string& host) {
    const Addresses addresses = Resolve(host);
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      const int fd = Open(*a, &port);
      if (fd >= 0) {
        sockets_.emplace_back(fd);
      } else if (error != EADDRINUSE) {
        error = -fd;
      }
    }
  };
  // Opens [::] for 0.0.0.0, because [::] accepts both families. Falls back to
  // 0.0.0.0 if the machine has no IPv6.
  if (place.host == "0.0.0.0") open_all("::");
  if (sockets_.empty() && error != EADDRINUSE) open_all(place.host);
  // Some addresses may fail, such as the IPv6 address of "localhost" on a
  // machine without IPv6. One open address is enough. But if the port is taken
  // on any address, Bind fails.
  if (sockets_.empty() || error == EADDRINUSE) {
    return Refused(listen,
                   error == 0
                       ? "the host has no address"
                       : absl::StrCat(std::generic_category().message(error),
                                      error == EADDRINUSE ? kPortTaken : ""));
  }
  address_ = absl::StrCat(listen.substr(0, listen.rfind(':') + 1), port);
  return absl::OkStatus();
}

absl::Status Listener::BindPath(const std::string& path) {
  address_ = absl::StrCat("unix:", path);
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return ErrnoStatus(errno, "making a socket");
  sockaddr_un place = {};
  place.sun_family = AF_UNIX;
  path.copy(place.sun_path, sizeof(place.sun_path) - 1);
  if (IsTaken(place)) return Refused(address_, "another server listens there");
  struct stat found = {};
  if (lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) {
    unlink(path.c_str());
  }
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&place), sizeof(place)) != 0 ||
      chmod(path.c_str(), 0660) != 0 || listen(fd.get(), kBacklog) != 0) {
    return Refused(address_, std::generic_category().message(errno));
  }
  if (lstat(path.c_str(), &found) == 0) inode_ = found.st_ino;
  path_ = path;
  sockets_.push_back(std::move(fd));
  return absl::OkStatus();
}

Listener::Listener(size_t max_connections, prometheus::Registry* registry)
    : max_connections_(max_connections),
      connections_(AddGauge(registry, "weft_connections",
                            "Open connections of clients.")),
      refused_(registry, "weft_connections_refused_total",
               "Connections refused at --max-connections (limit), and times "
               "that no file descriptor was left for one (descriptors).",
               "reason", {"limit", "descriptors"}) {}

Listener::~Listener() {
  // Another process may have put its own socket there. While this one is open,
  // no other file has its inode.
  struct stat found = {};
  if (!path_.empty() && lstat(path_.c_str(), &found) == 0 &&
      found.st_ino == inode_) {
    unlink(path_.c_str());
  }
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void Listener::Start(
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  thread_ = std::thread([this] { Loop(); });
}

void Listener::Loop() {
  std::vector<pollfd> waited = {{stop_.get(), POLLIN, 0}};
  for (const UniqueFd& socket : sockets_) {
    waited.push_back({socket.get(), POLLIN, 0});
  }
  bool has_descriptors = true;
  for (;;) {
    // Without a free descriptor, waits only for stop_. A listening socket with
    // a waiting connection is always readable, so poll would return at once.
    const size_t count = has_descriptors ? waited.size() : 1;
    poll(waited.data(), count, has_descriptors ? kIdleMillis : kBackOffMillis);
    if ((waited[0].revents & POLLIN) != 0) return;
    if (!has_descriptors) {
      has_descriptors = true;
      continue;
    }
    if (SteadyNow() - swept_ > kSweepInterval) Sweep();
    for (size_t i = 1; i < waited.size() && has_descriptors; ++i) {
      if (waited[i].revents != 0) has_descriptors = Accept(waited[i].fd);
    }
  }
}

bool Listener::Accept(int listener) {
  UniqueFd fd(
      accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd.get() < 0) {
    // An error that is not listed here concerns only one connection, which no
    // longer exists.
    const bool exhausted = errno == EMFILE || errno == ENFILE ||
                           errno == ENOBUFS || errno == ENOMEM;
    if (exhausted) refused_[kNoDescriptor].Increment();
    return !exhausted;
  }
  if (open_.size() >= max_connections_) Sweep();
  if (open_.size() >= max_connections_) {
    refused_[kLimit].Increment();
    return true;
  }
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  struct stat socket = {};
  if (fstat(fd.get(), &socket) != 0) return true;
  open_[fd.get()] = socket.st_ino;
  connections_.Set(static_cast<double>(open_.size()));
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters
      connection;
  connection.fd = fd.Release();
  acceptor_->HandleNewConnection(&connection);
  return true;
}

void Listener::Sweep() {
  swept_ = SteadyNow();
  std::erase_if(open_, [](const auto& connection) {
    struct stat socket = {};
    return fstat(connection.first, &socket) != 0 ||
           socket.st_ino != connection.second;
  });
  connections_.Set(static_cast<double>(open_.size()));
}

}  // namespace weft::server
