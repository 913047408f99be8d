// Tests the HTTP server of the Tinker front, with the test's own handlers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/body_budget.h"
#include "server/tinker/http_server.h"
#include "src/files/file_io.h"
#include "tests/support/status_matchers.h"

namespace weft::tinker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(TinkerBodyBudgetTest, OneHolderHasHalfAndEachHasWhatIsLeft) {
  const auto budget = std::make_shared<BodyBudget>(100);
  auto first = budget->Reserve("a", 40);
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(budget->Reserve("a", 11),
              IsStatus(absl::StatusCode::kResourceExhausted, "your requests"));
  EXPECT_TRUE(budget->Reserve("a", 10).ok());
  const auto large = budget->Reserve("b", 60);
  EXPECT_TRUE(large.ok()) << "the first may have more than half";
  EXPECT_THAT(budget->Reserve("c", 1),
              IsStatus(absl::StatusCode::kUnavailable, "no room"));
  first->reset();
  EXPECT_TRUE(budget->Reserve("c", 1).ok());
}

// A client that sends exactly the text that the test gives it.
class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ =
        ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address),
                  sizeof(address)) == 0;
  }

  [[nodiscard]] bool Send(const std::string& text) const {
    return connected_ && ::send(socket_.get(), text.data(), text.size(), 0) ==
                             static_cast<ssize_t>(text.size());
  }
  [[nodiscard]] std::string Receive() const {
    std::string text(65536, '\0');
    const ssize_t size = ::recv(socket_.get(), text.data(), text.size(), 0);
    text.resize(size < 0 ? 0 : static_cast<size_t>(size));
    return text;
  }

 private:
  UniqueFd socket_;
  bool connected_ = false;
};

std::string Post(const std::string& path, size_t bytes) {
  return absl::StrCat("POST ", path,
                      " HTTP/1.1\r\nHost: x\r\nContent-Length: ", bytes,
                      "\r\n\r\n");
}

// Each path has its own share of the byte budget for request bodies. A test
// answers /held itself. Serve answers all other paths at once.
class TinkerHttpTest : public ::testing::Test {
 protected:
  TinkerHttpTest() {
    HttpLimits limits;
    limits.max_pending_bytes = 1000;
    auto server = HttpServer::Bind("127.0.0.1:0", limits);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->Start([this](const HttpRequest& header) {
      return Admission{
          .refusal = std::nullopt,
          .max_body_bytes = 800,
          .holder = header.target,
          .serve = [this](HttpRequest request, const Respond& respond) {
            Serve(std::move(request), respond);
          }};
    });
  }
  ~TinkerHttpTest() override { server_->Stop(); }

  void Serve(HttpRequest request, const Respond& respond) {
    if (request.target == "/stream") return respond(Pieces());
    if (request.target == "/proto") {
      return respond({.body = "proto=" + request.forwarded_proto + "."});
    }
    if (request.target != "/held") return respond({.body = "served"});
    held_ = std::move(request);
    respond_ = respond;
    arrived_.count_down();
  }

  HttpReply Pieces() {
    const auto left = std::make_shared<std::vector<std::string>>(
        std::vector<std::string>{"3rd", "2nd", "1st"});
    HttpReply reply;
    reply.stream = ReplyStream{
        .size = 9, .next = [this, left](std::function<void(std::string)> then) {
          const std::string piece = left->back();
          left->pop_back();
          server_->Post([then = std::move(then), piece] { then(piece); });
        }};
    return reply;
  }

  // Signals that /held has arrived, in a way that ThreadSanitizer understands.
  std::latch arrived_{1};
  std::unique_ptr<HttpServer> server_;
  // Destroyed before the server, because they answer on its sockets.
  HttpRequest held_;
  Respond respond_;
};

TEST_F(TinkerHttpTest, BodiesTogetherHaveAMostAndGiveItBack) {
  const Client held(server_->port());
  ASSERT_TRUE(held.Send(Post("/held", 600) + std::string(600, 'x')));
  arrived_.wait();
  const Client same(server_->port());
  ASSERT_TRUE(same.Send(Post("/held", 500)));
  EXPECT_THAT(same.Receive(), StartsWith("HTTP/1.1 429 "));
  const Client other(server_->port());
  ASSERT_TRUE(other.Send(Post("/b", 500)));
  const std::string refused = other.Receive();
  EXPECT_THAT(refused, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(refused, HasSubstr("Retry-After: 1"));

  std::latch released(1);
  server_->Post([&] {
    held_ = {};
    respond_({.body = "done"});
    released.count_down();
  });
  released.wait();
  EXPECT_THAT(held.Receive(), HasSubstr("done"));
  const Client again(server_->port());
  ASSERT_TRUE(again.Send(Post("/b", 500) + std::string(500, 'x')));
  EXPECT_THAT(again.Receive(), HasSubstr("served"));
}

TEST_F(TinkerHttpTest, RequestsFollowEachOtherOnAConnection) {
  const Client client(server_->port());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.Send(Post("/a", 3) + "abc"));
    EXPECT_THAT(client.Receive(), HasSubstr("served"));
  }
  ASSERT_TRUE(client.Send(Post("/a", 801)));
  EXPECT_THAT(client.Receive(), StartsWith("HTTP/1.1 413 "));
}

TEST_F(TinkerHttpTest, AFieldThatComesTwiceCountsAsAbsent) {
  const Client client(server_->port());
  const std::string once = "X-Forwarded-Proto: https\r\n";
  const std::string start = "GET /proto HTTP/1.1\r\nHost: x\r\n";
  ASSERT_TRUE(client.Send(start + once + "\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("proto=https."));
  ASSERT_TRUE(client.Send(start + once + once + "\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("proto=."));
}

TEST_F(TinkerHttpTest, AStreamIsSentPieceByPiece) {
  const Client client(server_->port());
  ASSERT_TRUE(client.Send(Post("/stream", 0)));
  std::string all;
  while (all.find("3rd") == std::string::npos) all += client.Receive();
  EXPECT_THAT(all, HasSubstr("Content-Length: 9\r\n"));
  EXPECT_THAT(all, HasSubstr("\r\n\r\n1st2nd3rd"));
  // The connection stays open.
  ASSERT_TRUE(client.Send(Post("/a", 0)));
  EXPECT_THAT(client.Receive(), HasSubstr("served"));
}

}  // namespace
}  // namespace weft::tinker
