// Tests the HTTP server with the test's own handlers.
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
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/http/fair_budget.h"
#include "server/http/host.h"
#include "server/http/server.h"
#include "src/base/address.h"
#include "src/base/files/file_io.h"
#include "tests/support/status_matchers.h"

namespace weft::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(FairBudgetTest, AHolderHasHalfOfWhatTheOthersLeave) {
  const auto budget = std::make_shared<FairBudget>(1000, "bytes");
  EXPECT_THAT(
      budget->Reserve("a", 1001),
      IsStatus(absl::StatusCode::kResourceExhausted,
               "takes 1001 bytes, more than the 1000 that it may take"));
  auto first = budget->Reserve("a", 400).value();
  EXPECT_THAT(budget->Reserve("a", 101),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "your requests under way hold 400 bytes, and 101 more "
                       "would exceed your share of the 1000"));
  EXPECT_TRUE(budget->Reserve("a", 100).ok());
  // Who has little may have one large request, but leaves room for others.
  const auto small = budget->Reserve("b", 10);
  const auto large = budget->Reserve("b", 500);
  EXPECT_TRUE(small.ok() && large.ok());
  EXPECT_THAT(budget->Reserve("b", 40),
              IsStatus(absl::StatusCode::kResourceExhausted, "hold 510"));
  EXPECT_THAT(budget->Reserve("c", 90),
              IsStatus(absl::StatusCode::kUnavailable, "no room"));
  const auto third = budget->Reserve("c", 70);
  EXPECT_TRUE(third.ok());
  EXPECT_TRUE(budget->Reserve("d", 1).ok());
  first.reset();
  EXPECT_TRUE(budget->Reserve("c", 90).ok());
}

TEST(FairBudgetTest, WhatIsHeldForLongLeavesOthersTheirHalf) {
  const auto budget = std::make_shared<FairBudget>(1000, "bytes");
  EXPECT_THAT(budget->Reserve("a", 439, FairBudget::Term::kLong),
              IsStatus(absl::StatusCode::kResourceExhausted, "than the 438"));
  const auto first = budget->Reserve("a", 438, FairBudget::Term::kLong);
  EXPECT_TRUE(first.ok());
  EXPECT_THAT(budget->Reserve("a", 1, FairBudget::Term::kLong),
              IsStatus(absl::StatusCode::kResourceExhausted, "until some end"));
  EXPECT_TRUE(budget->Reserve("a", 60).ok()) << "its calls have room";
  EXPECT_THAT(budget->Reserve("b", 251, FairBudget::Term::kLong),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "send it again when others have ended"));
  EXPECT_TRUE(budget->Reserve("b", 430).ok()) << "a request may be large";
}

TEST(FairBudgetTest, WhatWaitsForOthersLeavesThemRoom) {
  const auto budget = std::make_shared<FairBudget>(1600, "bytes", "--memory");
  const auto reserve = [&budget](const char* holder, int64_t amount,
                                 uint64_t ahead) {
    return budget->ReserveRequest(holder, amount, /*beside=*/0, ahead);
  };
  EXPECT_THAT(reserve("a", 401, 1),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "takes 401 bytes, more than the 400 that it may take on "
                       "this server, a part of its --memory 1600"));
  EXPECT_THAT(budget->ReserveRequest("a", 300, /*beside=*/101, 0),
              IsStatus(absl::StatusCode::kResourceExhausted, "takes 401"));
  // Half of a quarter is for what waits: here for it and one of its size.
  EXPECT_THAT(reserve("a", 101, 1),
              IsStatus(absl::StatusCode::kResourceExhausted, "your share"));
  EXPECT_THAT(reserve("a", 20, UINT64_MAX),
              IsStatus(absl::StatusCode::kResourceExhausted, "your share"));
  const auto far = reserve("a", 20, 9);
  EXPECT_THAT(far, IsOk());
  const auto near = reserve("a", 90, 1);
  EXPECT_THAT(near, IsOk());
  EXPECT_THAT(reserve("a", 90, 1),
              IsStatus(absl::StatusCode::kResourceExhausted, "hold 110 bytes"));
  // However much waits, there is room for the largest request that they wait
  // for, and for those of others.
  std::vector<std::shared_ptr<void>> waiting;
  for (int i = 0; i < 50; ++i) {
    const std::string holder(1, static_cast<char>('b' + i));
    for (int64_t bytes = 100; bytes > 0;) {
      auto more = reserve(holder.c_str(), bytes, 1);
      more.ok() ? waiting.push_back(*more) : void(bytes /= 2);
    }
  }
  EXPECT_THAT(reserve("a", 400, 0), IsOk());
  EXPECT_THAT(reserve("z", 400, 0), IsOk());
}

// A client that sends exactly the text that the test gives it.
class Client {
 public:
  explicit Client(const HttpServer& server)
      : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const auto place = ParseHostPort("address", server.address());
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(place->port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ =
        ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address),
                  sizeof(address)) == 0;
  }

  bool Send(const std::string& text) const {
    return connected_ && ::send(socket_.get(), text.data(), text.size(), 0) ==
                             static_cast<ssize_t>(text.size());
  }
  std::string Receive() const {
    std::string text(65536, '\0');
    const ssize_t size = ::recv(socket_.get(), text.data(), text.size(), 0);
    text.resize(size < 0 ? 0 : static_cast<size_t>(size));
    return text;
  }
  // Returns everything until the server closes the connection.
  std::string ReceiveAll() const {
    std::string all;
    for (std::string text; !(text = Receive()).empty();) all += text;
    return all;
  }

 private:
  UniqueFd socket_;
  bool connected_ = false;
};

std::string Post(const std::string& path, size_t bytes) {
  return absl::StrCat("POST ", path,
                      " HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", bytes,
                      "\r\n\r\n");
}

// Each path is a holder of its own, except /stranger. A test
// answers /held itself. Serve answers all other paths at once.
class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() { Start({.max_pending_bytes = 1000}); }
  ~HttpServerTest() override { server_->Stop(); }

  void Start(const HttpOptions& options) {
    if (server_ != nullptr) server_->Stop();
    server_ = HttpServer::Bind("listen", "127.0.0.1:0", options).value();
    server_->Start([this](const HttpRequest& header) {
      return Admission{
          .refusal = std::nullopt,
          .max_body_bytes = 800,
          .holder = header.target == "/stranger" ? "" : header.target,
          .serve = [this](HttpRequest request, const Respond& respond) {
            Serve(std::move(request), respond);
          }};
    });
  }

  void Serve(HttpRequest request, const Respond& respond) {
    if (request.target == "/stream") return respond(Pieces());
    if (request.target == "/proto") {
      return respond({.body = "proto=" + request.forwarded_proto + "."});
    }
    if (request.target == "/who") {
      return respond({.body = request.peer + " at " + request.host + "."});
    }
    if (request.target == "/large") {
      return respond({.body = std::string(20 << 10, 'y')});
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

TEST_F(HttpServerTest, BodiesTogetherHaveAMostAndGiveItBack) {
  const Client held(*server_);
  ASSERT_TRUE(held.Send(Post("/held", 600) + std::string(600, 'x')));
  arrived_.wait();
  const Client same(*server_);
  ASSERT_TRUE(same.Send(Post("/held", 500)));
  EXPECT_THAT(same.Receive(), StartsWith("HTTP/1.1 429 "));
  const Client other(*server_);
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
  const Client again(*server_);
  ASSERT_TRUE(again.Send(Post("/b", 500) + std::string(500, 'x')));
  EXPECT_THAT(again.Receive(), HasSubstr("served"));
}

TEST_F(HttpServerTest, LargeRepliesCountUntilTheyAreWritten) {
  const Client client(*server_);
  ASSERT_TRUE(client.Send(Post("/large", 0)));
  const std::string refused = client.Receive();
  EXPECT_THAT(refused, StartsWith("HTTP/1.1 429 "));
  Start({.max_pending_bytes = 30 << 10});
  for (int i = 0; i < 3; ++i) {  // Two would not fit at a time.
    const Client other(*server_);
    ASSERT_TRUE(other.Send(Post("/large", 0)));
    EXPECT_THAT(other.Receive(), StartsWith("HTTP/1.1 200 ")) << i;
  }
}

TEST_F(HttpServerTest, RequestsFollowEachOtherOnAConnection) {
  const Client client(*server_);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.Send(Post("/a", 3) + "abc"));
    EXPECT_THAT(client.Receive(), HasSubstr("served"));
  }
  ASSERT_TRUE(client.Send(Post("/a", 801)));
  EXPECT_THAT(client.Receive(), StartsWith("HTTP/1.1 413 "));
}

TEST_F(HttpServerTest, AFieldThatComesTwiceCountsAsAbsent) {
  const Client client(*server_);
  const std::string once = "X-Forwarded-Proto: https\r\n";
  const std::string start = "GET /proto HTTP/1.1\r\nHost: localhost\r\n";
  ASSERT_TRUE(client.Send(start + once + "\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("proto=https."));
  ASSERT_TRUE(client.Send(start + once + once + "\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("proto=."));
}

TEST_F(HttpServerTest, AStreamIsSentPieceByPiece) {
  const Client client(*server_);
  ASSERT_TRUE(client.Send(Post("/stream", 0)));
  std::string all;
  while (all.find("3rd") == std::string::npos) all += client.Receive();
  EXPECT_THAT(all, HasSubstr("Content-Length: 9\r\n"));
  EXPECT_THAT(all, HasSubstr("\r\n\r\n1st2nd3rd"));
  // The connection stays open.
  ASSERT_TRUE(client.Send(Post("/a", 0)));
  EXPECT_THAT(client.Receive(), HasSubstr("served"));
}

TEST_F(HttpServerTest, TheEdgeNamesItsClientAndItsOwnAddress) {
  const Client client(*server_);
  const std::string start = "GET /who HTTP/1.1\r\nHost: localhost\r\n";
  ASSERT_TRUE(client.Send(start + "\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr(" at localhost."));
  ASSERT_TRUE(client.Send(start +
                          "X-Real-IP: 203.0.113.9\r\n"
                          "X-Forwarded-Host: weft.example.org\r\n\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("203.0.113.9 at weft.example.org."));
  ASSERT_TRUE(client.Send(start + "X-Real-IP: not\tan address\r\n\r\n"));
  EXPECT_THAT(client.Receive(), HasSubstr("127.0.0.1:"));
}

struct Refusal {
  const char* header;
  const char* status;
};

TEST_F(HttpServerTest, RequestsThatAreMeantForOthersAreRefused) {
  const Refusal refusals[] = {
      {"HTTP/1.1\r\nHost: evil.example\r\n", "421"},
      {"HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", "400"},
      {"HTTP/1.1\r\n", "400"},
      {"HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://evil.example\r\n",
       "403"},
      {"HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://localhost:2\r\n",
       "403"},
      {"HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n", "403"},
      {"HTTP/1.0\r\n", "200"},
      {"HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://localhost:1\r\n",
       "200"}};
  for (const auto& [header, status] : refusals) {
    const Client client(*server_);
    ASSERT_TRUE(client.Send(absl::StrCat("GET /a ", header, "\r\n")));
    EXPECT_THAT(client.Receive(), StartsWith(absl::StrCat("HTTP/1.1 ", status)))
        << header;
  }
}

// A proxy that knows another encoding would read other requests from the same
// bytes.
TEST_F(HttpServerTest, ARequestWithATransferEncodingIsTheLastOfItsConnection) {
  const Refusal refusals[] = {{"identity", "501"},
                              {"gzip", "501"},
                              {"xchunked", "501"},
                              {"chunked, identity", "501"},
                              {"gzip, chunked", "501"},
                              {"chunked", "411"},
                              {"chunked\r\nTransfer-Encoding: x", "501"},
                              {"identity\r\nContent-Length: 3", "501"}};
  for (const auto& [encoding, status] : refusals) {
    const Client client(*server_);
    ASSERT_TRUE(
        client.Send(absl::StrCat("POST /a HTTP/1.1\r\nHost: localhost\r\n"
                                 "Transfer-Encoding: ",
                                 encoding, "\r\n\r\n", Post("/a", 0))));
    const std::string all = client.ReceiveAll();
    EXPECT_THAT(all,
                testing::AnyOf(StartsWith(absl::StrCat("HTTP/1.1 ", status)),
                               StartsWith("HTTP/1.1 400")))
        << encoding;
    EXPECT_THAT(all, testing::Not(HasSubstr("served"))) << encoding;
  }
}

TEST_F(HttpServerTest, SilentClientsKeepNobodyOut) {
  Start({.max_connections = 4});
  std::vector<Client> silent;
  for (int i = 0; i < 80; ++i) {
    silent.emplace_back(*server_);
    ASSERT_TRUE(i % 2 == 0 || silent.back().Send("GET /a HTTP/1.1\r\nHost: "));
  }
  const Client client(*server_);
  ASSERT_TRUE(client.Send(Post("/a", 3) + "abc"));
  EXPECT_THAT(client.Receive(), HasSubstr("served"));
  EXPECT_EQ(silent[0].Receive(), "") << "the one that waited longest is closed";
}

TEST_F(HttpServerTest, WithoutRoomTheAnswerSaysWhenToComeAgain) {
  Start({.max_connections = 1});
  const Client held(*server_);
  ASSERT_TRUE(held.Send(Post("/held", 3) + "abc"));
  arrived_.wait();
  std::vector<Client> others;
  for (int i = 0; i < 80; ++i) {
    others.emplace_back(*server_);
    ASSERT_TRUE(others.back().Send(Post("/a", 0)));
    const std::string reply = others.back().Receive();
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 503 ")) << i;
    EXPECT_THAT(reply, HasSubstr("Retry-After: 1")) << i;
  }
}

TEST_F(HttpServerTest, AHolderHasHalfOfTheConnections) {
  Start({.max_connections = 2});
  const Client held(*server_);
  ASSERT_TRUE(held.Send(Post("/held", 3) + "abc"));
  arrived_.wait();
  const Client again(*server_);
  ASSERT_TRUE(again.Send(Post("/held", 0)));
  EXPECT_THAT(again.Receive(),
              AllOf(StartsWith("HTTP/1.1 429 "), HasSubstr("Retry-After: 1")));
  const Client other(*server_);
  ASSERT_TRUE(other.Send(Post("/a", 0)));
  EXPECT_THAT(other.Receive(), HasSubstr("served"));
  server_->Post([this] { respond_({.body = "held"}); });
  EXPECT_THAT(held.Receive(), HasSubstr("held"));
  ASSERT_TRUE(held.Send(Post("/held", 3) + "abc"));
}

// Nobody is known to the handler of the metrics port.
TEST_F(HttpServerTest, StrangersAreServedBesideAllHolders) {
  Start({.max_connections = 1});
  const Client held(*server_);
  ASSERT_TRUE(held.Send(Post("/held", 3) + "abc"));
  arrived_.wait();
  for (int i = 0; i < 80; ++i) {
    const Client stranger(*server_);
    ASSERT_TRUE(stranger.Send(Post("/stranger", 3) + "abc"));
    EXPECT_THAT(stranger.Receive(), HasSubstr("served"));
  }
}

TEST_F(HttpServerTest, AReplyToHeadHasNoBody) {
  const Client client(*server_);
  ASSERT_TRUE(client.Send("HEAD /a HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  EXPECT_THAT(client.Receive(), testing::EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, AHeaderHasATimeHoweverItsBytesArrive) {
  Start({.header = absl::Milliseconds(200)});
  const Client client(*server_);
  const absl::Time start = absl::Now();
  ASSERT_TRUE(client.Send("GET /a HTTP/1.1\r\n"));
  EXPECT_EQ(client.ReceiveAll(), "");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(HostTest, OnlyAddressesAndOwnNamesAreMeant) {
  const std::vector<std::string> own = {"weft.example.org"};
  for (const char* host :
       {"localhost", "LOCALHOST:8080", "localhost.", "a.localhost:1",
        "127.0.0.1", "10.1.2.3:9400", "[::1]", "[fe80::1]:8080",
        "weft.example.org", "Weft.Example.Org:443"}) {
    EXPECT_TRUE(MayBeMeant(host, own)) << host;
  }
  for (const char* host :
       {"", "evil.example", "evil.example:8080", "localhost.evil.example",
        "127.0.0.1.nip.io", "127.0.0.1:80@evil.example", "localhost:",
        "localhost:8o", "notlocalhost", "[::1", "[::1]x", "[evil.example]",
        "::1", "a.weft.example.org", "1.2.3", "127.0.0.1 evil.example"}) {
    EXPECT_FALSE(MayBeMeant(host, own)) << host;
  }
}

}  // namespace
}  // namespace weft::server
