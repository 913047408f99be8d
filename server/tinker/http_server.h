// The HTTP/1.1 server under the Tinker front: connections, limits, time-outs.
//
// One thread, the front's, serves all connections and runs all handlers, so
// that nothing of the front needs a lock. It only parses, translates and hands
// over; what takes long runs on the engine's threads.
#ifndef WEFT_SERVER_TINKER_HTTP_SERVER_H_
#define WEFT_SERVER_TINKER_HTTP_SERVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/tinker/http_message.h"

namespace weft::tinker {

struct HttpLimits {
  uint32_t max_header_bytes = 32 << 10;
  // The bodies of all connections together that are read or served; half of it
  // for one holder.
  int64_t max_pending_bytes = int64_t{512} << 20;
  size_t max_connections = 1024;
  // A request, once it has begun, and a reply must pass within this time.
  absl::Duration transfer = absl::Seconds(60);
  // Between requests.
  absl::Duration idle = absl::Seconds(120);
};

// Replies of its own: 400 (not HTTP), 411 (a body without its length), 413
// (body), 431 (headers), 429 and 503 with Retry-After (no room for a body now:
// of this holder, of anybody); each closes the connection, as any refusal of a
// header does whose body has not come. A connection above max_connections is
// closed at once.
// Threads: one makes, starts and destroys it; Post and After from any.
class HttpServer {
 public:
  // Errors: UNAVAILABLE when the address cannot be listened on.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<HttpServer>> Bind(
      const std::string& listen, const HttpLimits& limits);

  // Closes all connections and joins the thread. What was posted and has not
  // run never runs.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  [[nodiscard]] int port() const;
  // Serves with `handler` from now on.
  void Start(HttpHandler handler);
  // Ends the thread; connections are no longer served.
  void Stop();

  // Runs `work` on the front's thread, soon or after a time.
  void Post(std::function<void()> work);
  void After(absl::Duration delay, std::function<void()> work);

 private:
  class Core;
  explicit HttpServer(std::unique_ptr<Core> core);

  const std::unique_ptr<Core> core_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_SERVER_H_
