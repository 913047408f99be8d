#include "client/connection.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "client/route.h"
#include "client/unary_call.h"
#include "gtest/gtest.h"

namespace weft::client {
namespace {

// Listens, and never answers.
class SilentServer {
 public:
  SilentServer() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, plain, size), 0);
    EXPECT_EQ(listen(socket_, 1), 0);
    EXPECT_EQ(getsockname(socket_, plain, &size), 0);
    target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  ~SilentServer() { close(socket_); }
  SilentServer(const SilentServer&) = delete;
  SilentServer& operator=(const SilentServer&) = delete;

  const std::string& target() const { return target_; }

 private:
  const int socket_;
  std::string target_;
};

// This process has no gRPC server, so gRPC's callback threads end when the
// channel ends. If a callback thread waited for its own end, gRPC would free
// what the thread still uses, and might abort the process.
TEST(ConnectionTest, ACallbackMayLetGoOfTheLastReference) {
  const SilentServer server;
  for (int round = 0; round < 20; ++round) {
    std::shared_ptr<Route> route = Route::Create(server.target(), {}).value();
    const std::weak_ptr<Route> observed = route;
    std::promise<absl::StatusCode> ended;
    auto future = ended.get_future();
    MakeCall(std::move(route), &Server::GetInfo, v1::GetInfoRequest(),
             CallOptions{.timeout = absl::Milliseconds(40),
                         .retry = {.max_attempts = 1}},
             [&observed, ended = std::make_shared<decltype(ended)>(
                             std::move(ended))](const auto& reply) {
               EXPECT_TRUE(observed.expired());
               ended->set_value(reply.status().code());
             })
        ->Start();
    EXPECT_EQ(future.get(), absl::StatusCode::kDeadlineExceeded);
  }
}

TEST(ConnectionTest, ABrokenTokenIsRefusedAndNotShown) {
  for (const char* const token : {"weft_secret\n", "weft_secret\xc2\xa0"}) {
    const absl::Status status =
        OpenChannel("127.0.0.1:1", {.token = token}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(status.message()).find("secret"), std::string::npos);
  }
}

}  // namespace
}  // namespace weft::client
