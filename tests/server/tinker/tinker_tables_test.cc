// Tests the tables of the Tinker front without a server: futures, and samples
// that wait.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tinker/futures.h"

namespace weft::server::tinker {
namespace {

using ::testing::HasSubstr;

class TinkerFuturesTest : public ::testing::Test {
 protected:
  Respond Take() {
    return [this](HttpReply reply) { replies_.push_back(std::move(reply)); };
  }
  // Retrieves the whole result as JSON, however large it is.
  void Retrieve(const std::string& id, const std::string& owner = "me") {
    futures_.Retrieve(id, owner, false, false, Take());
  }

  // Fetches the whole body of a streamed reply, and ends the stream.
  static std::string Drain(HttpReply* reply) {
    std::string body;
    while (body.size() < reply->stream->size) {
      reply->stream->next([&body](const std::string& piece) { body += piece; });
    }
    reply->stream.reset();
    return body;
  }

  static constexpr int64_t kBudget = 4 << 20;
  std::vector<std::function<void()>> later_;
  const std::shared_ptr<FairBudget> memory_ =
      std::make_shared<FairBudget>(kBudget, "bytes");
  Futures futures_{2000, memory_,
                   [this](absl::Duration, std::function<void()> run) {
                     later_.push_back(std::move(run));
                   }};
  std::vector<HttpReply> replies_;
};

TEST_F(TinkerFuturesTest, AnswersAllWhoWaitAndAllWhoComeLater) {
  EXPECT_TRUE(futures_.Open("f", "me", Scope::kTrain));
  EXPECT_FALSE(futures_.Open("f", "me", Scope::kTrain));
  Retrieve("f");
  Retrieve("f");
  EXPECT_TRUE(replies_.empty());
  futures_.Finish("f", FutureResult::Of({{"a", 1}}));
  futures_.Finish("f", FutureResult::Of({{"a", 2}}));
  Retrieve("f");
  ASSERT_EQ(replies_.size(), 3u);
  for (const HttpReply& reply : replies_) EXPECT_EQ(reply.body, R"({"a":1})");
  // The long polls have been answered, so their timeouts do nothing.
  for (const auto& give_up : later_) give_up();
  EXPECT_EQ(replies_.size(), 3u);
}

TEST_F(TinkerFuturesTest, ALongPollEndsAndMayBeMadeAgain) {
  ASSERT_TRUE(futures_.Open("f", "me", Scope::kTrain));
  Retrieve("f");
  later_.at(0)();
  ASSERT_EQ(replies_.size(), 1u);
  EXPECT_EQ(replies_[0].status, 408);
  EXPECT_THAT(replies_[0].body, HasSubstr(R"("queue_state":"active")"));
  Retrieve("f");
  futures_.Finish("f", FutureResult::Of({{"a", 1}}));
  EXPECT_EQ(replies_.back().body, R"({"a":1})");
}

TEST_F(TinkerFuturesTest, AFutureThatIsDroppedAnswersAllWhoWait) {
  futures_.Open("f", "me", Scope::kTrain);
  Retrieve("f");
  futures_.Drop("f");
  futures_.Drop("f");
  ASSERT_EQ(replies_.size(), 1u);
  EXPECT_EQ(replies_[0].status, 410);
  EXPECT_TRUE(futures_.Open("f", "me", Scope::kTrain));
}

TEST_F(TinkerFuturesTest, AnotherOwnersFutureIsNotThere) {
  ASSERT_TRUE(futures_.Open("f", "me", Scope::kTrain));
  futures_.Finish("f", FutureResult::Of({{"secret", 1}}));
  Retrieve("f", "you");
  Retrieve("unknown");
  ASSERT_EQ(replies_.size(), 2u);
  EXPECT_EQ(replies_[0].status, 410);
  EXPECT_EQ(replies_[0].body, replies_[1].body);
}

TEST_F(TinkerFuturesTest, WhoHasTheMostLosesResultsFirst) {
  ASSERT_TRUE(futures_.Open("mine", "me", Scope::kTrain));
  futures_.Finish("mine", FutureResult::Of({{"a", 1}}));
  for (int i = 0; i < 20; ++i) {
    const std::string id = "theirs" + std::to_string(i);
    ASSERT_TRUE(futures_.Open(id, "them", Scope::kTrain));
    futures_.Finish(id, FutureResult::Of({{"a", 1}}));
  }
  EXPECT_TRUE(futures_.Has("mine"));
  EXPECT_FALSE(futures_.Has("theirs0"));
  EXPECT_TRUE(futures_.Has("theirs19"));
}

TEST_F(TinkerFuturesTest, AllWhoFetchALargeResultShareOneBuffer) {
  ASSERT_TRUE(futures_.Open("f", "me", Scope::kTrain));
  const std::string large(3 << 20, 'x');
  futures_.Finish("f", {.body = large, .to_json = [](const std::string& text) {
                          return std::string(text.size(), 'j');
                        }});
  // A copy for each client would not fit in the budget.
  for (int i = 0; i < 100; ++i) {
    futures_.Retrieve("f", "me", false, /*protobuf=*/true, Take());
    ASSERT_EQ(replies_.back().status, 200) << i;
    ASSERT_TRUE(replies_.back().stream.has_value());
  }
  // The other form is another buffer, for which there is no room.
  Retrieve("f");
  EXPECT_EQ(replies_.back().status, 429);
  EXPECT_EQ(Drain(&replies_[0]), large);
  EXPECT_FALSE(memory_->Reserve("other", 2 << 20).ok());
  // The buffer is free when the last client has it.
  replies_.clear();
  EXPECT_TRUE(memory_->Reserve("other", kBudget).ok());
  Retrieve("f");
  EXPECT_EQ(Drain(&replies_[0]), std::string(large.size(), 'j'));
}

TEST_F(TinkerFuturesTest, AHugeResultIsNotMadeIntoJson) {
  ASSERT_TRUE(futures_.Open("f", "me", Scope::kSample));
  futures_.Finish("f", {.body = std::string((4 << 20) + 1, 'x'),
                        .to_json = [](const std::string&) -> std::string {
                          ADD_FAILURE() << "JSON was made";
                          return "";
                        }});
  Retrieve("f");
  EXPECT_EQ(replies_.back().status, 400);
  EXPECT_THAT(replies_.back().body,
              HasSubstr("the result has 4194305 bytes, too many for JSON: send "
                        "Accept: application/x-protobuf"));
}

TEST_F(TinkerFuturesTest, KnowsTheScopeForItsOwnerOnly) {
  ASSERT_TRUE(futures_.Open("f", "me", Scope::kSample));
  EXPECT_EQ(futures_.ScopeOf("f", "me"), Scope::kSample);
  EXPECT_EQ(futures_.ScopeOf("f", "you"), Scope::kRead);
  EXPECT_EQ(futures_.ScopeOf("g", "me"), Scope::kRead);
}

}  // namespace
}  // namespace weft::server::tinker
