// Serves the Tinker API (README.md). One thread, the front's, parses a request,
// translates it to a message of weft.v1 and gives it to the engine as a gRPC
// call does (engine_port.h, call.h). Of the threads of turns.h two read
// downloads, and one inflates and parses large bodies and all training data. In
// both, tenants take turns. What must outlive the process is in the ledger.
#ifndef WEFT_SERVER_TINKER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_TINKER_FRONT_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/call/engine_port.h"

namespace weft::server::tinker {

struct Front;

// Threads: one thread makes and destroys the object; any thread may call
// EngineIsReady.
class TinkerFront {
 public:
  // Serves a request by its header if it is for other pages on the same
  // address, such as the console; nullopt otherwise.
  using AdmitPage = std::optional<Admission> (*)(const EnginePort& port,
                                                 const HttpRequest& header);

  // Listens on core->options.tinker_listen, even while the engine starts.
  // REQUIRES: `core` outlives this object and its calls.
  // Errors: those of HttpServer::Bind.
  static absl::StatusOr<std::unique_ptr<TinkerFront>> Start(
      ServiceCore* core, AdmitPage admit_page);

  // Closes all connections.
  ~TinkerFront();
  TinkerFront(const TinkerFront&) = delete;
  TinkerFront& operator=(const TinkerFront&) = delete;

  // Returns HOST:PORT. If the configured port is 0, the system has chosen PORT.
  const std::string& address() const { return server_->address(); }

  // Call this once, when the engine is ready. The front then reads its ledger
  // and runs the steps again. Until then it refuses requests, and until all
  // these steps have futures, it refuses other steps.
  void EngineIsReady();

 private:
  TinkerFront(ServiceCore* core, std::shared_ptr<HttpServer> server);

  // Runs `work` on the front's thread whenever `interval` has passed.
  void Every(absl::Duration interval, std::function<void()> work);

  const std::shared_ptr<HttpServer> server_;
  const std::unique_ptr<Front> front_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_TINKER_FRONT_H_
