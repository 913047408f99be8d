// Tests that results do not change when pages run out.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"

namespace weft::engine {
namespace {

using ::testing::SizeIs;

constexpr int64_t kFewPages = 9;

class PreemptionTest : public SampleLoopTest {
 protected:
  void RestartWithFewPages(int64_t max_prefill_tokens = 2048) {
    Restart({.kv_cache_bytes = BytesOfPages(decoder_, kFewPages),
             .max_prefill_tokens = max_prefill_tokens});
  }
  int64_t Preemptions() const {
    return static_cast<int64_t>(Metric("weft_sample_preemptions_total"));
  }
};

TEST_F(PreemptionTest, SequencesTakePagesAsTheyGrow) {
  RestartWithFewPages();
  // All tokens of one request would need 24 pages.
  const SampleRequest request = Request(1, 4, 120, 7);
  for (uint64_t id = 1; id <= 3; ++id) {
    EXPECT_TRUE(HasRoom(request));
    Admit(id, request);
    (void)loop_->Step();
  }
  (void)loop_->Step();
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"), BytesOfPages(decoder_, 3));
}

TEST_F(PreemptionTest, PreemptedSamplesDrawWhatTheyWouldHave) {
  const SampleRequest requests[] = {
      Request(1, 4, 100, 7), Request(20, 17, 90, 8), Request(33, 30, 80, 9)};
  const lora::AdapterVersionPtr versions[] = {nullptr, adapter_, nullptr};
  std::vector<SampleResult> expected;
  for (int i = 0; i < 3; ++i) {
    expected.push_back(Alone(requests[i], versions[i]));
  }
  ASSERT_EQ(Preemptions(), 0);
  RestartWithFewPages();
  for (int i = 0; i < 3; ++i) Admit(i, requests[i], versions[i]);
  const std::map<uint64_t, SampleResult> results = Finish();
  for (int i = 0; i < 3; ++i) ExpectSameDraws(results.at(i), expected[i]);
  EXPECT_GE(Preemptions(), 2);
  EXPECT_TRUE(AllPagesFree(kFewPages));
}

// The prompts of all groups hold pages while samples of the groups wait.
TEST_F(PreemptionTest, GroupsFinishOneSampleAtATimeIfNeedBe) {
  SampleRequest first = Request(1, 20, 100, 7);
  first.num_samples = 4;
  SampleRequest second = Request(2, 35, 85, 8);
  second.num_samples = 3;
  SampleRequest same = Request(1, 20, 90, 9);  // Has the prompt of `first`.
  same.num_samples = 2;
  const SampleResult expected[] = {Alone(first), Alone(second, adapter_),
                                   Alone(same)};
  RestartWithFewPages();
  Admit(0, first);
  Admit(1, second, adapter_);
  Admit(2, same);
  const std::map<uint64_t, SampleResult> results = Finish();
  for (int i = 0; i < 3; ++i) ExpectSameDraws(results.at(i), expected[i]);
  EXPECT_GT(Preemptions(), 0);
  EXPECT_TRUE(AllPagesFree(kFewPages));
}

// Each group needs every page, and one pass computes both prompts.
TEST_F(PreemptionTest, GroupsOfOnePromptLeaveEachOtherRoom) {
  SampleRequest request = Request(1, 64, 65, 7);
  request.num_samples = 2;
  const SampleResult alone = Alone(request);
  RestartWithFewPages();
  ASSERT_TRUE(loop_->CheckFits(request).ok());
  Admit(0, request);
  Admit(1, request);
  for (const auto& [id, result] : Finish()) ExpectSameDraws(result, alone);
  EXPECT_GT(Preemptions(), 0);
  EXPECT_TRUE(AllPagesFree(kFewPages));
}

// The long prompt waits until the group's prompt frees its pages. The group
// must not wait for pages of the long prompt, because the group keeps the long
// prompt from being prefilled.
TEST_F(PreemptionTest, AYoungerPromptNeverTakesPagesOfAnOlderOne) {
  SampleRequest group = Request(1, 20, 30, 7);
  group.num_samples = 5;
  const SampleRequest longer = Request(2, 110, 10, 8);
  const SampleResult expected[] = {Alone(group), Alone(longer, adapter_)};
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 8),
           .max_decode_sequences = 2,
           .max_prefill_tokens = 24});
  Admit(0, group);
  Admit(1, longer, adapter_);
  const std::map<uint64_t, SampleResult> results = Finish();
  ASSERT_EQ(results.size(), 2u);
  for (int i = 0; i < 2; ++i) ExpectSameDraws(results.at(i), expected[i]);
  EXPECT_EQ(Preemptions(), 0);
}

TEST_F(PreemptionTest, AStreamNeverRepeatsAToken) {
  const SampleRequest old = Request(1, 4, 110, 7);
  const SampleRequest streamed = Request(20, 17, 90, 8);
  RestartWithFewPages();
  Admit(1, old);
  Admit(2, streamed, adapter_, /*streams=*/true);
  std::vector<int32_t> tokens;
  SampleResult result;
  const at::InferenceMode no_autograd;
  while (loop_->active() > 0) {
    for (SampleEvent& event : loop_->Step()) {
      for (const SampleDelta& delta : event.deltas) {
        tokens.insert(tokens.end(), delta.piece.tokens.begin(),
                      delta.piece.tokens.end());
      }
      if (event.work_id == 2 && event.finished) {
        result = std::move(event.result).value();
      }
    }
  }
  EXPECT_GT(Preemptions(), 0);
  EXPECT_THAT(tokens, SizeIs(90));
  EXPECT_EQ(tokens, result.samples.at(0).tokens);
}

TEST_F(PreemptionTest, CancelFreesWhatWaitsToGoOn) {
  const SampleRequest old = Request(1, 4, 120, 7);
  const SampleRequest young = Request(20, 17, 100, 8);
  const SampleResult alone = Alone(old);
  RestartWithFewPages();
  Admit(1, old);
  Admit(2, young);
  const at::InferenceMode no_autograd;
  while (Preemptions() == 0) (void)loop_->Step();
  EXPECT_TRUE(loop_->Cancel(2));
  ExpectSameDraws(Finish().at(1), alone);
  EXPECT_TRUE(AllPagesFree(kFewPages));
}

TEST_F(PreemptionTest, CancelFreesAPromptBetweenItsPieces) {
  RestartWithFewPages(/*max_prefill_tokens=*/10);
  const SampleRequest request = Request(1, 100, 20, 7);
  Admit(1, request);
  (void)loop_->Step();
  EXPECT_FALSE(AllPagesFree(kFewPages));
  EXPECT_GT(Metric("weft_kv_cache_used_bytes"), 0);
  EXPECT_TRUE(loop_->Cancel(1));
  EXPECT_TRUE(AllPagesFree(kFewPages));
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"), 0);
}

TEST_F(PreemptionTest, AnyOrderOfEventsGivesTheSameResults) {
  ExpectSameResultsInAnyOrder([this](int64_t max_prefill_tokens) {
    RestartWithFewPages(max_prefill_tokens);
  });
  EXPECT_TRUE(AllPagesFree(kFewPages));
  EXPECT_GT(Preemptions(), 0);
}

}  // namespace
}  // namespace weft::engine
