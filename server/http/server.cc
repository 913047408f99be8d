#include "server/http/server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/http/connection.h"
#include "src/base/address.h"

namespace weft::server {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;

// The pause after an accept that failed, for example because the process has no
// file descriptor left.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);

class HttpServer::Core {
 public:
  Core(const HttpOptions& options, std::string address)
      : address_(std::move(address)),
        pool_(new ConnectionPool{
            .options = options,
            .handler = {},
            .budget = std::make_shared<FairBudget>(options.max_pending_bytes,
                                                   "bytes of bodies"),
            .turns = std::make_shared<FairBudget>(options.max_connections,
                                                  "connections")}) {}
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
    if (error) return Refused(error);
    address_.resize(address_.rfind(':') + 1);
    absl::StrAppend(&address_, acceptor_.local_endpoint().port());
    return absl::OkStatus();
  }

  void Start(HttpHandler handler) {
    pool_->handler = std::move(handler);
    Accept();
    thread_ = std::thread([this] { context_.run(); });
  }

  void Stop() {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

  const std::string& address() const { return address_; }
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
    const bool taken = error == asio::error::address_in_use;
    return absl::UnavailableError(
        absl::StrCat(error.message(), taken ? kPortTaken : ""));
  }

  void Accept() {
    acceptor_.async_accept([this](auto error, Tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) return After(kAcceptPause, [this] { Accept(); });
      ServeConnection(std::move(socket), pool_);
      Accept();
    });
  }

  std::string address_;
  const std::shared_ptr<ConnectionPool> pool_;
  asio::io_context context_{1};
  Tcp::acceptor acceptor_{context_};
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Bind(
    const std::string& flag, const std::string& listen,
    const HttpOptions& options) {
  const auto address = ParseHostPort(flag, listen);
  if (!address.ok()) return address.status();
  auto core = std::make_unique<Core>(options, listen);
  const absl::Status bound = core->Listen(address->host, address->port);
  if (!bound.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot listen on --", flag, "=",
                                               listen, ": ", bound.message()));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(core)));
}

HttpServer::HttpServer(std::unique_ptr<Core> core) : core_(std::move(core)) {}
HttpServer::~HttpServer() = default;
const std::string& HttpServer::address() const { return core_->address(); }
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

}  // namespace weft::server
