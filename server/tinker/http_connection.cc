#include "server/tinker/http_connection.h"

#include <algorithm>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

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

// After the last reply on a connection, the server reads and drops what the
// client still sends, up to this size and for at most this time. Closing the
// socket with unread data would reset the connection, and the client might not
// get the reply.
constexpr size_t kMaxDiscardedBytes = size_t{64} << 20;
constexpr absl::Duration kDiscardTime = absl::Seconds(5);

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Tcp::socket socket, const HttpLimits& limits,
             const HttpHandler* handler, ConnectionPool pool)
      : limits_(limits),
        handler_(handler),
        pool_(std::move(pool)),
        peer_(PeerOf(socket)),
        stream_(std::move(socket)) {
    ++*pool_.count;
    beast::error_code ignored;
    stream_.socket().set_option(Tcp::no_delay(true), ignored);
  }
  ~Connection() { --*pool_.count; }

  // Waits for the next request. An idle connection takes little memory, because
  // the body's memory is reserved only after the header has arrived.
  void Read() {
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.idle));
    parser_.emplace();
    parser_->header_limit(limits_.max_header_bytes);
    // The body has no limit until Judge sets the limit of the route.
    parser_->body_limit(std::numeric_limits<uint64_t>::max());
    parser_->eager(false);
    http::async_read_some(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->ReadHeader(error);
        });
  }

 private:
  void ReadHeader(beast::error_code error) {
    if (error) return Fail(error);
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.transfer));
    if (parser_->is_header_done()) return Judge();
    http::async_read_header(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code failed, size_t) {
          failed ? self->Fail(failed) : self->Judge();
        });
  }

  // Asks the handler whether the client may send the body, and reserves the
  // body's bytes in the budget.
  void Judge() {
    header_ = TakeHeader();
    admission_ = (*handler_)(header_);
    if (admission_.refusal) return Refuse(*std::move(admission_.refusal));
    if (parser_->chunked()) return Refuse(411, "the body has no length");
    const uint64_t bytes = parser_->content_length().value_or(0);
    if (bytes > admission_.max_body_bytes) {
      return Refuse(413, absl::StrCat("the body has more than ",
                                      admission_.max_body_bytes, " bytes"));
    }
    auto reserved =
        pool_.budget->Reserve(admission_.holder, static_cast<int64_t>(bytes));
    if (!reserved.ok()) {
      return Refuse(absl::IsUnavailable(reserved.status()) ? 503 : 429,
                    reserved.status().message());
    }
    header_.reserved = *std::move(reserved);
    parser_->body_limit(admission_.max_body_bytes);
    // A client that has sent "Expect: 100-continue" sends the body only after
    // it gets the reply 100. Continue sends this reply.
    WantsContinue() ? Continue() : ReadBody();
  }

  void ReadBody() {
    // Reserves room, because a single read of Beast takes only as many bytes as
    // the buffer has room for. After the header, the buffer may have room for
    // only 512 bytes.
    const auto bytes = parser_->content_length().value_or(0);
    buffer_.reserve(static_cast<size_t>(std::min(bytes, kBodyPiece)));
    http::async_read(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          error ? self->Fail(error) : self->Serve();
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

  void Serve() {
    stream_.expires_never();
    keep_alive_ = parser_->get().keep_alive();
    header_.body = std::move(parser_->get().body());
    parser_.reset();
    buffer_.shrink_to_fit();
    const auto serve = std::exchange(admission_, {}).serve;
    serve(std::exchange(header_, {}),
          [self = shared_from_this()](HttpReply reply) {
            self->Write(std::move(reply));
          });
  }

  [[nodiscard]] HttpRequest TakeHeader() {
    const auto& message = parser_->get();
    const auto field = [&message](const auto& name) {
      return std::string(message[name]);
    };
    // Returns a header field. A field that comes twice counts as absent,
    // because it is not clear which of its values is meant.
    const auto only = [&message, &field](const auto& name) {
      return message.count(name) == 1 ? field(name) : "";
    };
    return {.method = std::string(message.method_string()),
            .target = std::string(message.target()),
            .api_key = only("X-API-Key"),
            .authorization = only(http::field::authorization),
            .content_type = field(http::field::content_type),
            .content_encoding = field(http::field::content_encoding),
            .accept = field(http::field::accept),
            .host = field(http::field::host),
            .forwarded_proto = only("X-Forwarded-Proto"),
            .body = "",
            .peer = peer_,
            .reserved = nullptr};
  }

  // Handles a failed read. Refuses a request that is malformed or too large.
  // After any other error, ends the connection without a reply.
  void Fail(beast::error_code error) {
    if (error == http::error::body_limit)
      return Refuse(413, "the body is too large");
    if (error == http::error::header_limit) {
      return Refuse(431, "the header is too large");
    }
    if (error == http::error::end_of_stream) return Close();
    if (error.category() ==
        http::make_error_code(http::error::bad_method).category()) {
      return Refuse(400, "the request is malformed");
    }
  }

  void Refuse(int status, absl::string_view why) {
    Refuse({.status = status,
            .body = absl::StrCat(R"({"detail":")", why, R"("})"),
            .retry_after_seconds = status == 429 || status == 503 ? 1 : 0});
  }

  // Sends a refusal. Keeps the connection only if the client asks for that, the
  // header is complete, and no body follows.
  void Refuse(HttpReply reply) {
    keep_alive_ = parser_->is_header_done() && parser_->get().keep_alive() &&
                  !parser_->chunked() &&
                  parser_->content_length().value_or(0) == 0;
    Write(std::move(reply));
  }

  void Write(HttpReply reply) {
    response_.emplace();
    response_->version(11);
    response_->result(static_cast<unsigned>(reply.status));
    response_->set(http::field::content_type, reply.content_type);
    for (const auto& [name, value] : reply.headers) {
      response_->set(name, value);
    }
    if (reply.retry_after_seconds > 0) {
      response_->set(http::field::retry_after,
                     std::to_string(reply.retry_after_seconds));
    }
    response_->body() = std::move(reply.body);
    response_->keep_alive(keep_alive_);
    response_->prepare_payload();
    if (reply.stream) response_->content_length(reply.stream->size);
    stream_.expires_after(absl::ToChronoNanoseconds(limits_.transfer));
    http::async_write(
        stream_, *response_,
        [self = shared_from_this(), stream = std::move(reply.stream)](
            beast::error_code error, size_t) {
          self->response_.reset();
          if (error) return;
          if (stream) return self->WriteStream(*stream, stream->size);
          self->EndReply();
        });
  }

  // Sends the last `left` bytes of a streamed body, piece by piece. The time
  // limit limits_.transfer applies to each piece, because a whole large file
  // may take longer.
  void WriteStream(const ReplyStream& stream, uint64_t left) {
    if (left == 0) return EndReply();
    stream.next([self = shared_from_this(), stream, left](std::string piece) {
      if (piece.empty() || piece.size() > left) return;
      const auto sent = std::make_shared<const std::string>(std::move(piece));
      self->stream_.expires_after(
          absl::ToChronoNanoseconds(self->limits_.transfer));
      boost::asio::async_write(
          self->stream_, boost::asio::buffer(*sent),
          [self, stream, left, sent](beast::error_code error, size_t) {
            if (!error) self->WriteStream(stream, left - sent->size());
          });
    });
  }

  void EndReply() { keep_alive_ ? Read() : Close(); }

  // Closes the sending side. Then reads and drops what the client sends, until
  // the client closes its side or a limit is reached (kMaxDiscardedBytes,
  // kDiscardTime).
  void Close() {
    beast::error_code ignored;
    stream_.socket().shutdown(Tcp::socket::shutdown_send, ignored);
    stream_.expires_after(absl::ToChronoNanoseconds(kDiscardTime));
    Discard(0);
  }

  void Discard(size_t so_far) {
    buffer_.clear();
    stream_.async_read_some(
        buffer_.prepare(kDiscardedPiece),
        [self = shared_from_this(), so_far](beast::error_code error,
                                            size_t bytes) {
          if (!error && so_far + bytes < kMaxDiscardedBytes) {
            self->Discard(so_far + bytes);
          }
        });
  }

  static constexpr size_t kDiscardedPiece = size_t{64} << 10;
  static constexpr uint64_t kBodyPiece = 64 << 10;

  const HttpLimits limits_;
  const HttpHandler* const handler_;
  const ConnectionPool pool_;
  const std::string peer_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  HttpRequest header_;
  Admission admission_;
  std::optional<http::response<http::string_body>> response_;
  bool keep_alive_ = true;
};

}  // namespace

void ServeConnection(Tcp::socket socket, const HttpLimits& limits,
                     const HttpHandler* handler, ConnectionPool pool) {
  std::make_shared<Connection>(std::move(socket), limits, handler,
                               std::move(pool))
      ->Read();
}

}  // namespace weft::tinker
