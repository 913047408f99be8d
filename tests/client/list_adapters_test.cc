// How clients list the adapters of several servers, which name each other.
#include <chrono>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/weft_client.h"
#include "client/weftctl/weftctl.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "src/base/clock.h"
#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/errors.pb.h"

namespace weft::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers as a server that stands by for the one at `owner`.
grpc::Status Moved(const std::string& owner) {
  v1::ErrorInfo info;
  info.set_reason("MOVED");
  (*info.mutable_metadata())["address"] = owner;
  v1::StatusDetails details;
  details.add_details()->set_value(info.SerializeAsString());
  return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "moved",
                      details.SerializeAsString());
}

// Lists adapters in pages.
class Lister final : public v1::AdapterService::Service {
 public:
  explicit Lister(std::vector<std::vector<std::string>> ids)
      : pages_(std::move(ids)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                             &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    target_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Lister() override { Stop(); }
  void Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& target() const { return target_; }
  int calls() const {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  void NameOthers(std::vector<std::string> others) {
    absl::MutexLock lock(&mu_);
    others_ = std::move(others);
  }
  // Stands by for the server at `owner`.
  void StandBy(std::string owner) {
    absl::MutexLock lock(&mu_);
    owner_ = std::move(owner);
  }
  // Is called after each page. Set it before the first call.
  std::function<void()> after_page = [] {};

  grpc::Status ListAdapters(grpc::ServerContext* /*context*/,
                            const v1::ListAdaptersRequest* request,
                            v1::ListAdaptersResponse* response) override {
    const absl::Status listed = List(*request, *response);
    if (!listed.ok()) return Moved(std::string(listed.message()));
    after_page();
    return grpc::Status::OK;
  }

 private:
  // Errors: the address of the owner if this server stands by.
  absl::Status List(const v1::ListAdaptersRequest& request,
                    v1::ListAdaptersResponse& response) {
    absl::MutexLock lock(&mu_);
    ++calls_;
    if (!owner_.empty()) return absl::FailedPreconditionError(owner_);
    size_t place = 0;
    if (!request.page_token().empty()) {
      EXPECT_TRUE(absl::SimpleAtoi(request.page_token(), &place));
    } else {
      response.mutable_others()->Add(others_.begin(), others_.end());
    }
    for (const std::string& id : pages_[place]) {
      response.add_adapters()->set_adapter_id(id);
    }
    if (place + 1 < pages_.size()) {
      response.set_next_page_token(absl::StrCat(place + 1));
    }
    return absl::OkStatus();
  }

  const std::vector<std::vector<std::string>> pages_;
  mutable absl::Mutex mu_;
  std::vector<std::string> others_ ABSL_GUARDED_BY(mu_);
  std::string owner_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::string target_;
  std::unique_ptr<grpc::Server> server_;
};

class ListAdaptersTest : public ::testing::Test {
 protected:
  ListAdaptersTest() {
    one_.NameOthers({two_.target()});
    two_.NameOthers({one_.target()});
  }

  static std::unique_ptr<Client> ClientOf(const std::string& target) {
    ClientOptions options;
    options.target = target;
    options.timeout = absl::Seconds(20);
    return Client::Connect(options).value();
  }

  static std::vector<std::string> Ids(const v1::ListAdaptersResponse& list) {
    std::vector<std::string> ids;
    for (const v1::Adapter& one : list.adapters()) {
      ids.push_back(one.adapter_id());
    }
    EXPECT_TRUE(list.others().empty());
    EXPECT_TRUE(list.next_page_token().empty());
    return ids;
  }

  Lister one_{{{"c"}, {"e"}}};
  Lister two_{{{"b"}, {"d"}}};
};

TEST_F(ListAdaptersTest, HasTheAdaptersOfAllServers) {
  const auto client = ClientOf(one_.target());
  EXPECT_THAT(Ids(client->ListAdapters().value()),
              ElementsAre("b", "c", "d", "e"));
  EXPECT_THAT(Ids(client->ListAdapters(false).value()), ElementsAre("c", "e"));
  EXPECT_EQ(one_.calls(), 4);
  EXPECT_EQ(two_.calls(), 2);
}

TEST_F(ListAdaptersTest, FollowsAServerThatStandsByAndHearsOfAThird) {
  Lister standby({});
  standby.StandBy(one_.target());
  one_.NameOthers({standby.target()});
  one_.after_page = [&] { one_.NameOthers({two_.target()}); };
  EXPECT_THAT(Ids(ClientOf(one_.target())->ListAdapters().value()),
              ElementsAre("b", "c", "d", "e"));
  EXPECT_EQ(standby.calls(), 1);
  EXPECT_EQ(one_.calls(), 4);
}

TEST_F(ListAdaptersTest, BeginsAnewWhereAnotherServerGoesOn) {
  two_.NameOthers({});
  one_.after_page = [&] { one_.StandBy(two_.target()); };
  EXPECT_THAT(Ids(ClientOf(one_.target())->ListAdapters().value()),
              ElementsAre("b", "d"));
  EXPECT_EQ(one_.calls(), 2);
  EXPECT_EQ(two_.calls(), 3);
}

TEST_F(ListAdaptersTest, NamesAServerThatItDoesNotReach) {
  two_.Stop();
  const absl::Time begin = SteadyNow();
  const auto client = ClientOf(one_.target());
  absl::Status list = client->ListAdapters().status();
  EXPECT_TRUE(absl::IsUnavailable(list)) << list;
  EXPECT_THAT(list.message(),
              HasSubstr(absl::StrCat("no adapters of ", two_.target(), ": ")));
  EXPECT_LT(SteadyNow() - begin, absl::Seconds(10));
  one_.NameOthers({"unix:/run/other"});
  list = client->ListAdapters().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(list)) << list;
  EXPECT_THAT(list.message(), HasSubstr("unix:/run/other"));
}

TEST_F(ListAdaptersTest, WeftctlListsAllServers) {
  std::ostringstream out;
  std::ostringstream err;
  const std::vector<std::string> command = {"adapters", "list", "--server",
                                            one_.target()};
  EXPECT_EQ(weftctl::RunWeftctl(command, {.out = out, .err = err}), 0);
  for (const char* const id : {"\nb ", "\nc ", "\nd ", "\ne "}) {
    EXPECT_THAT(out.str(), HasSubstr(id));
  }
  two_.Stop();
  EXPECT_NE(weftctl::RunWeftctl(command, {.out = out, .err = err}), 0);
  EXPECT_THAT(err.str(),
              HasSubstr(absl::StrCat("no adapters of ", two_.target())));
}

}  // namespace
}  // namespace weft::client
