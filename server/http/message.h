// Requests and replies of an HTTP server, independent of the HTTP library.
#ifndef WEFT_SERVER_HTTP_MESSAGE_H_
#define WEFT_SERVER_HTTP_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace weft::server {

inline constexpr char kJsonType[] = "application/json";
inline constexpr char kProtobufType[] = "application/x-protobuf";
// In a reply to the edge: HOST:PORT of the edge that is to get the request.
inline constexpr char kOwnerHeader[] = "weft-owner";

// A request. While only its header has arrived, `body` is empty.
struct HttpRequest {
  std::string method;  // As the client sent it.
  std::string target;  // Path and query, as the client sent them.
  // Header fields; a field that the client did not send is empty. `api_key`,
  // `authorization`, `idempotency_key` and the fields of a proxy are also empty
  // if they came twice.
  std::string api_key;
  std::string authorization;
  std::string idempotency_key;  // Equal in all tries of one request.
  std::string content_type;
  std::string content_encoding;
  std::string accept;
  // Where the client believes to be: X-Forwarded-Host, otherwise Host.
  std::string host;
  std::string forwarded_proto;
  std::string original_uri;
  // The edge sends these three. It has a `door` if it can send the request to
  // another edge. A sample may be from a `checkpoint` of the adapter.
  std::string door;
  std::string adapter_id;
  std::string checkpoint;

  std::string body;
  // The client's address (ClientAddress); empty if it is unknown.
  std::string peer;
  // The reservation of the body's bytes (FairBudget::Reserve). The reservation
  // ends when its last copy is destroyed.
  std::shared_ptr<void> reserved;
};

// A body of `size` bytes that is sent in pieces. `next` reads one piece and
// passes it to `then`, later and on the server's thread. An empty piece means
// an error and ends the connection.
struct ReplyStream {
  uint64_t size = 0;
  std::function<void(std::function<void(std::string piece)> then)> next;
};

struct HttpReply {
  int status = 200;
  std::string content_type = kJsonType;
  std::string body;
  // More header fields, as pairs (name, value).
  std::vector<std::pair<std::string, std::string>> headers = {};
  // The value of the header Retry-After in seconds. If it is 0, the header is
  // not sent.
  int retry_after_seconds = 0;
  // If present, the stream is sent in place of `body`.
  std::optional<ReplyStream> stream;
};

// Sends the reply to a request. Call it once. Each copy keeps the connection
// alive, so all copies must be destroyed before the server.
// Threads: the server's.
using Respond = std::function<void(HttpReply)>;

// The handler's decision about a header: a refusal, or the most bytes that the
// body may have. The body's bytes count for `holder` in the budget
// (fair_budget.h).
struct Admission {
  std::optional<HttpReply> refusal;
  uint64_t max_body_bytes = 0;
  std::string holder;
  // Handles the request after its body has arrived, and responds now or later.
  std::function<void(HttpRequest, const Respond&)> serve;
};
// Admits or refuses a request by its header, before the server reads the body.
// Threads: the server's.
using HttpHandler = std::function<Admission(const HttpRequest& header)>;

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_MESSAGE_H_
