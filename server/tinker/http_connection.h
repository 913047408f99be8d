// One connection of the HTTP server; http_server.cc alone includes this.
#ifndef WEFT_SERVER_TINKER_HTTP_CONNECTION_H_
#define WEFT_SERVER_TINKER_HTTP_CONNECTION_H_

#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <memory>

#include "server/tinker/body_budget.h"
#include "server/tinker/http_server.h"

namespace weft::tinker {

// What connections share.
struct ConnectionPool {
  std::shared_ptr<size_t> count;  // How many there are.
  std::shared_ptr<BodyBudget> budget;
};

// Serves the connection's requests one after the other until the client or a
// limit ends it. *handler
// outlives the thread that runs the socket's context. Threads: only that one.
void ServeConnection(boost::asio::ip::tcp::socket socket,
                     const HttpLimits& limits, const HttpHandler* handler,
                     ConnectionPool pool);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_CONNECTION_H_
