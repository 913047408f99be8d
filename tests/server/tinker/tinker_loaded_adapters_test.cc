// Tests the adapters that the Tinker front loads for sampling sessions. Clients
// delete these adapters over gRPC, and loads fail.
#include <future>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/tinker/adapters.h"
#include "tests/server/tinker/tinker_front_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::server::tinker {
namespace {

constexpr char kDeleteAdapter[] = "DeleteAdapter";
constexpr char kLoadAdapter[] = "LoadCheckpoint";

class TinkerLoadedAdaptersTest : public TinkerFrontTest {
 protected:
  // Makes a sampling session from a checkpoint. Then deletes the adapter that
  // the front has loaded for it, as a client does over gRPC.
  void SampleAndDelete() {
    Start();
    path_ = SaveSampler(NewSession());
    old_ = NewSession();
    ASSERT_EQ(SampleFrom(old_, path_).status, 200);
    std::string adapter;
    engine_->ListAdapters(
        {.after = kSamplerAdapterPrefix, .prefix = kSamplerAdapterPrefix},
        [&adapter](const absl::StatusOr<AdapterPage>& page) {
          adapter = page->adapters.at(0).adapter_id;
        });
    std::promise<absl::Status> deleted;
    engine_->DeleteAdapter(adapter, [&](const absl::StatusOr<bool>& done) {
      deleted.set_value(done.status());
    });
    ASSERT_THAT(deleted.get_future().get(), IsOk());
  }

  std::string path_;
  std::string old_;  // The session whose adapter is deleted.
};

TEST_F(TinkerLoadedAdaptersTest, AnAdapterThatAClientDeletesIsLoadedAgain) {
  SampleAndDelete();
  const int loads = Calls(kLoadAdapter);
  EXPECT_EQ(SampleFrom(old_, path_, 1).status, 200);
  EXPECT_EQ(SampleFrom(old_, path_, 2).status, 200);
  EXPECT_EQ(Calls(kLoadAdapter), loads + 1);
  EXPECT_EQ(engine_->num_adapters(), 2u);
  Finish(old_);
  EXPECT_TRUE(Eventually([this] { return engine_->num_adapters() == 1; }));
}

TEST_F(TinkerLoadedAdaptersTest, ASessionThatEndsLeavesALoadToThoseWhoWait) {
  SampleAndDelete();
  const int loads = Calls(kLoadAdapter);
  engine_->Hold();
  auto waiting = SampleFromLater(NewSession(), path_);
  ASSERT_TRUE(Eventually([&] { return Calls(kLoadAdapter) > loads; }));
  // The next deletion will fail. If Finish wrongly tried a deletion now,
  // SweepDeletions would retry the deletion after the load, and the last check
  // would fail.
  engine_->FailNext(absl::InternalError("no"), kDeleteAdapter);
  Finish(old_);
  engine_->Release();
  EXPECT_EQ(waiting.get().status, 200);
  OnFront([](Front& front) { front.adapters.SweepDeletions(); });
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 2u);
}

TEST_F(TinkerLoadedAdaptersTest, ASessionFromBeforeAFailedLoadEndsNoOther) {
  SampleAndDelete();
  const std::string session = NewSession();
  engine_->FailNext(absl::InternalError("the disk failed"), kLoadAdapter);
  EXPECT_EQ(SampleFrom(session, path_).status, 500);
  EXPECT_EQ(SampleFrom(session, path_).status, 200);
  Finish(old_);
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 2u);
  Finish(session);
  EXPECT_TRUE(Eventually([this] { return engine_->num_adapters() == 1; }));
}

TEST_F(TinkerLoadedAdaptersTest, AFailedLoadIsForgottenWithTheLastSession) {
  SampleAndDelete();
  engine_->FailNext(absl::InternalError("the disk failed"), kLoadAdapter);
  EXPECT_EQ(SampleFrom(NewSession(), path_).status, 500);
  Finish(old_);
  AwaitDeletions();
  OnFront([](Front& front) { EXPECT_EQ(front.adapters.num_loaded(), 0u); });
}

TEST_F(TinkerLoadedAdaptersTest, AnAdapterGoesAtTheStartIfNoSessionHasIt) {
  path_ = SaveSampler(StartSession());
  const std::string session = NewSession();
  ASSERT_EQ(SampleFrom(session, path_).status, 200);
  Restart();
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 2u);
  StopFront();
  // A crash came between the load and the note of the sampling session.
  engine_->EraseNote(absl::StrCat("tinker/sampler/", session, ":sample:0"));
  StartFront();
  AwaitDeletions();
  EXPECT_EQ(engine_->num_adapters(), 1u);
}

// The OpenAI front asks for the adapter of each request.
TEST_F(TinkerLoadedAdaptersTest, LoansOfACheckpointShareOneAdapter) {
  const std::string session = StartSession();
  const std::string path = SaveSampler(session);
  const auto lend = [&] {
    return Post("weft/lend_adapter", {{"model_path", path}})["adapter_id"];
  };
  const Json adapter = lend();
  EXPECT_THAT(std::string(adapter),
              ::testing::StartsWith(kSamplerAdapterPrefix));
  EXPECT_EQ(lend(), adapter);
  EXPECT_EQ(Calls(kLoadAdapter), 1);
  EXPECT_EQ(SampleFrom(session, path).status, 200);
  Finish(session);
  AwaitDeletions();
  EXPECT_EQ(lend(),
            adapter);  // It outlives the session, as long as it is lent.
  EXPECT_EQ(Ask("POST", "weft/lend_adapter",
                {{"model_path", "tinker://none/sampler_weights/x"}})
                .status,
            404);
}

}  // namespace
}  // namespace weft::server::tinker
