#include "server/http/connection.h"

#include <algorithm>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/http/host.h"

namespace weft::server {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using Tcp = boost::asio::ip::tcp;

absl::string_view ToView(boost::beast::string_view text) {
  return {text.data(), text.size()};
}

// Returns the other end of the connection; no address and port 0 if it is gone.
Tcp::endpoint PeerOf(const Tcp::socket& socket) {
  beast::error_code gone;
  return socket.remote_endpoint(gone);
}

// After the last reply on a connection, the server reads and drops what the
// client still sends, up to this size and for at most this time. Closing the
// socket with unread data would reset the connection, and the client might not
// get the reply.
constexpr size_t kMaxDiscardedBytes = size_t{64} << 20;
constexpr absl::Duration kDiscardTime = absl::Seconds(5);

// A reply up to this size takes hardly more memory than its connection, so it
// is sent even if the budget is full.
constexpr size_t kSmallReply = 16 << 10;

// Connections beyond max_connections. They serve strangers and health checks,
// and tell other clients when to come again.
constexpr size_t kSpareConnections = 64;

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Tcp::socket socket, std::shared_ptr<ConnectionPool> pool)
      : pool_(std::move(pool)),
        peer_(PeerOf(socket)),
        stream_(std::move(socket)) {
    ++pool_->num_open;
    beast::error_code ignored;
    stream_.socket().set_option(Tcp::no_delay(true), ignored);
  }
  ~Connection() {
    StopWaiting();
    --pool_->num_open;
  }

  // Waits for the next request. An idle connection takes little memory, because
  // the body's memory is reserved only after the header has arrived.
  void Read() {
    WaitInLine();
    parser_.emplace();
    parser_->header_limit(options().max_header_bytes);
    // The body has no limit until Judge sets the limit of the route.
    parser_->body_limit(std::numeric_limits<uint64_t>::max());
    parser_->eager(false);
    // The client may have sent the request with the one before.
    if (buffer_.size() > 0) return ReadHeader();
    stream_.expires_after(absl::ToChronoNanoseconds(options().idle));
    stream_.async_read_some(
        buffer_.prepare(kHeaderPiece),
        [self = shared_from_this()](beast::error_code error, size_t bytes) {
          self->buffer_.commit(bytes);
          if (!error) self->ReadHeader();
        });
  }

 private:
  const HttpOptions& options() const { return pool_->options; }

  // Puts the connection at the end of the line.
  void WaitInLine() {
    StopWaiting();
    place_ = pool_->waiting.insert(pool_->waiting.end(),
                                   [this] { stream_.close(); });
  }

  void StopWaiting() {
    if (place_) pool_->waiting.erase(*place_);
    place_.reset();
  }

  void ReadHeader() {
    stream_.expires_after(absl::ToChronoNanoseconds(options().header));
    http::async_read_header(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->stream_.expires_after(
              absl::ToChronoNanoseconds(self->options().transfer));
          error ? self->Fail(error) : self->Judge();
        });
  }

  // Returns why no server of this project answers such a request, or none.
  std::optional<HttpReply> Refused() const {
    const auto& message = parser_->get();
    const size_t num_hosts = message.count(http::field::host);
    // HTTP/1.0 has no Host, and no browser speaks it.
    if (num_hosts > 1 || (num_hosts == 0 && message.version() > 10)) {
      return Refusal(400, "a request has one Host");
    }
    if (num_hosts == 1 && !MayBeMeant(ToView(message[http::field::host]),
                                      options().allowed_hosts)) {
      return Refusal(421,
                     "Host is not localhost, an IP address or a name of "
                     "--allowed-hosts");
    }
    if (message.count(http::field::origin) > 0 &&
        !IsSameOrigin(ToView(message[http::field::origin]), header_.host)) {
      return Refusal(403, "Origin is another site");
    }
    // A proxy that knows another encoding would take the body for the next
    // request.
    if (message.count(http::field::transfer_encoding) > 0) {
      return beast::iequals(message[http::field::transfer_encoding], "chunked")
                 ? Refusal(411, "the body has no length")
                 : Refusal(501, "Transfer-Encoding is not known");
    }
    return std::nullopt;
  }

  // Asks the handler whether the client may send the body, and reserves the
  // body's bytes in the budget.
  void Judge() {
    header_ = TakeHeader();
    is_head_ = parser_->get().method() == http::verb::head;
    if (std::optional<HttpReply> refused = Refused()) {
      return Refuse(*std::move(refused));
    }
    admission_ = pool_->handler(header_);
    if (admission_.refusal) return Refuse(*std::move(admission_.refusal));
    holder_ = admission_.holder;
    if (!holder_.empty()) {
      auto turn = pool_->turns->Reserve(holder_, 1);
      if (!turn.ok()) return Refuse(FullReply(turn.status()));
      turn_ = *std::move(turn);
      StopWaiting();
    }
    const uint64_t bytes = parser_->content_length().value_or(0);
    if (bytes > admission_.max_body_bytes) {
      return Refuse(413, absl::StrCat("the body has more than ",
                                      admission_.max_body_bytes, " bytes"));
    }
    auto reserved =
        pool_->budget->Reserve(holder_, static_cast<int64_t>(bytes));
    if (!reserved.ok()) return Refuse(FullReply(reserved.status()));
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

  bool WantsContinue() const {
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

  HttpRequest TakeHeader() {
    const auto& message = parser_->get();
    const auto field = [&message](const auto& name) {
      return std::string(message[name]);
    };
    // Returns a header field. A field that comes twice counts as absent,
    // because it is not clear which of its values is meant.
    const auto only = [&message, &field](const auto& name) {
      return message.count(name) == 1 ? field(name) : "";
    };
    const std::string forwarded_host = only("X-Forwarded-Host");
    const std::string peer =
        absl::StrCat(peer_.address().to_string(), ":", peer_.port());
    return {.method = std::string(message.method_string()),
            .target = std::string(message.target()),
            .api_key = only("X-API-Key"),
            .authorization = only(http::field::authorization),
            .idempotency_key = only("X-Idempotency-Key"),
            .content_type = field(http::field::content_type),
            .content_encoding = field(http::field::content_encoding),
            .accept = field(http::field::accept),
            .host = forwarded_host.empty() ? field(http::field::host)
                                           : forwarded_host,
            .forwarded_proto = only("X-Forwarded-Proto"),
            .original_uri = only("X-Original-URI"),
            .door = only("weft-door"),
            .adapter_id = only("weft-adapter-id"),
            .checkpoint = only("weft-checkpoint"),
            .body = "",
            .peer = ClientAddress(peer, peer_.address().is_loopback(),
                                  only("X-Real-IP")),
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

  static HttpReply Refusal(int status, absl::string_view why) {
    return {.status = status,
            .body = absl::StrCat(R"({"detail":")", why, R"("})"),
            .retry_after_seconds = status == 429 || status == 503 ? 1 : 0};
  }

  void Refuse(int status, absl::string_view why) {
    Refuse(Refusal(status, why));
  }

  // Returns the refusal of a request for which a budget has no room.
  static HttpReply FullReply(const absl::Status& full) {
    return Refusal(absl::IsUnavailable(full) ? 503 : 429, full.message());
  }

  // Sends a refusal. Keeps the connection only if the client asks for that, the
  // header is complete, and no body follows.
  void Refuse(HttpReply reply) {
    const auto& message = parser_->get();
    keep_alive_ = parser_->is_header_done() && message.keep_alive() &&
                  message.count(http::field::transfer_encoding) == 0 &&
                  parser_->content_length().value_or(0) == 0;
    Write(std::move(reply));
  }

  // Charges the holder for the body of a reply until it is written. Replaces a
  // reply for which the budget has no room.
  void Charge(HttpReply* reply) {
    if (is_head_ || reply->body.size() <= kSmallReply) return;
    auto reserved = pool_->budget->Reserve(
        holder_, static_cast<int64_t>(reply->body.size()));
    if (reserved.ok()) {
      reserved_ = *std::move(reserved);
    } else {
      *reply = FullReply(reserved.status());
    }
  }

  void Write(HttpReply reply) {
    Charge(&reply);
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
    // A reply to HEAD has no body. A client would take one for the next reply.
    if (!is_head_) response_->body() = std::move(reply.body);
    response_->keep_alive(keep_alive_);
    response_->prepare_payload();
    if (reply.stream) response_->content_length(reply.stream->size);
    stream_.expires_after(absl::ToChronoNanoseconds(options().transfer));
    http::async_write(
        stream_, *response_,
        [self = shared_from_this(), stream = std::move(reply.stream)](
            beast::error_code error, size_t) {
          self->response_.reset();
          self->reserved_.reset();
          if (error) return;
          if (stream) return self->WriteStream(*stream, stream->size);
          self->EndReply();
        });
  }

  // Sends the last `left` bytes of a streamed body, piece by piece. The time
  // limit options().transfer applies to each piece, because a whole large file
  // may take longer.
  void WriteStream(const ReplyStream& stream, uint64_t left) {
    if (left == 0) return EndReply();
    stream.next([self = shared_from_this(), stream, left](std::string piece) {
      if (piece.empty() || piece.size() > left) return;
      const auto sent = std::make_shared<const std::string>(std::move(piece));
      self->stream_.expires_after(
          absl::ToChronoNanoseconds(self->options().transfer));
      boost::asio::async_write(
          self->stream_, boost::asio::buffer(*sent),
          [self, stream, left, sent](beast::error_code error, size_t) {
            if (!error) self->WriteStream(stream, left - sent->size());
          });
    });
  }

  void EndReply() {
    turn_.reset();
    keep_alive_ ? Read() : Close();
  }

  // Closes the sending side. Then, until its place is needed, reads and drops
  // what the client sends, until the client closes its side or a limit is
  // reached (kMaxDiscardedBytes, kDiscardTime).
  void Close() {
    WaitInLine();
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

  static constexpr size_t kHeaderPiece = 4096;
  static constexpr size_t kDiscardedPiece = size_t{64} << 10;
  static constexpr uint64_t kBodyPiece = 64 << 10;

  const std::shared_ptr<ConnectionPool> pool_;
  const Tcp::endpoint peer_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  HttpRequest header_;
  Admission admission_;
  std::string holder_;  // The owner of the request, or empty.
  std::optional<http::response<http::string_body>> response_;
  std::shared_ptr<void> reserved_;  // The reservation of response_'s body.
  bool keep_alive_ = true;
  bool is_head_ = false;
  // The turn of the request's holder, while the connection is not in line.
  std::shared_ptr<void> turn_;
  // Where the connection is in pool_->waiting, if it is there.
  std::optional<std::list<std::function<void()>>::iterator> place_;
};

}  // namespace

void ServeConnection(Tcp::socket socket, std::shared_ptr<ConnectionPool> pool) {
  const auto connection = std::make_shared<Connection>(std::move(socket), pool);
  const size_t most = pool->options.max_connections + kSpareConnections;
  if (pool->num_open > most && !pool->waiting.empty()) {
    // The connection ends when its read or write fails, which takes it off the
    // list.
    pool->waiting.splice(pool->waiting.end(), pool->waiting,
                         pool->waiting.begin());
    pool->waiting.back()();
  }
  connection->Read();
}

}  // namespace weft::server
