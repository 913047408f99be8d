// The requests and replies of the HTTP front, independent of the HTTP library.
#ifndef WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
#define WEFT_SERVER_TINKER_HTTP_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace weft::tinker {

inline constexpr char kJsonType[] = "application/json";
inline constexpr char kProtobufType[] = "application/x-protobuf";

// A request: its header, and later also its body.
struct HttpRequest {
  std::string method;  // In upper case.
  std::string target;  // Path and query, as the client sent them.
  // Header fields; a field that the client did not send is empty.
  std::string api_key;
  std::string authorization;
  std::string content_type;
  std::string content_encoding;
  std::string accept;
  std::string host;
  std::string forwarded_proto;

  std::string body;
  // The client's address as HOST:PORT.
  std::string peer;
  // The body's bytes in the budget (body_budget.h). They are given back when
  // the last copy is destroyed.
  std::shared_ptr<void> reserved;
};

// A body of `size` bytes that is sent in pieces. `next` reads one piece and
// passes it to `then`, later and on the front's thread. An empty piece means an
// error and ends the connection.
struct ReplyStream {
  uint64_t size = 0;
  std::function<void(std::function<void(std::string piece)> then)> next;
};

struct HttpReply {
  int status = 200;
  std::string content_type = kJsonType;
  std::string body;
  // Further header fields.
  std::vector<std::pair<std::string, std::string>> headers = {};
  // The value of Retry-After in seconds; 0 sends no such header.
  int retry_after_seconds = 0;
  // If present, it is sent in place of `body`.
  std::optional<ReplyStream> stream;
};

// Sends the reply of a request; it is called once. It keeps the connection
// alive, so all copies must be destroyed before the server is.
// Threads: the front's.
using Respond = std::function<void(HttpReply)>;

// The verdict on a header: a refusal, or leave to send a body of at most
// `max_body_bytes`, which count for `holder` in the budget.
struct Admission {
  std::optional<HttpReply> refusal;
  uint64_t max_body_bytes = 0;
  std::string holder;
  // Handles the request when its body has arrived. It responds now or later.
  std::function<void(HttpRequest, const Respond&)> serve;
};
// Judges a header before any of the body is read.
// Threads: the front's.
using HttpHandler = std::function<Admission(const HttpRequest& header)>;

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
