// Tests the sampling loop with a model that has recurrent layers: what it keeps
// of states, and that results do not change.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/model/tiny_hybrid.h"

namespace weft::engine {
namespace {

using ::testing::SizeIs;

constexpr int64_t kLeastPages = 9;
constexpr int64_t kLeastStates = 2;

class HybridLoopTest : public SampleLoopTest {
 protected:
  HybridLoopTest()
      : SampleLoopTest(testing::HybridDecoder(at::kFloat, /*seed=*/31)) {
    RestartWithRoom();
  }

  void RestartWithRoom(int64_t max_prefill_tokens = 2048) {
    Restart({.kv_cache_bytes = int64_t{1} << 20,
             .max_prefill_tokens = max_prefill_tokens});
  }
  // There are kLeastPages pages and kLeastStates states.
  void RestartWithLittleRoom(int64_t max_prefill_tokens = 2048,
                             int max_decode_sequences = 64) {
    const CacheUnits units = CacheUnitsOf(SizesOf(decoder_));
    const int64_t bytes =
        kLeastPages * units.page + (1 + kLeastStates) * units.state;
    const CacheCounts counts = CountsIn(units, bytes, 64);
    ASSERT_EQ(counts.pages, kLeastPages);
    ASSERT_EQ(counts.states, 1 + kLeastStates);
    Restart({.kv_cache_bytes = bytes,
             .max_decode_sequences = max_decode_sequences,
             .max_prefill_tokens = max_prefill_tokens});
  }
  // Returns the number of states that sequences use.
  double UsedStates() const {
    return Metric("weft_state_cache_used_bytes") /
           static_cast<double>(CacheUnitsOf(SizesOf(decoder_)).state);
  }
  double Preemptions() const { return Metric("weft_sample_preemptions_total"); }
};

// The pass without a cache computes the rule by chunks over all tokens.
TEST_F(HybridLoopTest, LogprobsAreThoseOfAPassWithoutACache) {
  for (const lora::AdapterVersionPtr& version :
       {lora::AdapterVersionPtr(), adapter_}) {
    SampleRequest request = Request(3, 41, 20, 7);
    const SampleResult result = Alone(request, version);
    std::vector<int32_t> tokens = request.prompt;
    std::vector<float> expected;
    for (const int32_t token : result.samples.at(0).tokens) {
      expected.push_back(
          NextLogprobs(decoder_, tokens, version)[token].item<float>());
      tokens.push_back(token);
    }
    ExpectSameScores(result.samples.at(0).logprobs, expected);
  }
}

TEST_F(HybridLoopTest, LongPromptsArePrefilledInPieces) {
  ExpectSameResultsInPieces([this](int64_t max_prefill_tokens) {
    RestartWithRoom(max_prefill_tokens);
  });
  EXPECT_EQ(UsedStates(), 0);
}

TEST_F(HybridLoopTest, EachSampleOfAGroupHasItsOwnState) {
  SampleRequest group = Request(1, 20, 30, 7);
  group.num_samples = 5;
  const SampleResult result = Alone(group);
  for (const Sample& sample : result.samples) {
    std::vector<int32_t> tokens = group.prompt;
    std::vector<float> expected;
    for (const int32_t token : sample.tokens) {
      expected.push_back(
          NextLogprobs(decoder_, tokens, nullptr)[token].item<float>());
      tokens.push_back(token);
    }
    ExpectSameScores(sample.logprobs, expected);
  }
}

TEST_F(HybridLoopTest, AnEqualPromptBeginsAtTheLastPageBorder) {
  for (const auto& [length, hits] : {std::pair(40, 32), {48, 32}, {49, 48}}) {
    RestartWithRoom();
    const SampleRequest request = Request(3, length, 12, 7);
    const SampleResult first = Alone(request, adapter_);
    EXPECT_EQ(NewHits(), 0);
    ExpectSameDraws(Alone(request, adapter_), first);
    EXPECT_EQ(NewHits(), hits) << length;
  }
}

TEST_F(HybridLoopTest, ALongerPromptBeginsWhereTheShorterEnds) {
  const SampleRequest turn = Request(3, 40, 9, 7);
  const SampleResult drawn = Alone(turn, adapter_);
  SampleRequest next = turn;
  next.prompt.insert(next.prompt.end(), drawn.samples[0].tokens.begin(),
                     drawn.samples[0].tokens.end());
  next.prompt.insert(next.prompt.end(), {5, 6, 7});
  (void)NewHits();
  const SampleResult reused = Alone(next, adapter_);
  // The sequence of `turn` ended with 48 tokens, a page border.
  EXPECT_EQ(NewHits(), 48);
  RestartWithRoom();
  ExpectSameDraws(Alone(next, adapter_), reused);
}

// There is no state where the second prompt leaves the first one. It stores
// one, which the third finds.
TEST_F(HybridLoopTest, PromptsWithOneBeginningFindItsState) {
  SampleRequest request = Request(3, 60, 5, 7);
  (void)Alone(request);
  request.prompt[40] = 1;
  (void)Alone(request);
  EXPECT_EQ(NewHits(), 0);
  request.prompt[40] = 2;
  const SampleResult reused = Alone(request);
  EXPECT_EQ(NewHits(), 32);
  RestartWithRoom();
  ExpectSameDraws(Alone(request), reused);
}

TEST_F(HybridLoopTest, ScoredPromptsAreComputed) {
  SampleRequest request = Request(3, 40, 1, 7);
  (void)Alone(request, adapter_);
  request.prompt_logprobs = true;
  const SampleResult scored = Alone(request, adapter_);
  EXPECT_EQ(NewHits(), 0);
  RestartWithRoom();
  ExpectSameScores(scored.prompt_logprobs,
                   Alone(request, adapter_).prompt_logprobs);
}

// The prompts of all groups hold states while samples of the groups wait.
TEST_F(HybridLoopTest, GroupsFinishOneSampleAtATimeIfNeedBe) {
  SampleRequest first = Request(1, 20, 60, 7);
  first.num_samples = 4;
  SampleRequest second = Request(2, 35, 40, 8);
  second.num_samples = 3;
  const SampleResult expected[] = {Alone(first), Alone(second, adapter_)};
  RestartWithLittleRoom();
  Admit(0, first);
  Admit(1, second, adapter_);
  const std::map<uint64_t, SampleResult> results = Finish();
  for (int i = 0; i < 2; ++i) ExpectSameDraws(results.at(i), expected[i]);
  EXPECT_EQ(UsedStates(), 0);
}

TEST_F(HybridLoopTest, SamplesWithoutAStateWait) {
  const at::InferenceMode no_autograd;
  const SampleRequest request = Request(1, 4, 6, 7);
  const SampleResult alone = Alone(request);
  RestartWithLittleRoom();
  for (uint64_t id = 1; id <= 5; ++id) Admit(id, request);
  EXPECT_FALSE(HasRoom(request));
  for (int step = 0; step < 3; ++step) (void)loop_->Step();
  EXPECT_EQ(UsedStates(), kLeastStates);
  const std::map<uint64_t, SampleResult> results = Finish();
  EXPECT_THAT(results, SizeIs(5));
  for (const auto& [id, result] : results) ExpectSameDraws(result, alone);
  EXPECT_EQ(Preemptions(), 0);
}

TEST_F(HybridLoopTest, AnotherTenantGetsAState) {
  const SampleRequest many = Request(1, 20, 60, 7);
  const SampleRequest one = Request(2, 35, 10, 8);
  const SampleResult expected[] = {Alone(many), Alone(one)};
  RestartWithLittleRoom();
  for (uint64_t id = 0; id < 4; ++id) AdmitFor("a", id, many);
  const at::InferenceMode no_autograd;
  for (int step = 0; step < 5; ++step) (void)loop_->Step();
  AdmitFor("b", 4, one);
  int num_steps = 0;
  for (bool finished = false; !finished; ++num_steps) {
    ASSERT_LT(num_steps, 30) << "the other tenant waits";
    for (const SampleEvent& event : loop_->Step()) {
      if (event.work_id != 4 || !event.finished) continue;
      ExpectSameDraws(event.result.value(), expected[1]);
      finished = true;
    }
  }
  EXPECT_GT(Preemptions(), 0);
  for (const auto& [id, result] : Finish())
    ExpectSameDraws(result, expected[0]);
}

// The states that a pass had replaced before it threw are of no later use.
TEST_F(HybridLoopTest, APassThatThrowsLeavesNoState) {
  const at::InferenceMode no_autograd;
  const SampleRequest request = Request(3, 40, 20, 7);
  const SampleResult expected = Alone(request);
  const at::Tensor late = decoder_.weights().layers.back().dt_bias_H;
  const int64_t size = late.size(0);
  for (const int num_steps : {0, 1, 8}) {
    RestartWithLittleRoom(/*max_prefill_tokens=*/48);
    Admit(1, request);
    for (int step = 0; step < num_steps; ++step) (void)loop_->Step();
    late.resize_({1});
    EXPECT_ANY_THROW((void)loop_->Step());
    late.resize_({size});
    EXPECT_THAT(loop_->CancelAll(), SizeIs(1));
    (void)NewHits();
    ExpectSameDraws(Alone(request), expected);
    EXPECT_EQ(NewHits(), num_steps == 0 ? 0 : 32);
  }
}

// A prompt and its first sample return after another tenant had their states.
// The prompt keeps a state at a page border, and may start no sample before the
// preempted one. So the sample may find no slot for a copy of that state.
TEST_F(HybridLoopTest, ASampleReturnsIfTheOnlyOtherStateIsItsPrefixs) {
  const at::InferenceMode no_autograd;
  SampleRequest group = Request(1, 40, 30, 7);
  group.num_samples = 3;
  for (const int length : {20, 60, 120}) {
    const SampleRequest other = Request(2, length, 5, 8);
    RestartWithRoom();
    const SampleResult expected[] = {Alone(group), Alone(other)};
    for (const int max_decode_sequences : {1, 64}) {
      for (const uint64_t num_others : {1, 3}) {
        RestartWithLittleRoom(/*max_prefill_tokens=*/kPageTokens,
                              max_decode_sequences);
        AdmitFor("a", 0, group);
        for (int step = 0; step < 8; ++step) (void)loop_->Step();
        for (uint64_t id = 1; id <= num_others; ++id) AdmitFor("b", id, other);
        for (const auto& [id, result] : Finish()) {
          ExpectSameDraws(result, expected[id == 0 ? 0 : 1]);
        }
      }
    }
  }
  EXPECT_GT(Preemptions(), 0);
}

TEST_F(HybridLoopTest, AnyOrderOfEventsGivesTheSameResults) {
  ExpectSameResultsInAnyOrder([this](int64_t max_prefill_tokens) {
    RestartWithLittleRoom(max_prefill_tokens);
  });
  EXPECT_EQ(UsedStates(), 0);
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"), 0);
  EXPECT_GT(Preemptions(), 0);
}

}  // namespace
}  // namespace weft::engine
