// A request and a reply of the HTTP front, apart from the library that carries
// them.
#ifndef WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
#define WEFT_SERVER_TINKER_HTTP_MESSAGE_H_

#include <functional>
#include <string>

namespace weft::tinker {

inline constexpr char kJsonType[] = "application/json";
inline constexpr char kProtobufType[] = "application/x-protobuf";

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
};

struct HttpReply {
  int status = 200;
  std::string content_type = kJsonType;
  std::string body;
};

// Takes the one reply of a request. Threads: the front's.
using Respond = std::function<void(HttpReply)>;

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_HTTP_MESSAGE_H_
