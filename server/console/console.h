// Serves the console: a page at / that shows what the server does, and the JSON
// that the page asks for about every two seconds. The page is on the address of
// the Tinker API, and on an address of its own (--console-listen).
//
//   GET /                  the page; open to everybody, it holds no data
//   GET /console/v1/NAME   a script or the style sheet of the page
//   GET /console/v1/state  the JSON of state.h; needs a token of scope read, if
//                          the server has tokens: "Authorization: Bearer TOKEN"
// The query of `state` may have q (StateQuery::search), adapter
// (StateQuery::selected), history=1 and compare=CURVE. With checkpoints=1 the
// JSON also has the latest checkpoints of the selected adapter.
#ifndef WEFT_SERVER_CONSOLE_CONSOLE_H_
#define WEFT_SERVER_CONSOLE_CONSOLE_H_

#include <memory>
#include <optional>

#include "server/call/engine_port.h"

namespace weft::server::console {

// Admits or refuses a request by its header, as the server on which
// it listens does. Returns nullopt if the request is not for the console.
// Threads: the HTTP server's.
std::optional<Admission> Admit(const EnginePort& port,
                               const HttpRequest& header);

// Serves the console on an address of its own, core->options.console_listen,
// until the server is stopped. REQUIRES: `core` outlives that. Errors: those of
// HttpServer::Bind. Threads: one.
absl::StatusOr<std::shared_ptr<HttpServer>> StartConsole(ServiceCore* core);

}  // namespace weft::server::console

#endif  // WEFT_SERVER_CONSOLE_CONSOLE_H_
