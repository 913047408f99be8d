// An HTTP/1.1 server with its limits and time-outs: of the Tinker API with the
// console, and of the metrics page with health.
//
// One thread serves all connections and runs all handlers, so their state needs
// no lock. Other threads do the work that takes long.
//
// Boost.Beast reads and writes the bytes. Debian has it as headers, and it
// offers every limit that a server needs against a hostile client (header and
// body bytes, and time for each read and write) without a framework, a thread
// pool or a JSON parser of its own.
#ifndef WEFT_SERVER_HTTP_SERVER_H_
#define WEFT_SERVER_HTTP_SERVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/http/message.h"

namespace weft::server {

struct HttpOptions {
  uint32_t max_header_bytes = 32 << 10;
  // The most bytes of all bodies that are being read or served. One holder may
  // have half of these bytes (fair_budget.h).
  int64_t max_pending_bytes = int64_t{512} << 20;
  // The most connections that serve requests of holders. One holder may have
  // half of them. Connections that wait, and those of strangers, are evicted
  // before there are many more.
  size_t max_connections = 1024;
  // The longest time from a request's first byte to the end of its header.
  absl::Duration header = absl::Seconds(10);
  // The longest time to receive a body, and the longest time to send a reply.
  // In a streamed reply, each piece may take this long.
  absl::Duration transfer = absl::Seconds(60);
  // The longest time that a connection may wait for its next request.
  absl::Duration idle = absl::Seconds(120);
  // Names of this server, besides localhost and addresses (host.h).
  std::vector<std::string> allowed_hosts = {};
};

// A server that listens on one address. The server itself refuses requests with
// these statuses: 400 (the request is not HTTP, or has not one Host), 403 (a
// page of another site sent it), 411 (the body is chunked, so its length is
// unknown), 413 (the body is too large), 421 (Host names another server), 429
// (the holder has its half of the bodies or of the connections), 431 (the
// header is too large), 501 (Transfer-Encoding is unknown), 503 (there is no
// room for the body, or all connections serve requests). Replies 429 and 503
// have the header Retry-After. If a body would follow a refused header, the
// server closes the connection. While many more than max_connections are open,
// each new one takes the place of the one that has waited longest. Threads: one
// thread makes, starts, stops and destroys the server; any thread may call Post
// and After.
class HttpServer {
 public:
  // Listens on "HOST:PORT". Errors, which name the flag: INVALID_ARGUMENT if
  // `listen` has another form; UNAVAILABLE if the system does not know the
  // host, or cannot listen on the address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Bind(
      const std::string& flag, const std::string& listen,
      const HttpOptions& options);

  // Stops, and closes all connections. Posted work that has not begun never
  // runs.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Returns `listen`; if its port is 0, with the port that the system has
  // chosen.
  const std::string& address() const;
  // Starts the server's thread, which serves requests with `handler`.
  void Start(HttpHandler handler);
  // Ends and joins the server's thread; no connection is served any more.
  void Stop();

  // Run `work` on the server's thread: Post as soon as possible, After when
  // `delay` has passed.
  void Post(std::function<void()> work);
  void After(absl::Duration delay, std::function<void()> work);

 private:
  class Core;
  explicit HttpServer(std::unique_ptr<Core> core);

  const std::unique_ptr<Core> core_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_SERVER_H_
