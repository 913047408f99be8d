// A request and a reply of the HTTP front, apart from the library that carries
// them.
#ifndef WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
#define WEFT_SERVER_TINKER_HTTP_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace weft::tinker {

inline constexpr char kJsonType[] = "application/json";
inline constexpr char kProtobufType[] = "application/x-protobuf";

// A request's header, and later its body.
struct HttpRequest {
  std::string method;  // Upper case.
  std::string target;  // Path and query as sent.
  // Headers; each empty where it is absent.
  std::string api_key;
  std::string content_type;
  std::string content_encoding;
  std::string accept;
  std::string host;
  std::string body;
  std::string peer;
  // The body's share of the budget (body_budget.h), given back with the last
  // copy.
  std::shared_ptr<void> reserved;
};

// A body that comes in pieces. `next` reads one and calls `then` with it, later
// and on the front's thread; an empty one ends the connection.
struct ReplyStream {
  uint64_t size = 0;
  std::function<void(std::function<void(std::string piece)> then)> next;
};

struct HttpReply {
  int status = 200;
  std::string content_type = kJsonType;
  std::string body;
  // When a client may come again, for a status that invites it.
  int retry_after_seconds = 0;
  // Instead of the body.
  std::optional<ReplyStream> stream;
};

// Takes the one reply of a request. It holds a connection, so it must end
// before the server. Threads: the front's.
using Respond = std::function<void(HttpReply)>;

// What a header allows: a body of at most so many bytes, whose memory counts
// for `holder`; or this reply instead.
struct Admission {
  std::optional<HttpReply> refusal;
  uint64_t max_body_bytes = 0;
  std::string holder;
  // Takes the request with its body, and responds now or later.
  std::function<void(HttpRequest, const Respond&)> serve;
};
// Judges a header before any of the body is read. Threads: the front's.
using HttpHandler = std::function<Admission(const HttpRequest& header)>;

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
