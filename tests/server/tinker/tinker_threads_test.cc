// Tests on which thread the Tinker front ends requests whose work has another.
#include <cstring>
#include <future>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/routes.h"
#include "server/tinker/wire.pb.h"
#include "src/base/reason.h"
#include "src/base/threads/mutex.h"
#include "tests/server/tinker/tinker_front_fixture.h"

namespace weft::server::tinker {
namespace {

using ::testing::Each;

constexpr char kApiRoot[] = "/api/v1/";

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

  // Saves weights. Returns the target of the URL of one of their files, without
  // kApiRoot.
  std::string UrlOfFile() {
    const HttpReply urls = Ask("GET", SaveExternal());
    EXPECT_EQ(urls.status, 200) << urls.body;
    const std::string url =
        Json::parse(urls.body)["urls"]["adapter_config.json"];
    return url.substr(url.find(kApiRoot) + std::strlen(kApiRoot));
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

TEST_F(TinkerThreadsTest, RecordsOfSamplesAreReadOnAnotherThread) {
  Start();
  std::thread::id front_thread;
  OnFront([&](Front&) { front_thread = std::this_thread::get_id(); });
  ForwardBackwardRequest request;
  request.set_model_id(
      std::string(Result(CreateModel(NewSession()))["model_id"]));
  request.set_loss_fn("cross_entropy");
  const std::string ids(2 * sizeof(int32_t), '\0');
  Datum* const datum = request.add_data();
  datum->add_model_input()->mutable_encoded_text()->set_tokens(ids);
  Tensor& targets = (*datum->mutable_loss_fn_inputs())["target_tokens"];
  targets.set_dense(ids);
  targets.set_dtype(DTYPE_INT32);
  for (const bool recorded : {false, true}) {
    if (recorded) {
      Span* const span =
          datum->add_loss_fn_input_spans()->mutable_sampled_tokens();
      span->set_sequence_id("s:0");
      span->set_length(2);
    }
    // The client sends the step again that the engine does not take now.
    engine_->FailNext(
        WithReason(absl::ResourceExhaustedError("the disk is full"),
                   {.name = "STATE_DISK_FULL", .values = {}}),
        "ForwardBackward");
    request.set_seq_id(request.seq_id() + 1);
    const auto send = [&] {
      return Send("forward_backward", kProtobufType, "",
                  request.SerializeAsString());
    };
    EXPECT_EQ(send().status, 429);
    const HttpReply reply = send();
    const Json result = Result(Json::parse(reply.body));
    EXPECT_TRUE(result.contains("metrics")) << result;
    EXPECT_EQ(engine_->seen().last_train.replay.spans.empty(), !recorded);
    EXPECT_EQ(engine_->seen().train_thread != front_thread, recorded);
  }
  EXPECT_EQ(Calls("ForwardBackward"), 4);
}

TEST_F(TinkerThreadsTest, TheReplyWithAFileEndsOnTheFrontsThread) {
  Start();
  const std::string file = UrlOfFile();
  EXPECT_EQ(Serve({.method = "GET", .target = absl::StrCat(kApiRoot, file)}, "")
                .status,
            200);
}

TEST_F(TinkerThreadsTest, FewDownloadsOfAnOwnerWaitUntilTheirFilesAreOpen) {
  const std::set<Scope> all = {Scope::kTrain, Scope::kRead};
  const std::string acme = AddKey("acme", all, "acme");
  const std::string other = AddKey("other", all, "other");
  Start();
  key_ = acme;
  const std::string file = UrlOfFile();
  key_ = other;
  const std::string others = UrlOfFile();
  engine_->HoldDownloads();
  std::vector<std::future<HttpReply>> opening;
  for (int i = 0; i < 64; ++i) opening.push_back(AskLater("GET", file));
  EXPECT_TRUE(Eventually([&] { return Calls("DownloadCheckpoint") == 64; }));
  EXPECT_EQ(Ask("GET", file).status, 503);
  opening.push_back(AskLater("GET", others));
  EXPECT_TRUE(Eventually([&] { return Calls("DownloadCheckpoint") == 65; }));
  engine_->ReleaseDownloads();
  for (std::future<HttpReply>& reply : opening) {
    EXPECT_EQ(reply.get().status, 200);
  }
  EXPECT_EQ(Ask("GET", file).status, 200);
}

// The address sanitizer sees what a callback does with a front that is gone.
TEST_F(TinkerThreadsTest, AFileMayBeOpenWhenTheFrontIsGone) {
  Start();
  const std::string file = UrlOfFile();
  engine_->HoldDownloads();
  const std::future<HttpReply> reply = AskLater("GET", file);
  EXPECT_TRUE(Eventually([&] { return Calls("DownloadCheckpoint") == 1; }));
  StopFront();
  engine_->ReleaseDownloads();
  engine_.reset();  // Runs the callback.
}

TEST_F(TinkerThreadsTest, DownloadsGoOnInADrainButNotAtTheEnd) {
  Start();
  const std::string file = UrlOfFile();
  OnFront([](Front& front) { front.port.core()->engine.SetDraining(true); });
  EXPECT_EQ(Ask("GET", file).status, 200);
  OnFront([](Front& front) { front.port.core()->engine.SetFinishing(); });
  EXPECT_EQ(Ask("GET", file).status, 503);
  EXPECT_EQ(Calls("DownloadCheckpoint"), 1);
}

}  // namespace
}  // namespace weft::server::tinker
