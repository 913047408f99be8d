#include "server/tinker/http_connection.h"

#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::tinker {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using Tcp = boost::asio::ip::tcp;

std::string PeerOf(const Tcp::socket& socket) {
  beast::error_code error;
  const auto peer = socket.remote_endpoint(error);
  return error ? ""
               : absl::StrCat(peer.address().to_string(), ":", peer.port());
}

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Tcp::socket socket, const HttpLimits& limits,
             const HttpHandler* handler, std::shared_ptr<size_t> count)
      : limits_(limits),
        handler_(handler),
        count_(std::move(count)),
        peer_(PeerOf(socket)),
        stream_(std::move(socket)) {
    ++*count_;
    beast::error_code ignored;
    stream_.socket().set_option(Tcp::no_delay(true), ignored);
  }
  ~Connection() { --*count_; }

  // Waits for the first byte of a request before it makes room for one: an idle
  // connection holds next to nothing.
  void Read() {
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.idle));
    parser_.emplace();
    parser_->header_limit(limits_.max_header_bytes);
    parser_->body_limit(limits_.max_body_bytes);
    http::async_read_some(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->ReadRest(error);
        });
  }

 private:
  void ReadRest(beast::error_code error) {
    if (error || parser_->is_done()) return Handle(error);
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.transfer));
    // A client that asks leave to send its body is told to go on.
    if (parser_->is_header_done() && WantsContinue()) return Continue();
    ReadBody();
  }

  void ReadBody() {
    http::async_read(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->Handle(error);
        });
  }

  [[nodiscard]] bool WantsContinue() const {
    return beast::iequals(parser_->get()[http::field::expect], "100-continue");
  }

  void Continue() {
    static constexpr char kContinue[] = "HTTP/1.1 100 Continue\r\n\r\n";
    boost::asio::async_write(
        stream_, boost::asio::buffer(kContinue, sizeof(kContinue) - 1),
        [self = shared_from_this()](beast::error_code error, size_t) {
          if (!error) self->ReadBody();
        });
  }

  void Handle(beast::error_code error) {
    if (error == http::error::body_limit) return Refuse(413, "the body");
    if (error == http::error::header_limit) return Refuse(431, "the header");
    if (error == http::error::end_of_stream) return Close();
    if (error.category() ==
        http::make_error_code(http::error::bad_method).category()) {
      return Refuse(400, "the request");
    }
    if (error) return;
    stream_.expires_never();
    keep_alive_ = parser_->get().keep_alive();
    (*handler_)(TakeRequest(), [self = shared_from_this()](HttpReply reply) {
      self->Write(std::move(reply));
    });
  }

  [[nodiscard]] HttpRequest TakeRequest() {
    auto message = parser_->release();
    const auto field = [&message](const auto& name) {
      return std::string(message[name]);
    };
    // A request with two keys has none: which one would count is a guess.
    const bool one_key = message.count("X-API-Key") == 1;
    return {.method = std::string(message.method_string()),
            .target = std::string(message.target()),
            .api_key = one_key ? field("X-API-Key") : "",
            .content_type = field(http::field::content_type),
            .content_encoding = field(http::field::content_encoding),
            .accept = field(http::field::accept),
            .host = field(http::field::host),
            .body = std::move(message.body()),
            .peer = peer_};
  }

  void Refuse(int status, const char* what) {
    keep_alive_ = false;
    Write({.status = status,
           .body = absl::StrCat(R"({"detail":")", what,
                                R"( is malformed or too large"})")});
  }

  void Write(HttpReply reply) {
    response_.emplace();
    response_->version(11);
    response_->result(static_cast<unsigned>(reply.status));
    response_->set(http::field::content_type, reply.content_type);
    response_->body() = std::move(reply.body);
    response_->keep_alive(keep_alive_);
    response_->prepare_payload();
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.transfer));
    http::async_write(
        stream_, *response_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->response_.reset();
          if (error) return;
          self->keep_alive_ ? self->Read() : self->Close();
        });
  }

  void Close() {
    beast::error_code ignored;
    stream_.socket().shutdown(Tcp::socket::shutdown_send, ignored);
  }

  const HttpLimits limits_;
  const HttpHandler* const handler_;
  const std::shared_ptr<size_t> count_;
  const std::string peer_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<http::response<http::string_body>> response_;
  bool keep_alive_ = true;
};

}  // namespace

void ServeConnection(Tcp::socket socket, const HttpLimits& limits,
                     const HttpHandler* handler,
                     std::shared_ptr<size_t> count) {
  std::make_shared<Connection>(std::move(socket), limits, handler,
                               std::move(count))
      ->Read();
}

}  // namespace weft::tinker
