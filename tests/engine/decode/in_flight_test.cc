// Tests samples that take newer versions of their adapter while they run: which
// version draws which token, from which keys, and what others see of it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "src/engine/decode/sample_routing.h"
#include "tests/engine/decode/sample_loop_fixture.h"
#include "tests/model/tiny_hybrid.h"

namespace weft::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::vector<uint64_t> VersionsOf(const Sample& sample) {
  std::vector<uint64_t> versions;
  for (const VersionSpan& span : sample.version_spans) {
    versions.insert(versions.end(), span.tokens, span.version);
  }
  return versions;
}

// The parameter says whether the model has recurrent layers.
class InFlightTest : public SampleLoopTest,
                     public ::testing::WithParamInterface<bool> {
 protected:
  InFlightTest()
      : SampleLoopTest(GetParam() ? testing::HybridDecoder(at::kFloat, 31)
                                  : MakeDecoder()) {
    RestartWith({.kv_cache_bytes = int64_t{1} << 20});
  }

  void RestartWith(SampleLoopOptions options) {
    options.latest = [this](AdapterKey) { return latest_; };
    Restart(options);
  }

  // Makes a version with other weights the latest one.
  void Publish() {
    latest_ = TinyVersion(decoder_.config(), {.rank = 3, .alpha = 6},
                          at::kFloat, ++number_);
    versions_[number_] = latest_;
  }

  // Admits a request, after a first publication if there was none.
  void Begin(uint64_t id, const SampleRequest& request, bool streams = false) {
    if (latest_ == nullptr) Publish();
    Admit(id, request, latest_, streams);
  }

  std::vector<SampleEvent> Step(int count = 1) {
    const at::InferenceMode no_autograd;
    std::vector<SampleEvent> events;
    for (; count > 0; --count) {
      for (SampleEvent& event : loop_->Step()) {
        events.push_back(std::move(event));
      }
    }
    return events;
  }

  // Checks the log-probabilities of each token. Its logits come from one pass
  // without a cache over the tokens before it. If keys are `kept`, each row of
  // the pass has the version that drew the next token; otherwise all rows have
  // the version that drew this one.
  void ExpectScoresOfVersions(const SampleRequest& request,
                              const Sample& sample, bool kept) {
    const at::InferenceMode no_autograd;
    const std::vector<uint64_t> versions = VersionsOf(sample);
    ASSERT_EQ(versions.size(), sample.tokens.size());
    std::vector<int32_t> tokens = request.prompt;
    std::vector<float> expected;
    lora::LoraRouting kept_rows;
    for (size_t i = 0; i < versions.size(); ++i) {
      const auto length = static_cast<int64_t>(tokens.size());
      const lora::AdapterVersionPtr& version = versions_.at(versions[i]);
      AddRows(kept_rows, version, kept_rows.empty() ? 0 : length - 1, length);
      lora::LoraRouting all;
      AddRows(all, version, 0, length);
      const at::Tensor logits =
          NextLogitsOf(decoder_, tokens, kept ? kept_rows : all);
      expected.push_back(logits.log_softmax(0)[sample.tokens[i]].item<float>());
      tokens.push_back(sample.tokens[i]);
    }
    ExpectSameScores(sample.logprobs, expected);
  }

  lora::AdapterVersionPtr latest_;
  uint64_t number_ = 0;
  std::map<uint64_t, lora::AdapterVersionPtr> versions_;
};

INSTANTIATE_TEST_SUITE_P(Models, InFlightTest, ::testing::Bool(),
                         [](const auto& test) {
                           return test.param ? "Recurrent" : "Attention";
                         });

SampleRequest InFlight(int32_t first, int length, int max_tokens, uint64_t seed,
                       bool recompute) {
  SampleRequest request = Request(first, length, max_tokens, seed);
  request.in_flight = true;
  request.recompute_cache = recompute;
  return request;
}

TEST_P(InFlightTest, EachTokenHasTheScoreOfTheVersionThatDrewIt) {
  for (const bool recompute : {false, true}) {
    SampleRequest request = InFlight(3, 37, 30, 7, recompute);
    request.num_samples = 2;
    Begin(1, request);
    const uint64_t first = number_;
    (void)Step(11);
    Publish();
    (void)Step(9);
    Publish();
    const SampleResult result = Finish().at(1);
    EXPECT_EQ(result.version, first);
    for (const Sample& sample : result.samples) {
      ASSERT_THAT(sample.version_spans, SizeIs(3));
      for (uint64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(sample.version_spans[i].version, first + i);
      }
      ExpectScoresOfVersions(request, sample, /*kept=*/!recompute);
    }
    // Prefill of a recurrent model takes two steps (EndOfPiece). The last one
    // draws the first token, and each other step one more.
    EXPECT_EQ(result.samples[0].version_spans[0].tokens, GetParam() ? 10 : 11);
  }
}

TEST_P(InFlightTest, WithoutNewVersionsTheBitsAreThoseOfOtherSamples) {
  for (const bool recompute : {false, true}) {
    SampleRequest request = InFlight(3, 37, 30, 7, recompute);
    Begin(1, request);
    const SampleResult in_flight = Finish().at(1);
    EXPECT_THAT(in_flight.samples.at(0).version_spans,
                ElementsAre(VersionSpan{.version = number_, .tokens = 30}));
    request.in_flight = request.recompute_cache = false;
    RestartWith({.kv_cache_bytes = int64_t{1} << 20});
    Begin(1, request);
    const SampleResult result = Finish().at(1);
    EXPECT_EQ(result.samples.at(0).logprobs, in_flight.samples[0].logprobs);
    EXPECT_THAT(result.samples[0].version_spans, IsEmpty());
    RestartWith({.kv_cache_bytes = int64_t{1} << 20});
  }
}

TEST_P(InFlightTest, OtherSamplesKeepTheirVersion) {
  Publish();
  const SampleRequest fixed = Request(3, 37, 30, 7);
  const SampleResult alone = Alone(fixed, latest_);
  const uint64_t version = number_;
  const SampleRequest moving = InFlight(3, 37, 30, 8, /*recompute=*/true);
  Begin(1, fixed);
  Begin(2, moving);
  (void)Step(10);
  Publish();
  const std::map<uint64_t, SampleResult> results = Finish();
  ExpectSameDraws(results.at(1), alone);
  EXPECT_EQ(results.at(1).version, version);
  EXPECT_THAT(results.at(2).samples.at(0).version_spans, SizeIs(2));
}

// A later prompt begins with all tokens of the samples.
TEST_P(InFlightTest, KeysOfSeveralVersionsServeNoOtherSequence) {
  SampleRequest request = InFlight(3, 37, 45, 7, /*recompute=*/false);
  Begin(1, request);
  const lora::AdapterVersionPtr old = latest_;
  (void)Step(6);
  Publish();
  const SampleResult result = Finish().at(1);
  SampleRequest next = Request(0, 1, 10, 8);
  next.prompt = request.prompt;
  next.prompt.insert(next.prompt.end(), result.samples[0].tokens.begin(),
                     result.samples[0].tokens.end());
  (void)NewHits();
  const SampleResult with_new = Alone(next, latest_);
  EXPECT_EQ(NewHits(), 0);
  const SampleResult with_old = Alone(next, old);
  EXPECT_EQ(NewHits(), 32);  // The pages of the first prompt.
  RestartWith({.kv_cache_bytes = int64_t{1} << 20});
  ExpectSameDraws(with_new, Alone(next, latest_));
  ExpectSameDraws(with_old, Alone(next, old));
}

TEST_P(InFlightTest, OneVersionComputesAPrompt) {
  RestartWith({.kv_cache_bytes = int64_t{1} << 20, .max_prefill_tokens = 16});
  for (const bool recompute : {false, true}) {
    SampleRequest request = InFlight(3, 60, 10, 7, recompute);
    request.prompt_logprobs = true;
    Begin(1, request);
    const uint64_t first = number_;
    (void)Step(2);
    Publish();
    const SampleResult result = Finish().at(1);
    EXPECT_EQ(result.version, first);
    EXPECT_EQ(result.samples.at(0).version_spans.at(0),
              (VersionSpan{.version = first, .tokens = 1}));
    EXPECT_THAT(result.samples[0].version_spans, SizeIs(2));
    request.in_flight = request.recompute_cache = false;
    ExpectSameScores(Alone(request, versions_[first]).prompt_logprobs,
                     result.prompt_logprobs);
    RestartWith({.kv_cache_bytes = int64_t{1} << 20, .max_prefill_tokens = 16});
  }
}

TEST_P(InFlightTest, APromptThatHasNotBegunTakesTheLatestVersion) {
  const SampleRequest request = InFlight(3, 20, 10, 7, /*recompute=*/false);
  Begin(1, request);
  Publish();
  const SampleResult result = Finish().at(1);
  EXPECT_EQ(result.version, number_);
  EXPECT_THAT(result.samples.at(0).version_spans,
              ElementsAre(VersionSpan{.version = number_, .tokens = 10}));
}

// One slot, so the second sample starts when the first has ended.
TEST_P(InFlightTest, TheFirstTokenOfALateSampleIsOfTheVersionThatDrewIt) {
  for (const bool recompute : {false, true}) {
    RestartWith(
        {.kv_cache_bytes = int64_t{1} << 20, .max_decode_sequences = 1});
    SampleRequest request = InFlight(3, 37, 12, 7, recompute);
    request.num_samples = 2;
    Begin(1, request);
    const uint64_t first = number_;
    (void)Step(4);
    Publish();
    const SampleResult result = Finish().at(1);
    EXPECT_THAT(result.samples.at(1).version_spans,
                ElementsAre(VersionSpan{.version = first, .tokens = 1},
                            VersionSpan{.version = first + 1, .tokens = 11}));
    for (const Sample& sample : result.samples) {
      ExpectScoresOfVersions(request, sample, /*kept=*/!recompute);
    }
  }
}

TEST_P(InFlightTest, VersionsThatComeFasterThanPrefillDoNotStopASample) {
  RestartWith({.kv_cache_bytes = int64_t{1} << 20, .max_prefill_tokens = 8});
  const SampleRequest request = InFlight(3, 20, 12, 7, /*recompute=*/true);
  Begin(1, request);
  std::optional<SampleResult> result;
  for (int step = 0; step < 200 && !result.has_value(); ++step) {
    Publish();
    for (SampleEvent& event : Step()) {
      if (event.finished) result = std::move(event.result).value();
    }
  }
  ASSERT_TRUE(result.has_value());
  EXPECT_THAT(result->samples.at(0).version_spans, SizeIs(12));
  ExpectScoresOfVersions(request, result->samples[0], /*kept=*/false);
}

TEST_P(InFlightTest, NoSequenceHoldsAnOldVersion) {
  for (const bool recompute : {false, true}) {
    const SampleRequest request = InFlight(3, 20, 40, 7, recompute);
    Begin(1, request);
    (void)Step(5);
    const std::weak_ptr<const lora::AdapterVersion> old = latest_;
    versions_.clear();
    Publish();
    EXPECT_FALSE(old.expired());
    (void)Step(1);
    EXPECT_TRUE(old.expired());
    EXPECT_THAT(Finish().at(1).samples.at(0).version_spans, SizeIs(2));
  }
}

TEST_P(InFlightTest, AnAdapterThatIsGoneLeavesASampleItsVersion) {
  const SampleRequest request = InFlight(3, 20, 30, 7, /*recompute=*/true);
  Begin(1, request);
  (void)Step(5);
  latest_ = nullptr;
  const SampleResult result = Finish().at(1);
  EXPECT_THAT(result.samples.at(0).version_spans,
              ElementsAre(VersionSpan{.version = number_, .tokens = 30}));
}

TEST_P(InFlightTest, AStreamNamesTheVersionOfEachToken) {
  const SampleRequest request = InFlight(3, 20, 30, 7, /*recompute=*/true);
  Begin(1, request, /*streams=*/true);
  std::vector<uint64_t> streamed;
  std::optional<SampleResult> result;
  while (loop_->active() > 0) {
    if (streamed.size() == 9 && number_ == 1) Publish();
    for (SampleEvent& event : Step()) {
      for (const SampleDelta& delta : event.deltas) {
        EXPECT_EQ(VersionsOf(delta.piece).size(), delta.piece.tokens.size());
        for (const uint64_t version : VersionsOf(delta.piece)) {
          streamed.push_back(version);
        }
        EXPECT_EQ(delta.version, 1u);
      }
      if (event.finished) result = std::move(event.result).value();
    }
  }
  EXPECT_EQ(streamed, VersionsOf(result->samples.at(0)));
  EXPECT_EQ(streamed.at(8), 1u);
  EXPECT_EQ(streamed.at(9), 2u);
}

// Samples lose their pages to others, and versions come meanwhile. A sample
// whose keys are computed again scores as if it had run alone. One that keeps
// its keys draws on with keys of the version that it has when it goes on.
TEST_P(InFlightTest, PreemptedSamplesGoOn) {
  const CacheUnits units = CacheUnitsOf(SizesOf(decoder_));
  const int64_t bytes =
      9 * units.page + (units.state > 0 ? 3 * units.state : 0);
  RestartWith({.kv_cache_bytes = bytes});
  const SampleRequest requests[] = {InFlight(1, 4, 100, 7, /*recompute=*/true),
                                    InFlight(20, 17, 90, 8, /*recompute=*/true),
                                    InFlight(33, 30, 80, 9, false)};
  for (uint64_t i = 0; i < 3; ++i) Begin(i, requests[i]);
  std::map<uint64_t, SampleResult> results;
  for (int step = 0; loop_->active() > 0 && step < 5000; ++step) {
    if (step % 40 == 20) Publish();
    for (SampleEvent& event : Step()) {
      if (event.finished) {
        results[event.work_id] = std::move(event.result).value();
      }
    }
  }
  ASSERT_THAT(results, SizeIs(3));
  EXPECT_GT(Metric("weft_sample_preemptions_total"), 0);
  for (uint64_t i = 0; i < 2; ++i) {
    EXPECT_GT(results[i].samples.at(0).version_spans.size(), 1u);
    ExpectScoresOfVersions(requests[i], results[i].samples[0], /*kept=*/false);
  }
  EXPECT_THAT(VersionsOf(results[2].samples.at(0)), SizeIs(80));
  EXPECT_EQ(Metric("weft_kv_cache_used_bytes"), 0);
}

}  // namespace
}  // namespace weft::engine
