#include "server/tinker/http_server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/tinker/http_connection.h"
#include "src/config/options.h"

namespace weft::tinker {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;

// The pause after an accept that failed, for example because the process has no
// file descriptor left.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);

class HttpServer::Core {
 public:
  explicit Core(const HttpLimits& limits)
      : limits_(limits),
        budget_(std::make_shared<BodyBudget>(limits.max_pending_bytes)) {}
  ~Core() { Stop(); }

  absl::Status Listen(const std::string& host, int port) {
    boost::system::error_code error;
    const auto found = Tcp::resolver(context_).resolve(
        host, std::to_string(port), Tcp::resolver::passive, error);
    if (error || found.empty()) return Refused(error);
    const Tcp::endpoint endpoint = *found.begin();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(Tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error)
      acceptor_.listen(asio::socket_base::max_listen_connections, error);
    return error ? Refused(error) : absl::OkStatus();
  }

  void Start(HttpHandler handler) {
    handler_ = std::move(handler);
    Accept();
    thread_ = std::thread([this] { context_.run(); });
  }

  void Stop() {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

  int port() const { return acceptor_.local_endpoint().port(); }
  void Post(std::function<void()> work) {
    asio::post(context_, std::move(work));
  }

  void After(absl::Duration delay, std::function<void()> work) {
    const auto timer = std::make_shared<asio::steady_timer>(
        context_, absl::ToChronoNanoseconds(delay));
    timer->async_wait([timer, work = std::move(work)](auto error) {
      if (!error) work();
    });
  }

 private:
  static absl::Status Refused(boost::system::error_code error) {
    return absl::UnavailableError(error.message());
  }

  void Accept() {
    acceptor_.async_accept([this](auto error, Tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) return After(kAcceptPause, [this] { Accept(); });
      if (*connections_ < limits_.max_connections) {
        ServeConnection(std::move(socket), limits_, &handler_,
                        {.count = connections_, .budget = budget_});
      }
      Accept();
    });
  }

  const HttpLimits limits_;
  // The number of open connections. The constructor of Connection adds one, and
  // the destructor of Connection subtracts one.
  const std::shared_ptr<size_t> connections_ = std::make_shared<size_t>(0);
  const std::shared_ptr<BodyBudget> budget_;
  HttpHandler handler_;
  asio::io_context context_{1};
  Tcp::acceptor acceptor_{context_};
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Bind(
    const std::string& listen, const HttpLimits& limits) {
  const auto address = ParseHostPort("tinker-listen", listen);
  if (!address.ok()) return address.status();
  auto core = std::make_unique<Core>(limits);
  const absl::Status bound = core->Listen(address->host, address->port);
  if (!bound.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on --tinker-listen=", listen, ": ", bound.message()));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(core)));
}

HttpServer::HttpServer(std::unique_ptr<Core> core) : core_(std::move(core)) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return core_->port(); }
void HttpServer::Start(HttpHandler handler) {
  core_->Start(std::move(handler));
}
void HttpServer::Stop() { core_->Stop(); }
void HttpServer::Post(std::function<void()> work) {
  core_->Post(std::move(work));
}
void HttpServer::After(absl::Duration delay, std::function<void()> work) {
  core_->After(delay, std::move(work));
}

}  // namespace weft::tinker
