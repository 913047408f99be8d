// A sampling loop over a tiny random model.
#ifndef WEFT_TESTS_ENGINE_DECODE_SAMPLE_LOOP_FIXTURE_H_
#define WEFT_TESTS_ENGINE_DECODE_SAMPLE_LOOP_FIXTURE_H_

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "prometheus/registry.h"
#include "src/engine/decode/sample_loop.h"
#include "src/engine/decode/sample_routing.h"
#include "src/engine/start/memory_plan.h"
#include "tests/model/tiny_model.h"
#include "tests/support/adapter_keys.h"
#include "tests/support/tolerance.h"

namespace weft::engine {

inline constexpr int64_t kPages = 24;

inline model::Decoder MakeDecoder() {
  // With a model of this size, several threads would only wait for each other.
  at::set_num_threads(1);
  at::manual_seed(31);
  const model_config::ModelConfig config = TinyConfig();
  model::DecoderWeights weights = TinyWeights(config, at::kFloat);
  return {config, std::move(weights), config.max_positions};
}

inline int64_t BytesOfPages(const model::Decoder& decoder, int64_t pages) {
  return pages * CacheUnitsOf(SizesOf(decoder)).page;
}

// Returns a request whose prompt has `length` tokens and begins with `first`.
inline SampleRequest Request(int32_t first, int length, int max_tokens,
                             uint64_t seed) {
  SampleRequest request{.config = {.max_tokens = max_tokens,
                                   .seed = seed,
                                   .stop = {.ignore_eos = true}}};
  for (int32_t i = 0; i < length; ++i) {
    request.prompt.push_back((first + 7 * i) % 53);
  }
  return request;
}

// Compares scores with a tolerance for rounding, because matrix products of one
// row and of many rows may sum in different orders.
inline void ExpectSameScores(const std::vector<float>& actual,
                             const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  const double tolerance = Tolerance(kEpsilonF32, 1000, 10);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], tolerance) << i;
  }
}

inline void ExpectSameDraws(const SampleResult& actual,
                            const SampleResult& expected) {
  ASSERT_EQ(actual.samples.size(), expected.samples.size());
  for (size_t s = 0; s < expected.samples.size(); ++s) {
    EXPECT_EQ(actual.samples[s].tokens, expected.samples[s].tokens);
    EXPECT_EQ(actual.samples[s].finish_reason,
              expected.samples[s].finish_reason);
    ExpectSameScores(actual.samples[s].logprobs, expected.samples[s].logprobs);
  }
}

class SampleLoopTest : public ::testing::Test {
 protected:
  explicit SampleLoopTest(model::Decoder decoder = MakeDecoder())
      : decoder_(std::move(decoder)),
        executor_(decoder_, {}, {}),
        adapter_(TinyVersion(decoder_.config(), {.rank = 3, .alpha = 6},
                             at::kFloat,
                             /*number=*/5)),
        probe_(&registry_) {
    Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages)});
  }

  // Requests come and are cancelled at random. Checks that each one that is not
  // cancelled gets the same result as when it runs alone with ample room.
  // `restart` makes the loop of a round, with a limit of tokens per prefill.
  void ExpectSameResultsInAnyOrder(
      const std::function<void(int64_t max_prefill_tokens)>& restart);
  // Checks that a long prompt and a group have the same results if they are
  // prefilled in pieces. `restart` is as above.
  void ExpectSameResultsInPieces(
      const std::function<void(int64_t max_prefill_tokens)>& restart);

  // Fills in what a test does not set.
  void Restart(SampleLoopOptions options) {
    if (options.max_decode_sequences == 0) options.max_decode_sequences = 64;
    if (options.max_prefill_tokens == 0) options.max_prefill_tokens = 2048;
    options.decode_graphs = true;
    loop_.emplace(&executor_, options, /*token_bytes=*/nullptr, &probe_);
  }

  void Admit(uint64_t id, const SampleRequest& request,
             lora::AdapterVersionPtr version = nullptr, bool streams = false) {
    loop_->Admit({.id = id,
                  .request = &request,
                  .accepted_at = absl::Now(),
                  .streams = streams},
                 std::move(version));
  }
  // As Admit, for one tenant of several.
  void AdmitFor(const std::string& tenant, uint64_t id,
                const SampleRequest& request) {
    loop_->Admit({.id = id,
                  .flow = Key(tenant),
                  .tenant = tenant,
                  .request = &request,
                  .accepted_at = absl::Now()},
                 /*version=*/nullptr);
  }
  bool HasRoom(const SampleRequest& request) {
    return loop_->HasRoom(request, /*tenant=*/"");
  }

  // Runs a step. Adds the results of the requests that end, by work id.
  void StepInto(std::map<uint64_t, SampleResult>& results) {
    for (SampleEvent& event : loop_->Step()) {
      if (event.finished) {
        results[event.work_id] = std::move(event.result).value();
      }
    }
  }

  // Runs steps until no request is active. Returns the results by work id.
  std::map<uint64_t, SampleResult> Finish() {
    const at::InferenceMode no_autograd;
    std::map<uint64_t, SampleResult> results;
    for (int step = 0; loop_->active() > 0 && step < 5000; ++step) {
      StepInto(results);
    }
    EXPECT_EQ(loop_->active(), 0) << "the loop does not end";
    return results;
  }

  SampleResult Alone(const SampleRequest& request,
                     lora::AdapterVersionPtr version = nullptr) {
    Admit(1, request, std::move(version));
    return Finish()[1];
  }

  // Returns whether a prompt that needs every page could start.
  bool AllPagesFree(int64_t num_pages = kPages) {
    const int tokens = static_cast<int>(num_pages * kPageTokens);
    return HasRoom(Request(0, tokens, 1, 0));
  }

  // Returns how many tokens the cache supplied since the last call.
  int64_t NewHits() {
    const auto hits =
        static_cast<int64_t>(Metric("weft_prefix_cache_hit_tokens_total"));
    return hits - std::exchange(hits_, hits);
  }

  // Returns the value of a counter or gauge without labels.
  double Metric(const std::string& name) const {
    for (const prometheus::MetricFamily& family : registry_.Collect()) {
      if (family.name != name) continue;
      const prometheus::ClientMetric& metric = family.metric.at(0);
      return family.type == prometheus::MetricType::Gauge
                 ? metric.gauge.value
                 : metric.counter.value;
    }
    ADD_FAILURE() << "no metric " << name;
    return 0;
  }

  const model::Decoder decoder_;
  executor::Executor executor_;
  const lora::AdapterVersionPtr adapter_;
  prometheus::Registry registry_;
  EngineProbe probe_;
  std::optional<SampleLoop> loop_;

 private:
  int64_t hits_ = 0;
};

inline std::vector<float> ScoresOf(const std::vector<TopLogprobs>& rows) {
  std::vector<float> scores;
  for (const TopLogprobs& row : rows) {
    for (const auto& [token, logprob] : row) scores.push_back(logprob);
  }
  return scores;
}

inline void SampleLoopTest::ExpectSameResultsInAnyOrder(
    const std::function<void(int64_t max_prefill_tokens)>& restart) {
  const at::InferenceMode no_autograd;
  std::mt19937 random(3);
  std::vector<SampleRequest> requests;
  std::vector<SampleResult> expected;
  for (int i = 0; i < 12; ++i) {
    const int length = 1 + static_cast<int>(random() % 60);
    // Prompts begin in only three ways, so some are prefixes of others.
    requests.push_back(Request(static_cast<int32_t>(random() % 3), length,
                               1 + static_cast<int>(random() % 60), random()));
    requests.back().num_samples = 1 + static_cast<int>(random() % 4);
    requests.back().prompt_logprobs = random() % 4 == 0;
    requests.back().prompt_top_logprobs = i % 3 == 0 ? 2 : 0;
    requests.back().prompt_logprobs_last_n =
        i % 2 == 0 ? 0 : 1 + static_cast<int64_t>(random() % 70);
    if (i % 4 == 1 && length > 1) {
      requests.back().prompt_targets = requests.back().prompt;
      for (int j = 0; j < length; ++j) {
        requests.back().prompt_target_offsets.push_back(
            j == length - 1 ? length : j / 2);
      }
    }
    expected.push_back(Alone(requests[i], i % 2 == 0 ? nullptr : adapter_));
  }
  for (int round = 0; round < 4; ++round) {
    restart(/*max_prefill_tokens=*/1 + static_cast<int64_t>(random() % 40));
    std::map<uint64_t, SampleResult> results;
    size_t num_cancelled = 0;
    uint64_t next = 0;
    for (int step = 0; next < 12 || loop_->active() > 0; ++step) {
      ASSERT_LT(step, 5000) << "the loop does not end";
      // In even rounds requests are also admitted without room, which must be
      // harmless.
      if (next < 12 && random() % 3 == 0 &&
          (round % 2 == 0 || HasRoom(requests[next]))) {
        Admit(next, requests[next], next % 2 == 0 ? nullptr : adapter_);
        ++next;
      }
      if (next > 0 && random() % 60 == 0 && loop_->Cancel(random() % next)) {
        ++num_cancelled;
      }
      StepInto(results);
    }
    EXPECT_EQ(results.size() + num_cancelled, 12u);
    for (const auto& [id, result] : results) {
      SCOPED_TRACE(id);
      ExpectSameDraws(result, expected[id]);
      ExpectSameScores(result.prompt_logprobs, expected[id].prompt_logprobs);
      ExpectSameScores(ScoresOf(result.prompt_top_logprobs),
                       ScoresOf(expected[id].prompt_top_logprobs));
      ExpectSameScores(result.prompt_target_logprobs,
                       expected[id].prompt_target_logprobs);
    }
  }
}

inline void SampleLoopTest::ExpectSameResultsInPieces(
    const std::function<void(int64_t max_prefill_tokens)>& restart) {
  SampleRequest request = Request(3, 100, 12, 7);
  request.prompt_logprobs = true;
  SampleRequest group = Request(9, 50, 12, 8);
  group.num_samples = 3;
  const SampleResult whole = Alone(request, adapter_);
  ASSERT_EQ(whole.prompt_logprobs.size(), 100u);
  const SampleResult whole_group = Alone(group);
  for (const int64_t piece : {1, 7, 16, 33}) {
    restart(piece);
    Admit(1, request, adapter_);
    Admit(2, group);
    const std::map<uint64_t, SampleResult> results = Finish();
    ExpectSameDraws(results.at(1), whole);
    ExpectSameDraws(results.at(2), whole_group);
    ExpectSameScores(results.at(1).prompt_logprobs, whole.prompt_logprobs);
  }
}

// Returns the logits after `tokens`, computed by one pass without a cache.
// `routing` has the adapters of the pass's rows.
inline at::Tensor NextLogitsOf(const model::Decoder& decoder,
                               const std::vector<int32_t>& tokens,
                               const lora::LoraRouting& routing) {
  const auto length = static_cast<int64_t>(tokens.size());
  model::PackedBatch batch{
      .tokens_T = at::tensor(tokens, at::kLong),
      .positions_T = at::arange(length, at::kInt),
      .nodes = {{.begin = 0, .end = length, .subtree_end = length}},
      .routing = routing};
  const at::Tensor x =
      decoder.ForwardLayers(model::Mode::kEval, batch, nullptr, 0, nullptr);
  return at::mm(decoder.FinalNorm(x.slice(0, length - 1)),
                decoder.weights().head_VH.t())[0];
}

inline at::Tensor NextLogits(const model::Decoder& decoder,
                             const std::vector<int32_t>& tokens,
                             const lora::AdapterVersionPtr& version) {
  lora::LoraRouting routing;
  AddRows(routing, version, 0, static_cast<int64_t>(tokens.size()));
  return NextLogitsOf(decoder, tokens, routing);
}

inline at::Tensor NextLogprobs(const model::Decoder& decoder,
                               const std::vector<int32_t>& tokens,
                               const lora::AdapterVersionPtr& version) {
  return NextLogits(decoder, tokens, version).log_softmax(0);
}

}  // namespace weft::engine

#endif  // WEFT_TESTS_ENGINE_DECODE_SAMPLE_LOOP_FIXTURE_H_
