// Tests on which thread the Tinker front ends requests whose work has another.
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/routes.h"
#include "src/base/mutex.h"
#include "tests/server/tinker_front_fixture.h"

namespace weft::tinker {
namespace {

using ::testing::Each;

// What a Probe has seen. Threads: any.
struct Seen {
  void Note() ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(&mu);
    threads.push_back(std::this_thread::get_id());
  }
  Mutex mu;
  std::vector<std::thread::id> threads ABSL_GUARDED_BY(mu);
  HttpReply reply;
  std::latch replied{1};
};

// A Respond that notes the threads which copy, call and destroy it.
class Probe {
 public:
  explicit Probe(std::shared_ptr<Seen> seen) : seen_(std::move(seen)) {}
  Probe(const Probe& other) : seen_(other.seen_) { seen_->Note(); }
  Probe(Probe&& other) = default;
  Probe& operator=(const Probe&) = delete;
  Probe& operator=(Probe&&) = delete;
  ~Probe() {
    if (seen_ != nullptr) seen_->Note();
  }
  void operator()(HttpReply reply) const {
    seen_->Note();
    seen_->reply = std::move(reply);
    seen_->replied.count_down();
  }

 private:
  std::shared_ptr<Seen> seen_;
};

class TinkerThreadsTest : public TinkerFrontTest {
 protected:
  // Serves the request. Expects that the front's thread alone copies, calls and
  // destroys its Respond. Returns the reply.
  HttpReply Serve(HttpRequest request, std::string body) {
    request.api_key = key_;
    const auto seen = std::make_shared<Seen>();
    std::thread::id front_thread;
    OnFront([&](Front& front) {
      front_thread = std::this_thread::get_id();
      const Admission admission = Admit(front, request);
      request.body = std::move(body);
      if (!admission.refusal) admission.serve(std::move(request), Probe(seen));
    });
    seen->replied.wait();
    // The last copy ends when the work that replied has ended.
    EXPECT_TRUE(Eventually([&] { return seen.use_count() == 1; }));
    MutexLock lock(&seen->mu);
    EXPECT_THAT(seen->threads, Each(front_thread));
    return seen->reply;
  }
};

TEST_F(TinkerThreadsTest, ALargeBodysHandlerRunsOnTheFrontsThread) {
  Start();
  const Json body = {{"model_id", "none"},
                     {"seq_id", 1},
                     {"padding", std::string(1 << 20, 'a')}};
  const HttpReply reply = Serve({.method = "POST",
                                 .target = "/api/v1/asample",
                                 .content_type = kJsonType},
                                body.dump());
  EXPECT_EQ(reply.status, 400) << reply.body;
}

TEST_F(TinkerThreadsTest, TheReplyWithAFileEndsOnTheFrontsThread) {
  Start();
  const HttpReply urls = Ask("GET", SaveExternal());
  ASSERT_EQ(urls.status, 200) << urls.body;
  const std::string url = Json::parse(urls.body)["urls"]["adapter_config.json"];
  // The canned engine writes no file.
  EXPECT_EQ(
      Serve({.method = "GET", .target = url.substr(url.find("/api/"))}, "")
          .status,
      404);
}

}  // namespace
}  // namespace weft::tinker
