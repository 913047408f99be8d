#include "src/engine/decode/sample_loop.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/support/tolerance.h"

namespace weft::engine {
namespace {

using ::testing::SizeIs;

TEST_F(SampleLoopTest, DrawsGreedilyWhatTheModelPrefers) {
  for (const lora::AdapterVersionPtr& version :
       {lora::AdapterVersionPtr(), adapter_}) {
    SampleRequest request = Request(3, 11, 20, 0);
    request.config.temperature = 0;
    const SampleResult result = Alone(request, version);
    ASSERT_THAT(result.samples, SizeIs(1));
    EXPECT_EQ(result.version, version == nullptr ? 0u : 5u);
    ASSERT_THAT(result.samples[0].tokens, SizeIs(20));
    EXPECT_EQ(result.samples[0].finish_reason, FinishReason::kLength);
    std::vector<int32_t> tokens = request.prompt;
    for (size_t i = 0; i < 20; ++i) {
      const at::Tensor logprobs = NextLogprobs(decoder_, tokens, version);
      EXPECT_EQ(result.samples[0].tokens[i], logprobs.argmax().item<int64_t>());
      EXPECT_NEAR(result.samples[0].logprobs[i], logprobs.max().item<float>(),
                  Tolerance(kEpsilonF32, 1000, 10));
      tokens.push_back(result.samples[0].tokens[i]);
    }
  }
}

TEST_F(SampleLoopTest, DrawsTheSameAloneAndInCompany) {
  const SampleRequest first = Request(1, 9, 24, 7);
  const SampleRequest second = Request(20, 16, 17, 8);
  const SampleRequest third = Request(33, 5, 30, 9);
  const SampleResult alone[] = {Alone(first), Alone(second, adapter_),
                                Alone(third)};
  Admit(1, first);
  Admit(2, second, adapter_);
  Admit(3, third);
  const std::map<uint64_t, SampleResult> together = Finish();
  for (uint64_t id = 1; id <= 3; ++id) {
    ExpectSameDraws(together.at(id), alone[id - 1]);
  }
}

TEST_F(SampleLoopTest, DrawsTheSameWhenItJoinsLater) {
  const SampleRequest early = Request(1, 9, 24, 7);
  const SampleRequest late = Request(20, 16, 17, 8);
  const SampleResult early_alone = Alone(early);
  const SampleResult late_alone = Alone(late, adapter_);
  Admit(1, early);
  for (int step = 0; step < 5; ++step) (void)loop_->Step();
  Admit(2, late, adapter_);
  const std::map<uint64_t, SampleResult> together = Finish();
  ExpectSameDraws(together.at(1), early_alone);
  ExpectSameDraws(together.at(2), late_alone);
}

TEST_F(SampleLoopTest, SeedsAndSamplesDrawOnTheirOwn) {
  SampleRequest request = Request(1, 9, 16, 7);
  request.num_samples = 3;
  const SampleResult result = Alone(request);
  const SampleResult again = Alone(request);
  ASSERT_THAT(result.samples, SizeIs(3));
  for (int s = 0; s < 3; ++s) {
    EXPECT_EQ(result.samples[s].tokens, again.samples[s].tokens);
  }
  EXPECT_NE(result.samples[0].tokens, result.samples[1].tokens);
  EXPECT_NE(result.samples[1].tokens, result.samples[2].tokens);
  const SampleResult other = Alone(Request(1, 9, 16, 8));
  EXPECT_NE(other.samples[0].tokens, result.samples[0].tokens);
}

// The prompts end inside a page, at its end, and one token into the next page.
TEST_F(SampleLoopTest, ForkedSamplesDrawWhatASingleOneDraws) {
  for (const int length : {5, 16, 17}) {
    SampleRequest single = Request(2, length, 20, 7);
    SampleRequest group = single;
    group.num_samples = 4;
    const SampleResult one = Alone(single, adapter_);
    const SampleResult four = Alone(group, adapter_);
    ASSERT_THAT(four.samples, SizeIs(4));
    EXPECT_EQ(four.samples[0].tokens, one.samples[0].tokens) << length;
    EXPECT_TRUE(AllPagesFree());
  }
}

TEST_F(SampleLoopTest, SamplesOfAGroupShareThePagesOfThePrompt) {
  // The prompt has 4 pages, and each sample adds one. Without sharing, 10
  // samples would take 50 pages.
  constexpr int kPromptPages = 4, kSamples = 10;
  SampleRequest group =
      Request(2, kPromptPages * kPageTokens, kPageTokens + 1, 7);
  group.num_samples = kSamples;
  Admit(1, group);
  (void)loop_->Step();
  (void)loop_->Step();
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"),
            BytesOfPages(decoder_, kPromptPages + kSamples));
  EXPECT_THAT(Finish()[1].samples, SizeIs(kSamples));
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(SampleLoopTest, SamplesWithoutRoomWaitForThoseBefore) {
  SampleRequest group = Request(2, 5, 20, 7);
  group.num_samples = 6;
  const SampleResult expected = Alone(group);
  // There is room for the prompt's page, and for two samples of two pages each.
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 5)});
  ASSERT_TRUE(loop_->CheckFits(group).ok());
  ExpectSameDraws(Alone(group), expected);
}

TEST_F(SampleLoopTest, NoMoreSequencesRunThanAreAllowed) {
  SampleRequest group = Request(2, 5, 12, 7);
  group.num_samples = 5;
  const SampleResult expected = Alone(group);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 2});
  ExpectSameDraws(Alone(group), expected);
  const SampleRequest request = Request(1, 4, 8, 1);
  Admit(1, request);
  EXPECT_TRUE(HasRoom(request));
  Admit(2, request);
  EXPECT_FALSE(HasRoom(request));
}

// Each token takes an iteration, except the first, which the prefill draws.
TEST_F(SampleLoopTest, IterationsAreCountedByTheWayTheyRan) {
  static_cast<void>(Alone(Request(2, 5, 12, 7)));
  double graphs = -1, launches = -1;
  for (const prometheus::MetricFamily& family : registry_.Collect()) {
    if (family.name != "weft_decode_iterations_total") continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      ASSERT_EQ(metric.label.at(0).name, "way");
      (metric.label.at(0).value == "graph" ? graphs : launches) =
          metric.counter.value;
    }
  }
  EXPECT_EQ(graphs, 0);
  EXPECT_EQ(launches, 11);
  EXPECT_EQ(Metric("weft_decode_graphs"), 0);
}

TEST_F(SampleLoopTest, PromptsBeyondOnePrefillComeInTheNext) {
  const SampleRequest first = Request(1, 9, 6, 7);
  const SampleRequest second = Request(20, 16, 6, 8);
  const SampleResult alone[] = {Alone(first), Alone(second)};
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_prefill_tokens = 10});
  Admit(1, first);
  Admit(2, second);
  const std::map<uint64_t, SampleResult> together = Finish();
  ExpectSameDraws(together.at(1), alone[0]);
  ExpectSameDraws(together.at(2), alone[1]);
}

}  // namespace
}  // namespace weft::engine
