// Tests which tokens the sampling loop takes from its cache instead of
// computing them, and that results do not change.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"

namespace weft::engine {
namespace {

class PrefixReuseTest : public SampleLoopTest {
 protected:
  // Returns how many prompt tokens were computed since the last call.
  int64_t NewPrefilled() {
    const auto tokens =
        static_cast<int64_t>(Metric("weft_prompt_tokens_total"));
    return tokens - std::exchange(prefilled_, tokens);
  }

  // Returns other weights with the same version number, as if the adapter had
  // been deleted and created again.
  lora::AdapterVersionPtr OtherWeights() const {
    auto other = std::make_shared<lora::AdapterVersion>(*adapter_);
    other->compute_N = adapter_->compute_N * 2;
    return other;
  }

 private:
  int64_t prefilled_ = 0;
};

TEST_F(PrefixReuseTest, ASecondRequestComputesOnlyTheRest) {
  for (const lora::AdapterVersionPtr& version :
       {lora::AdapterVersionPtr(), adapter_}) {
    const SampleRequest request = Request(3, 40, 12, 7);
    const SampleResult first = Alone(request, version);
    EXPECT_EQ(NewHits(), 0);
    EXPECT_EQ(NewPrefilled(), 40);
    ExpectSameDraws(Alone(request, version), first);
    EXPECT_EQ(NewHits(), 32);
    EXPECT_EQ(NewPrefilled(), 8);
  }
  EXPECT_EQ(Metric("weft_prefix_cache_lookup_tokens_total"), 4 * 40);
}

TEST_F(PrefixReuseTest, TheLastTokenOfAPromptIsComputed) {
  const SampleRequest request = Request(3, 32, 5, 7);
  const SampleResult first = Alone(request);
  (void)NewHits();
  ExpectSameDraws(Alone(request), first);
  EXPECT_EQ(NewHits(), 16);
}

// The second prompt begins with the first prompt and its drawn tokens.
TEST_F(PrefixReuseTest, TokensThatWereDrawnAreRemembered) {
  const SampleRequest turn = Request(3, 20, 30, 7);
  const SampleResult drawn = Alone(turn, adapter_);
  SampleRequest next = turn;
  next.prompt.insert(next.prompt.end(), drawn.samples[0].tokens.begin(),
                     drawn.samples[0].tokens.end());
  next.prompt.insert(next.prompt.end(), {5, 6, 7});
  const SampleResult reused = Alone(next, adapter_);
  EXPECT_EQ(NewHits(), 48);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  ExpectSameDraws(reused, Alone(next, adapter_));
  EXPECT_EQ(NewHits(), 0);
}

TEST_F(PrefixReuseTest, RunningSequencesShareAlready) {
  const SampleRequest first = Request(3, 40, 20, 7);
  const SampleRequest second = Request(3, 40, 20, 8);
  const SampleResult alone = Alone(second);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  Admit(1, first);
  (void)loop_->Step();
  (void)NewHits();
  Admit(2, second);
  ExpectSameDraws(Finish().at(2), alone);
  EXPECT_EQ(NewHits(), 32);
}

// One pass computes the prompt for both requests. The pool keeps one copy of
// the prompt's full pages.
TEST_F(PrefixReuseTest, PromptsThatComeTogetherKeepOneCopy) {
  const at::InferenceMode no_autograd;
  const SampleRequest first = Request(3, 40, 20, 7);
  const SampleRequest second = Request(3, 40, 20, 8);
  const SampleResult alone = Alone(second);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  Admit(1, first);
  Admit(2, second);
  (void)loop_->Step();
  // The requests share two full pages, and each has its own last page.
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"), BytesOfPages(decoder_, 4));
  ExpectSameDraws(Finish().at(2), alone);
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(PrefixReuseTest, OtherWeightsNeverSeeThePrefix) {
  const SampleRequest request = Request(3, 40, 12, 7);
  const lora::AdapterVersionPtr other = OtherWeights();
  const SampleResult expected = Alone(request, other);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  const SampleResult base = Alone(request);
  const SampleResult adapted = Alone(request, adapter_);
  (void)NewHits();
  ExpectSameDraws(Alone(request, other), expected);
  EXPECT_EQ(NewHits(), 0);
  // The old version, which a snapshot may pin, still finds its own prefix.
  ExpectSameDraws(Alone(request, adapter_), adapted);
  EXPECT_EQ(NewHits(), 32);
  EXPECT_NE(base.samples[0].logprobs, adapted.samples[0].logprobs);
  EXPECT_NE(expected.samples[0].logprobs, adapted.samples[0].logprobs);
}

TEST_F(PrefixReuseTest, PrefixesGoWithTheirWeights) {
  lora::AdapterVersionPtr other = OtherWeights();
  const SampleRequest request = Request(3, 33, 1, 7);
  (void)Alone(request, adapter_);
  (void)Alone(request, other);
  EXPECT_EQ(Metric("weft_prefix_cache_bytes"), BytesOfPages(decoder_, 4));
  other.reset();
  (void)loop_->Step();
  EXPECT_EQ(Metric("weft_prefix_cache_bytes"), BytesOfPages(decoder_, 2));
  (void)NewHits();
  (void)Alone(request, adapter_);
  EXPECT_EQ(NewHits(), 32);
}

// Hidden states are not cached, so a scored prompt is computed in full.
TEST_F(PrefixReuseTest, ScoredPromptsAreComputed) {
  SampleRequest request = Request(3, 40, 1, 7);
  (void)Alone(request, adapter_);
  request.prompt_top_logprobs = 1;
  (void)Alone(request, adapter_);
  EXPECT_EQ(NewHits(), 0);
  request.prompt_logprobs = true;
  const SampleResult after_hit = Alone(request, adapter_);
  EXPECT_EQ(NewHits(), 0);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  EXPECT_EQ(after_hit.prompt_logprobs,
            Alone(request, adapter_).prompt_logprobs);
}

TEST_F(PrefixReuseTest, RememberedPrefixesGiveWay) {
  SampleRequest request = Request(0, 40, 20, 7);
  std::vector<SampleResult> expected;
  for (int32_t first = 0; first < 6; ++first) {
    request.prompt[0] = first;
    expected.push_back(Alone(request));
  }
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 5)});
  for (int32_t first = 0; first < 6; ++first) {
    request.prompt[0] = first;
    EXPECT_TRUE(AllPagesFree(5));
    ExpectSameDraws(Alone(request), expected[first]);
  }
}

TEST_F(PrefixReuseTest, LongPromptsArePrefilledInPieces) {
  ExpectSameResultsInPieces([this](int64_t max_prefill_tokens) {
    Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
             .max_prefill_tokens = max_prefill_tokens});
  });
}

// Only the last token of each prompt is not cached. But a pass also gathers the
// keys of the cached tokens, so it takes only one prompt of this length.
TEST_F(PrefixReuseTest, FewRestsOfLongPromptsGoInOnePass) {
  const at::InferenceMode no_autograd;
  const SampleRequest request = Request(3, 97, 30, 7);
  const SampleResult alone = Alone(request);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_prefill_tokens = 20});
  (void)Alone(request);
  (void)NewHits();
  (void)NewPrefilled();
  for (uint64_t id = 1; id <= 3; ++id) Admit(id, request);
  for (int num_prefilled = 1; num_prefilled <= 3; ++num_prefilled) {
    (void)loop_->Step();
    EXPECT_EQ(NewPrefilled(), 1);
  }
  EXPECT_EQ(NewHits(), 3 * 96);
  for (const auto& [id, result] : Finish()) ExpectSameDraws(result, alone);
}

TEST_F(PrefixReuseTest, OthersDecodeBetweenThePieces) {
  const at::InferenceMode no_autograd;
  const SampleRequest runs = Request(1, 4, 30, 7);
  const SampleRequest longer = Request(3, 100, 1, 7);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_prefill_tokens = 10});
  Admit(1, runs, nullptr, /*streams=*/true);
  (void)loop_->Step();
  Admit(2, longer);
  int num_steps = 0;
  for (bool finished = false; !finished; ++num_steps) {
    bool decoded = false;
    for (const SampleEvent& event : loop_->Step()) {
      if (event.work_id == 1) decoded = event.deltas.size() == 1;
      if (event.work_id == 2) finished = event.finished;
    }
    EXPECT_TRUE(decoded) << num_steps;
  }
  EXPECT_EQ(num_steps, 10);
}

}  // namespace
}  // namespace weft::engine
