#include "server/metrics_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "src/config/options.h"

namespace weft {
namespace {

// With the exposer's default of 2 threads, two idle connections would block
// every scrape for 30 s (civetweb's request timeout).
constexpr size_t kThreads = 8;

constexpr absl::Duration kKnockInterval = absl::Milliseconds(5);

// Connects and closes without waiting. A connection wakes civetweb's listening
// thread even before it is accepted.
void Knock(const addrinfo& address) {
  const int fd =
      socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  (void)!connect(fd, address.ai_addr, address.ai_addrlen);
  close(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& listen,
    const std::vector<std::shared_ptr<prometheus::Collectable>>& collectables) {
  std::unique_ptr<prometheus::Exposer> exposer;
  // The constructor of civetweb's server throws exceptions.
  try {
    exposer = std::make_unique<prometheus::Exposer>(listen, kThreads);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on --metrics-listen=", listen, ": ", error.what()));
  }
  for (const auto& collectable : collectables) {
    exposer->RegisterCollectable(collectable);
  }
  const std::string address =
      absl::StrCat(listen.substr(0, listen.rfind(':') + 1),
                   exposer->GetListeningPorts().at(0));
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(std::move(exposer), address));
}

MetricsServer::MetricsServer(std::unique_ptr<prometheus::Exposer> exposer,
                             std::string address)
    : exposer_(std::move(exposer)), address_(std::move(address)) {}

// civetweb's listening thread checks for a stop only once in 2 s and when a
// client connects. No option changes this, so the destructor itself connects.
MetricsServer::~MetricsServer() {
  absl::Notification stopped;
  std::thread stop([&] {
    exposer_.reset();
    stopped.Notify();
  });
  addrinfo* found = nullptr;
  const auto address = ParseHostPort("metrics-listen", address_);
  if (address.ok() &&
      getaddrinfo(address->host.c_str(), absl::StrCat(address->port).c_str(),
                  /*req=*/nullptr, &found) == 0) {
    while (!stopped.WaitForNotificationWithTimeout(kKnockInterval)) {
      Knock(*found);
    }
    freeaddrinfo(found);
  }
  stop.join();
}

}  // namespace weft
