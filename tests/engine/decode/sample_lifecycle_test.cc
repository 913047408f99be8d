// Tests what the sampling loop returns and what it frees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/support/tolerance.h"

namespace weft::engine {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

class SampleLifecycleTest : public SampleLoopTest {
 protected:
  std::vector<SampleEvent> Step() {
    const at::InferenceMode no_autograd;
    return loop_->Step();
  }

  // Compares the likeliest tokens at each prompt position with those of a pass
  // over the tokens before the position.
  void ExpectListed(const SampleRequest& request,
                    const lora::AdapterVersionPtr& version,
                    const SampleResult& result) {
    const std::vector<TopLogprobs>& rows = result.prompt_top_logprobs;
    ASSERT_EQ(rows.size(), request.prompt.size());
    EXPECT_THAT(rows[0], IsEmpty());
    for (size_t i = 1; i < rows.size(); ++i) {
      const at::Tensor logprobs = NextLogprobs(
          decoder_,
          {request.prompt.begin(),
           request.prompt.begin() + static_cast<std::ptrdiff_t>(i)},
          version);
      const at::Tensor best = std::get<0>(logprobs.sort(0, true));
      ASSERT_THAT(rows[i], SizeIs(request.prompt_top_logprobs));
      for (size_t k = 0; k < rows[i].size(); ++k) {
        const auto [token, logprob] = rows[i][k];
        const double bound = Tolerance(kEpsilonF32, 1000, 10);
        EXPECT_NEAR(logprob, best[static_cast<int64_t>(k)].item<float>(),
                    bound);
        EXPECT_NEAR(logprob, logprobs[token].item<float>(), bound);
      }
    }
  }
};

TEST_F(SampleLifecycleTest, PagesReturnWhenSamplesEnd) {
  const SampleRequest single = Request(1, 20, 30, 7);
  SampleRequest group = Request(2, 9, 12, 8);
  group.num_samples = 3;
  Admit(1, single, adapter_);
  Admit(2, group);
  (void)Step();
  EXPECT_FALSE(AllPagesFree());
  EXPECT_THAT(Finish(), SizeIs(2));
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(SampleLifecycleTest, CancelFreesPagesAtEveryStage) {
  SampleRequest group = Request(2, 9, 12, 8);
  group.num_samples = 3;
  for (const int steps : {0, 1, 4}) {
    Admit(1, group, adapter_);
    for (int step = 0; step < steps; ++step) (void)Step();
    EXPECT_TRUE(loop_->Cancel(1)) << steps;
    EXPECT_EQ(loop_->active(), 0);
    EXPECT_TRUE(AllPagesFree()) << steps;
    EXPECT_THAT(Step(), IsEmpty());
  }
  EXPECT_FALSE(loop_->Cancel(1));
}

TEST_F(SampleLifecycleTest, CancelFreesSamplesThatNeverStarted) {
  SampleRequest group = Request(2, 5, 20, 7);
  group.num_samples = 8;
  // Two samples run at a time. The waiting samples keep the prompt's pages.
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 2});
  Admit(1, group);
  (void)Step();
  EXPECT_TRUE(loop_->Cancel(1));
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(SampleLifecycleTest, CancelLeavesTheOthersAlone) {
  const SampleRequest stays = Request(1, 9, 24, 7);
  const SampleRequest goes = Request(20, 16, 24, 8);
  const SampleResult alone = Alone(stays);
  Admit(1, stays);
  Admit(2, goes, adapter_);
  for (int step = 0; step < 6; ++step) (void)Step();
  EXPECT_TRUE(loop_->Cancel(2));
  const std::map<uint64_t, SampleResult> results = Finish();
  ASSERT_THAT(results, SizeIs(1));
  EXPECT_EQ(results.at(1).samples[0].tokens, alone.samples[0].tokens);
}

TEST_F(SampleLifecycleTest, CancelAllForgetsEverything) {
  const SampleRequest request = Request(1, 9, 24, 7);
  Admit(4, request);
  (void)Step();
  Admit(9, request);
  EXPECT_THAT(loop_->CancelAll(), ElementsAre(4, 9));
  EXPECT_EQ(loop_->active(), 0);
  EXPECT_TRUE(AllPagesFree());
  EXPECT_THAT(Step(), IsEmpty());
}

TEST_F(SampleLifecycleTest, LetsGoOfTheVersionWhenDone) {
  const SampleRequest request = Request(1, 9, 3, 7);
  Admit(1, request, adapter_);
  EXPECT_EQ(adapter_.use_count(), 2);
  (void)Finish();
  EXPECT_EQ(adapter_.use_count(), 1);
}

TEST_F(SampleLifecycleTest, StopsAtAStopTokenAndKeepsIt) {
  const SampleRequest free = Request(1, 9, 24, 7);
  const std::vector<int32_t> drawn = Alone(free).samples[0].tokens;
  SampleRequest stopped = free;
  stopped.config.stop.token_ids = {drawn[5]};
  const SampleResult result = Alone(stopped);
  const auto first = std::ranges::find(drawn, drawn[5]) - drawn.begin();
  EXPECT_EQ(result.samples[0].tokens,
            std::vector<int32_t>(drawn.begin(), drawn.begin() + first + 1));
  EXPECT_EQ(result.samples[0].finish_reason, FinishReason::kStop);
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(SampleLifecycleTest, ASampleOfOneTokenNeedsNoDecoding) {
  SampleRequest request = Request(1, 9, 1, 7);
  request.num_samples = 2;
  Admit(1, request);
  const std::vector<SampleEvent> events = Step();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_TRUE(events[0].finished);
  ASSERT_TRUE(events[0].result.ok());
  EXPECT_THAT(events[0].result->samples, SizeIs(2));
  EXPECT_THAT(events[0].result->samples[1].tokens, SizeIs(1));
  EXPECT_TRUE(AllPagesFree());
}

TEST_F(SampleLifecycleTest, StreamsEveryTokenInOrder) {
  SampleRequest request = Request(1, 9, 6, 7);
  request.num_samples = 2;
  request.prompt_logprobs = true;
  request.prompt_top_logprobs = 2;
  request.top_logprobs = 2;
  Admit(1, request, adapter_, /*streams=*/true);
  std::vector<Sample> streamed(2);
  SampleResult result;
  int num_prompt_logprobs = 0;
  std::vector<TopLogprobs> prompt_top;
  while (loop_->active() > 0) {
    for (SampleEvent& event : Step()) {
      for (const SampleDelta& delta : event.deltas) {
        Sample& sample = streamed[delta.sample_index];
        ASSERT_THAT(delta.piece.tokens, SizeIs(1));
        EXPECT_EQ(delta.version, 5u);
        sample.tokens.push_back(delta.piece.tokens[0]);
        sample.logprobs.push_back(delta.piece.logprobs[0]);
        sample.top_logprobs.push_back(delta.piece.top_logprobs.at(0));
        sample.finish_reason = delta.piece.finish_reason;
        if (!delta.prompt_logprobs.empty()) ++num_prompt_logprobs;
        prompt_top.insert(prompt_top.end(), delta.prompt_top_logprobs.begin(),
                          delta.prompt_top_logprobs.end());
      }
      if (event.finished) result = std::move(event.result).value();
    }
  }
  EXPECT_EQ(num_prompt_logprobs, 1);
  EXPECT_THAT(prompt_top, SizeIs(9));
  EXPECT_EQ(prompt_top, result.prompt_top_logprobs);
  ASSERT_THAT(result.samples, SizeIs(2));
  for (int s = 0; s < 2; ++s) {
    EXPECT_EQ(streamed[s].tokens, result.samples[s].tokens);
    EXPECT_EQ(streamed[s].logprobs, result.samples[s].logprobs);
    EXPECT_EQ(streamed[s].top_logprobs, result.samples[s].top_logprobs);
    EXPECT_EQ(streamed[s].finish_reason, FinishReason::kLength);
  }
}

TEST_F(SampleLifecycleTest, MakesNoEventsBeforeTheEndWithoutAStream) {
  const SampleRequest request = Request(1, 9, 6, 7);
  Admit(1, request);
  for (int step = 0; step < 5; ++step) EXPECT_THAT(Step(), IsEmpty()) << step;
  const std::vector<SampleEvent> events = Step();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_TRUE(events[0].finished);
  EXPECT_THAT(events[0].deltas, IsEmpty());
}

// The prompts are prefilled together, and one of them is a single token.
TEST_F(SampleLifecycleTest, ScoresThePromptOnDemand) {
  SampleRequest request = Request(1, 9, 1, 7);
  request.prompt_logprobs = true;
  SampleRequest shortest = Request(4, 1, 1, 7);
  shortest.prompt_logprobs = true;
  const SampleRequest silent = Request(5, 6, 1, 7);
  Admit(1, silent);
  Admit(2, shortest);
  Admit(3, request, adapter_);
  const std::map<uint64_t, SampleResult> results = Finish();
  EXPECT_THAT(results.at(1).prompt_logprobs, IsEmpty());
  EXPECT_THAT(results.at(2).prompt_logprobs, ElementsAre(0.0f));
  const std::vector<float>& scores = results.at(3).prompt_logprobs;
  ASSERT_THAT(scores, SizeIs(9));
  EXPECT_EQ(scores[0], 0.0f);
  for (int64_t i = 1; i < 9; ++i) {
    const at::Tensor logprobs = NextLogprobs(
        decoder_, {request.prompt.begin(), request.prompt.begin() + i},
        adapter_);
    EXPECT_NEAR(scores[i], logprobs[request.prompt[i]].item<float>(),
                Tolerance(kEpsilonF32, 1000, 10));
  }
}

// Three requests ask for their prompt's likeliest tokens, and one does not.
// Lists are made for at most max_decode_sequences rows at a time.
TEST_F(SampleLifecycleTest, ListsTheLikeliestTokensOfThePrompt) {
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 4});
  SampleRequest both = Request(1, 9, 1, 7);
  both.prompt_logprobs = true;
  both.prompt_top_logprobs = 3;
  SampleRequest only = Request(4, 12, 3, 7);
  only.prompt_top_logprobs = 1;
  only.num_samples = 2;
  SampleRequest shortest = Request(5, 1, 1, 7);
  shortest.prompt_top_logprobs = 5;
  const SampleRequest silent = Request(6, 30, 1, 7);
  Admit(1, both, adapter_);
  Admit(2, silent);
  Admit(3, only);
  Admit(4, shortest);
  const std::map<uint64_t, SampleResult> results = Finish();
  EXPECT_THAT(results.at(2).prompt_top_logprobs, IsEmpty());
  EXPECT_THAT(results.at(4).prompt_top_logprobs, ElementsAre(IsEmpty()));
  EXPECT_THAT(results.at(3).prompt_logprobs, IsEmpty());
  EXPECT_THAT(results.at(3).samples[1].tokens, SizeIs(3));
  ExpectListed(both, adapter_, results.at(1));
  ExpectListed(only, nullptr, results.at(3));
  EXPECT_TRUE(AllPagesFree());
}

// The score and the list come from different matrix products, but must agree.
TEST_F(SampleLifecycleTest, AListedPromptTokenHasItsScore) {
  SampleRequest request = Request(1, 9, 1, 7);
  request.config.temperature = 0;
  for (int i = 0; i < 8; ++i) {
    request.prompt.push_back(Alone(request, adapter_).samples[0].tokens[0]);
  }
  request.prompt_logprobs = true;
  request.prompt_top_logprobs = 2;
  const SampleResult result = Alone(request, adapter_);
  for (size_t i = 9; i < request.prompt.size(); ++i) {
    EXPECT_THAT(
        result.prompt_top_logprobs[i],
        Contains(std::pair(request.prompt[i], result.prompt_logprobs[i])));
  }
}

TEST_F(SampleLifecycleTest, ADivergedAdapterFailsWhileItsPromptIsListed) {
  auto bad = std::make_shared<lora::AdapterVersion>(*adapter_);
  bad->compute_N = at::full_like(adapter_->compute_N, NAN);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 4});
  SampleRequest failing = Request(2, 20, 1, 7);
  failing.prompt_top_logprobs = 1;
  Admit(1, failing, bad);
  const std::vector<SampleEvent> events = Step();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].result.status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(AllPagesFree());
}

// The adapter diverges at the first token of two samples, and in the middle of
// another sample.
TEST_F(SampleLifecycleTest, ADivergedAdapterFailsAlone) {
  auto bad = std::make_shared<lora::AdapterVersion>(*adapter_);
  bad->compute_N = adapter_->compute_N.clone();
  const SampleRequest healthy = Request(1, 9, 12, 7);
  SampleRequest failing = Request(2, 7, 12, 7);
  const SampleResult alone = Alone(healthy, adapter_);
  for (const int steps : {0, 3}) {
    bad->compute_N.copy_(adapter_->compute_N);
    failing.num_samples = steps == 0 ? 2 : 1;
    Admit(1, healthy, adapter_);
    Admit(2, failing, bad);
    for (int step = 0; step < steps; ++step) EXPECT_THAT(Step(), IsEmpty());
    bad->compute_N.fill_(NAN);
    const std::vector<SampleEvent> events = Step();
    ASSERT_THAT(events, SizeIs(1)) << steps;
    EXPECT_EQ(events[0].work_id, 2u);
    EXPECT_TRUE(events[0].finished);
    EXPECT_EQ(events[0].result.status().code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Finish().at(1).samples[0].tokens, alone.samples[0].tokens);
    EXPECT_TRUE(AllPagesFree());
  }
}

TEST_F(SampleLifecycleTest, RefusesWhatNeverFits) {
  const int room = static_cast<int>(kPages * kPageTokens);
  // The last token is drawn but needs no room.
  EXPECT_TRUE(loop_->CheckFits(Request(1, 1, room, 0)).ok());
  SampleRequest group = Request(1, 1, room, 0);
  group.num_samples = 2;
  const SampleRequest too_long = Request(1, room + 1, 1, 0);
  for (const auto& [request, message] :
       {std::pair(
            Request(1, 2, room, 0),
            absl::StrCat("config.max_tokens is ", room, ", must be in [1, ",
                         room - 1, "] after a prompt of 2: ")),
        std::pair(group, absl::StrCat("config.max_tokens is ", room)),
        std::pair(too_long,
                  absl::StrCat("prompt has ", room + 1,
                               " values, must have at most ", room, ": "))}) {
    const absl::Status refused = loop_->CheckFits(request);
    // No wait helps, so no client shall try again.
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), StartsWith(message));
    EXPECT_THAT(refused.message(), HasSubstr("--kv-cache-bytes"));
  }
  group.config.max_tokens = static_cast<int>(loop_->cached_tokens()) - 1;
  EXPECT_TRUE(loop_->CheckFits(group).ok());
}

TEST_F(SampleLifecycleTest, CountsThePagesThatAdmittedRequestsWillTake) {
  const int half = static_cast<int>(kPages * kPageTokens / 2);
  const SampleRequest large = Request(1, half, 1, 0);
  Admit(1, large);
  EXPECT_TRUE(HasRoom(large));
  Admit(2, large);
  EXPECT_FALSE(HasRoom(Request(1, 1, 1, 0)));
  EXPECT_TRUE(loop_->Cancel(1));
  EXPECT_TRUE(HasRoom(large));
}

}  // namespace
}  // namespace weft::engine
