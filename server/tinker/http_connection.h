// One connection of the HTTP server. Only http_server.cc uses this file.
#ifndef WEFT_SERVER_TINKER_HTTP_CONNECTION_H_
#define WEFT_SERVER_TINKER_HTTP_CONNECTION_H_

#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <memory>

#include "server/tinker/body_budget.h"
#include "server/tinker/http_server.h"

namespace weft::tinker {

// The state that all connections share.
struct ConnectionPool {
  std::shared_ptr<size_t> count;  // The number of open connections.
  std::shared_ptr<BodyBudget> budget;
};

// Serves the requests of a connection, one after the other, until the
// connection ends. Returns at once.
// REQUIRES: `*handler` outlives the thread that runs the socket's io_context.
// Threads: the thread that runs the socket's io_context.
void ServeConnection(boost::asio::ip::tcp::socket socket,
                     const HttpLimits& limits, const HttpHandler* handler,
                     ConnectionPool pool);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_CONNECTION_H_
