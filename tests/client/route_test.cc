// How calls find the server that has the state. Servers that stand by are
// servers whose engines refuse calls as such a server does.
#include "client/route.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/weft_client.h"
#include "client/weftctl/weftctl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/clock.h"
#include "src/base/reason.h"
#include "tests/support/canned_server.h"
#include "tests/support/temp_folder.h"

namespace weft::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::SizeIs;

// An address at which nobody listens.
class ClosedPort {
 public:
  ClosedPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, plain, size), 0);
    EXPECT_EQ(getsockname(socket_, plain, &size), 0);
    target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  ~ClosedPort() { close(socket_); }
  ClosedPort(const ClosedPort&) = delete;
  ClosedPort& operator=(const ClosedPort&) = delete;

  const std::string& target() const { return target_; }

 private:
  const int socket_;
  std::string target_;
};

class RouteTest : public ::testing::Test {
 protected:
  // `max_attempts` 1: nothing is repeated.
  static std::unique_ptr<Client> ClientOf(const std::string& target,
                                          int max_attempts = 10) {
    ClientOptions options;
    options.target = target;
    options.timeout = absl::Seconds(20);
    options.retry = {.max_attempts = max_attempts,
                     .initial_delay = absl::Milliseconds(100),
                     .max_delay = absl::Milliseconds(100),
                     .jitter = 0};
    return Client::Connect(options).value();
  }

  // The next call of this RPC is told that another server has its adapter.
  static void NameOwnerOf(const std::string& adapter_id, CannedServer& asked,
                          const std::string& owner, const std::string& rpc) {
    asked.engine().FailNext(MovedTo(owner, adapter_id), rpc);
  }

  // The next call of this RPC, or of any if it is empty, is told who the owner
  // is.
  static void Name(CannedServer& asked, const std::string& owner,
                   const std::string& rpc = "") {
    asked.engine().FailNext(MovedTo(owner), rpc);
  }

  static size_t Arrived(CannedServer& server) {
    return server.engine().seen().arrived.size();
  }

  CannedServer standby_;
  CannedServer owner_;
};

TEST_F(RouteTest, ACallGoesToTheOwnerAndSoDoLaterOnes) {
  Name(standby_, owner_.target());
  const auto client = ClientOf(standby_.target());
  const auto adapter = client->CreateAdapter("a").value();
  EXPECT_TRUE(adapter->OptimStep().get().ok());
  EXPECT_TRUE(client->GetAdapter("a").ok());
  EXPECT_THAT(standby_.engine().seen().arrived,
              ElementsAre(Pair("CreateAdapter", 0)));
  EXPECT_THAT(owner_.engine().seen().applied,
              ElementsAre(Pair("OptimStep", 1)));
}

TEST_F(RouteTest, StepsInFlightRunOnceAndInOrder) {
  constexpr int kSteps = 8;
  Name(standby_, owner_.target());
  const auto adapter = ClientOf(standby_.target())->CreateAdapter("a").value();
  // Both take each other for the owner, until one knows better.
  for (int i = 0; i < kSteps; ++i) Name(owner_, standby_.target());
  for (int i = 0; i < 10 * kSteps; ++i) Name(standby_, owner_.target());
  std::vector<Future<OptimReply>> updates;
  for (int i = 0; i < kSteps; ++i) updates.push_back(adapter->OptimStep());
  for (auto& update : updates) {
    const auto reply = update.get();
    EXPECT_TRUE(reply.ok()) << reply.status();
  }
  std::vector<uint64_t> steps;
  for (const auto& [rpc, step] : owner_.engine().seen().applied) {
    steps.push_back(step);
  }
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST_F(RouteTest, StreamsAndFilesGoThere) {
  const TempFolder temporary;
  const std::string folder = temporary.path() + "/files";
  for (CannedServer* const server : {&standby_, &owner_}) {
    ASSERT_TRUE(ClientOf(server->target())->CreateAdapter("a").ok());
  }
  v1::SampleRequest sample;
  sample.add_prompt(1);
  sample.mutable_config()->set_max_tokens(3);
  std::vector<uint32_t> tokens;
  const auto keep = [&](const v1::SampleStreamResponse& delta) {
    tokens.insert(tokens.end(), delta.tokens().begin(), delta.tokens().end());
    return true;
  };
  // A client of its own for each call, which does not know the owner.
  const auto asks = [this](const char* rpc) {
    Name(standby_, owner_.target(), rpc);
    return ClientOf(standby_.target(), 1);
  };
  EXPECT_TRUE(asks("SampleStream")->SampleStream(sample, keep).ok());
  EXPECT_THAT(tokens, ElementsAre(2, 3, 4));
  absl::Status done = asks("ExportAdapter")->ExportAdapter("a", "", folder);
  EXPECT_TRUE(done.ok()) << done;
  done = asks("ImportAdapter")->ImportAdapter("b", folder).status();
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_TRUE(ClientOf(owner_.target())->GetAdapter("b").ok());
  EXPECT_TRUE(asks("WriteSnapshot")->WriteSnapshot().ok());
  EXPECT_THAT(standby_.engine().seen().arrived, SizeIs(5));
}

TEST_F(RouteTest, AfterThreeHopsComesAPauseAndTheFirstAddress) {
  for (int i = 0; i < 2; ++i) {
    Name(standby_, owner_.target());
    Name(owner_, standby_.target());
  }
  const auto client = ClientOf(standby_.target());
  const absl::Time begin = SteadyNow();
  EXPECT_TRUE(client->CreateAdapter("a").ok());
  EXPECT_GE(SteadyNow() - begin, absl::Milliseconds(100));
  EXPECT_EQ(Arrived(standby_), 3);
  EXPECT_EQ(Arrived(owner_), 2);
}

TEST_F(RouteTest, ACallThatIsNotRepeatedEndsAfterThreeHops) {
  for (int i = 0; i < 4; ++i) {
    Name(standby_, owner_.target());
    Name(owner_, standby_.target());
  }
  const auto client = ClientOf(standby_.target(), 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(client->CreateAdapter("a").status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(client->WriteSnapshot()));
  EXPECT_EQ(Arrived(standby_) + Arrived(owner_), 8);
}

TEST_F(RouteTest, AnOwnerThatIsGoneIsLeftForTheConfiguredAddress) {
  auto gone = std::make_unique<CannedServer>();
  Name(standby_, gone->target());
  const auto client = ClientOf(standby_.target());
  ASSERT_TRUE(client->CreateAdapter("a").ok());
  const std::string old = gone->target();
  gone.reset();
  // It still names the old owner, then nobody, and then another.
  Name(standby_, old);
  Name(standby_, "");
  Name(standby_, owner_.target());
  EXPECT_TRUE(client->CreateAdapter("a").ok());
  EXPECT_EQ(Arrived(owner_), 1);
  EXPECT_EQ(Arrived(standby_), 4);
}

TEST_F(RouteTest, TheNextAddressIsCalledIfOneCannotBeReached) {
  const ClosedPort gone;
  const ClosedPort away;
  for (const std::string& targets :
       {absl::StrCat(gone.target(), ",", owner_.target()),
        absl::StrCat(gone.target(), ", ", away.target(), ",",
                     owner_.target())}) {
    EXPECT_TRUE(ClientOf(targets, 1)->GetInfo().ok());
    EXPECT_TRUE(ClientOf(targets, 1)->WriteSnapshot().ok());
    EXPECT_TRUE(ClientOf(targets, 1)->IsHealthy().value_or(false));
  }
  const auto nobody =
      ClientOf(absl::StrCat(gone.target(), ",", away.target()), 1);
  EXPECT_TRUE(absl::IsUnavailable(nobody->WriteSnapshot()));
}

TEST_F(RouteTest, TheNextAddressIsAskedIfOneKnowsNoOwner) {
  Name(standby_, "");
  standby_.wire().SetRetryHint(5);
  const auto client =
      ClientOf(absl::StrCat(standby_.target(), ",", owner_.target()));
  EXPECT_TRUE(client->CreateAdapter("a").ok());
  EXPECT_EQ(Arrived(owner_), 1);
}

TEST_F(RouteTest, NoCallGoesToWhatNoOwnerCanBe) {
  ClientOptions options;
  options.target = standby_.target();
  options.security.token = "weft_secret";
  for (const char* const owner :
       {"192.0.2.1:5", "http://host:5", "unix:/run/other", "host:5,other:5",
        "host:99999", ":5"}) {
    Name(standby_, owner);
    Name(standby_, owner);
    const auto client = Client::Connect(options).value();
    for (const absl::Status& status :
         {client->CreateAdapter("a").status(), client->WriteSnapshot()}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << owner << status;
      EXPECT_THAT(status.message(), HasSubstr(owner));
      EXPECT_EQ(status.message().find("secret"), std::string::npos);
    }
  }
  EXPECT_EQ(Arrived(standby_), 12);
}

TEST_F(RouteTest, AnAnswerThatComesLateChangesNothing) {
  const auto route = Route::Create("a:5,b:5", {}).value();
  EXPECT_TRUE(route->Follow("a:5", "c:5").ok());
  EXPECT_TRUE(route->Follow("a:5", "d:5").ok());
  route->Leave("a:5");
  EXPECT_EQ(route->target(), "c:5");
  route->Leave("c:5");
  route->Leave("c:5");
  EXPECT_EQ(route->target(), "b:5");
}

TEST_F(RouteTest, CallsForEachAdapterGoToItsOwnerAfterTheFirst) {
  const auto client = ClientOf(standby_.target());
  const auto a = client->CreateAdapter("a").value();
  NameOwnerOf("b", standby_, owner_.target(), "CreateAdapter");
  const auto b = client->CreateAdapter("b").value();
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(a->OptimStep().get().ok());
    EXPECT_TRUE(b->OptimStep().get().ok());
  }
  EXPECT_TRUE(client->WriteSnapshot().ok());
  v1::SampleRequest sample;
  sample.set_adapter_id("b");
  sample.add_prompt(1);
  sample.mutable_config()->set_max_tokens(1);
  EXPECT_TRUE(
      client->SampleStream(sample, [](const auto&) { return true; }).ok());
  EXPECT_THAT(standby_.engine().seen().arrived,
              ElementsAre(Pair("CreateAdapter", 0), Pair("CreateAdapter", 0),
                          Pair("OptimStep", 1), Pair("OptimStep", 2),
                          Pair("WriteSnapshot", 0)));
  EXPECT_THAT(owner_.engine().seen().arrived,
              ElementsAre(Pair("CreateAdapter", 0), Pair("OptimStep", 1),
                          Pair("OptimStep", 2), Pair("SampleStream", 0)));
}

TEST_F(RouteTest, AStreamAndAnUploadFindTheOwnerOfTheirAdapter) {
  ASSERT_TRUE(ClientOf(owner_.target())->CreateAdapter("b").ok());
  const auto client = ClientOf(standby_.target(), 1);
  NameOwnerOf("b", standby_, owner_.target(), "SampleStream");
  v1::SampleRequest sample;
  sample.set_adapter_id("b");
  sample.add_prompt(1);
  sample.mutable_config()->set_max_tokens(1);
  const auto keep = [](const auto&) { return true; };
  EXPECT_TRUE(client->SampleStream(sample, keep).ok());
  EXPECT_TRUE(client->SampleStream(sample, keep).ok());
  EXPECT_EQ(Arrived(standby_), 1);
  EXPECT_EQ(Arrived(owner_), 3);
  const TempFolder temporary;
  const std::string folder = temporary.path() + "/files";
  ASSERT_TRUE(client->ExportAdapter("b", "", folder).ok());
  NameOwnerOf("c", standby_, owner_.target(), "ImportAdapter");
  EXPECT_TRUE(client->ImportAdapter("c", folder).ok());
  EXPECT_TRUE(client->GetAdapter("c").ok());
  EXPECT_EQ(Arrived(standby_), 2);
}

TEST_F(RouteTest, OnlyTheAdaptersOfAServerThatIsGoneAreAskedForAgain) {
  auto gone = std::make_unique<CannedServer>();
  const auto client = ClientOf(standby_.target());
  for (const char* const id : {"a", "b", "c"}) {
    NameOwnerOf(id, standby_, id[0] == 'b' ? owner_.target() : gone->target(),
                "CreateAdapter");
    ASSERT_TRUE(client->CreateAdapter(id).ok());
  }
  gone.reset();
  EXPECT_TRUE(client->CreateAdapter("b").ok());
  EXPECT_EQ(Arrived(standby_), 3);
  for (const char* const id : {"a", "c"}) {
    NameOwnerOf(id, standby_, owner_.target(), "CreateAdapter");
    EXPECT_TRUE(client->CreateAdapter(id).ok());
    EXPECT_TRUE(client->GetAdapter(id).ok());
  }
  EXPECT_TRUE(client->CreateAdapter("b").ok());
  EXPECT_EQ(Arrived(standby_), 5);
  EXPECT_EQ(Arrived(owner_), 5);
  EXPECT_TRUE(client->WriteSnapshot().ok());
  EXPECT_EQ(Arrived(standby_), 6);
}

TEST_F(RouteTest, AnAdaptersCallsPauseAfterThreeHops) {
  for (int i = 0; i < 2; ++i) {
    NameOwnerOf("a", standby_, owner_.target(), "CreateAdapter");
    NameOwnerOf("a", owner_, standby_.target(), "CreateAdapter");
  }
  const auto client = ClientOf(standby_.target());
  const absl::Time begin = SteadyNow();
  EXPECT_TRUE(client->CreateAdapter("a").ok());
  EXPECT_GE(SteadyNow() - begin, absl::Milliseconds(100));
  EXPECT_EQ(Arrived(standby_), 3);
  EXPECT_EQ(Arrived(owner_), 2);
}

TEST_F(RouteTest, AnAddressIsForgottenForAllAdaptersThatWereSentThere) {
  const auto route = Route::Create("a:5,b:5", {}).value();
  EXPECT_TRUE(route->Follow("a:5", "c:5", "x", true).ok());
  EXPECT_TRUE(route->Follow("a:5", "d:5", "y", true).ok());
  EXPECT_TRUE(route->Follow("a:5", "c:5", "z", true).ok());
  // It comes late.
  EXPECT_TRUE(route->Follow("a:5", "d:5", "x", true).ok());
  const auto targets = [&route] {
    std::vector<std::string> found;
    for (const char* const id : {"x", "y", "z", ""}) {
      found.push_back(route->target(id));
    }
    return found;
  };
  EXPECT_THAT(targets(), ElementsAre("c:5", "d:5", "c:5", "a:5"));
  route->Leave("c:5");
  EXPECT_THAT(targets(), ElementsAre("a:5", "d:5", "a:5", "a:5"));
  route->Leave("a:5");
  EXPECT_THAT(targets(), ElementsAre("b:5", "d:5", "b:5", "b:5"));
  route->Restart("y");
  EXPECT_THAT(targets(), ElementsAre("a:5", "a:5", "a:5", "a:5"));
}

TEST_F(RouteTest, ABoundedNumberOfAdaptersIsRemembered) {
  const auto route = Route::Create("a:5", {}).value();
  for (size_t i = 0; i < Route::kMaxAdapters; ++i) {
    EXPECT_TRUE(route->Follow("a:5", "c:5", absl::StrCat(i), true).ok());
  }
  EXPECT_EQ(route->target("0"), "c:5");
  // It is the newest now, and 1 the oldest.
  EXPECT_TRUE(route->Follow("c:5", "d:5", "0", true).ok());
  EXPECT_TRUE(route->Follow("a:5", "c:5", "more", true).ok());
  EXPECT_EQ(route->target("0"), "d:5");
  EXPECT_EQ(route->target("1"), "a:5");
  EXPECT_EQ(route->target("2"), "c:5");
  EXPECT_EQ(route->target("more"), "c:5");
}

TEST_F(RouteTest, EachAddressOfAListIsChecked) {
  const std::string targets = absl::StrCat(owner_.target(), ",b:5");
  EXPECT_TRUE(Route::Create(targets, {}).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(
      Route::Create(targets, {.token = "t"}).status()));
}

TEST_F(RouteTest, WeftctlTakesSeveralAddresses) {
  const ClosedPort gone;
  Name(standby_, owner_.target());
  std::ostringstream out;
  std::ostringstream err;
  const int status =
      weftctl::RunWeftctl({"state", "snapshot", "--server",
                           absl::StrCat(gone.target(), ",", standby_.target())},
                          {.out = out, .err = err});
  EXPECT_EQ(status, 0) << err.str();
  EXPECT_THAT(owner_.engine().seen().arrived,
              ElementsAre(Pair("WriteSnapshot", 0)));
}

TEST_F(RouteTest, WeftctlFindsTheOwnerOfAnAdapter) {
  NameOwnerOf("b", standby_, owner_.target(), "CreateAdapter");
  std::ostringstream out;
  std::ostringstream err;
  const auto run = [&](std::vector<std::string> command) {
    command.insert(command.end(), {"--server", standby_.target()});
    return weftctl::RunWeftctl(command, {.out = out, .err = err});
  };
  // It also gets the adapter, which the first server does not have.
  EXPECT_EQ(run({"adapters", "create", "b"}), 0) << err.str();
  EXPECT_EQ(Arrived(standby_), 1);
  EXPECT_EQ(Arrived(owner_), 1);
  NameOwnerOf("b", standby_, owner_.target(), "SampleStream");
  EXPECT_EQ(run({"sample", "--adapter", "b", "--prompt-tokens", "1",
                 "--max-tokens", "1", "--stream"}),
            0)
      << err.str();
  EXPECT_EQ(Arrived(owner_), 2);
  for (int i = 0; i < 2; ++i) {
    NameOwnerOf("c", standby_, owner_.target(), "CreateAdapter");
    NameOwnerOf("c", owner_, standby_.target(), "CreateAdapter");
  }
  EXPECT_EQ(run({"adapters", "create", "c"}), 0) << err.str();
  EXPECT_EQ(Arrived(standby_), 5);
}

}  // namespace
}  // namespace weft::client
