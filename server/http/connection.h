// One connection of the HTTP server. Only server.cc uses this file.
#ifndef WEFT_SERVER_HTTP_CONNECTION_H_
#define WEFT_SERVER_HTTP_CONNECTION_H_

#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>

#include "server/http/fair_budget.h"
#include "server/http/server.h"

namespace weft::server {

// What the connections of a server share. Threads: the server's.
struct ConnectionPool {
  const HttpOptions options;
  HttpHandler handler;
  const std::shared_ptr<FairBudget> budget;
  // One for each connection that serves a request of a known holder.
  const std::shared_ptr<FairBudget> turns;
  size_t num_open = 0;
  // Functions that close the connections without a turn: those that wait for a
  // whole header, serve strangers, or end. The one that has waited longest is
  // in front.
  std::list<std::function<void()>> waiting = {};
};

// Serves the requests of a connection, one after the other, until the
// connection ends. Returns at once. If too many connections are open, closes
// the front of `waiting`, so that silent clients keep nobody out.
// Threads: the thread that runs the socket's io_context.
void ServeConnection(boost::asio::ip::tcp::socket socket,
                     std::shared_ptr<ConnectionPool> pool);

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_CONNECTION_H_
