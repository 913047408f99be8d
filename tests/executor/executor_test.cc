// Compares several ranks, as threads, with one rank.
#include "src/executor/executor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "src/executor/remote_worker.h"
#include "src/model/decoder_weights.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tolerance.h"

namespace weft::executor {
namespace {

constexpr uint64_t kSeed = 3;

model::Decoder MakeDecoder(const model_config::ModelConfig& config,
                           const parallel::Links& links) {
  return {config,
          model::MakeDummyWeights(config, at::kFloat, at::kCPU, kSeed,
                                  links.topology.ShardOf(links.rank)),
          config.max_positions, links.tensor.get()};
}

loss::HeadOptions HeadOf(const model::Decoder& decoder) {
  return {.chunk_rows = 5,
          .shard = {.group = decoder.tensor_group(),
                    .vocab = decoder.config().vocab}};
}

// Runs `lead` with an executor of this topology. The other ranks follow it.
void WithGroup(const model_config::ModelConfig& config,
               const parallel::Topology& topology,
               const std::function<void(Executor&)>& lead) {
  const auto meeting = parallel::Rendezvous::InProcess();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < topology.size(); ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      const at::InferenceMode no_autograd;
      parallel::Links links =
          parallel::Meet(meeting, rank, topology, /*local=*/true);
      parallel::JoinOn(at::kCPU, &links);
      const model::Decoder decoder = MakeDecoder(config, links);
      if (rank > 0) {
        RemoteWorker(decoder, HeadOf(decoder), &links).Run();
        return;
      }
      Executor executor(decoder, HeadOf(decoder), std::move(links));
      lead(executor);
      executor.Stop();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class ExecutorTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  ExecutorTest() : config_(TinyConfig()) {
    at::set_num_threads(1);
    at::manual_seed(5);
    LoraConfig lora{.rank = 3, .alpha = 6};
    lora.target_modules.assign(kAllTargetModules.begin(),
                               kAllTargetModules.end());
    versions_ = {TinyVersion(config_, lora, at::kFloat),
                 TinyVersion(config_, {.rank = 4, .alpha = 4}, at::kFloat)};
  }

  parallel::Topology topology() const {
    return {.tensor_size = std::get<0>(GetParam()),
            .num_replicas = std::get<1>(GetParam())};
  }

  // Two sequences of 6 and 5 tokens, with one adapter each. Every token scores
  // one target.
  TrainPlan MakePlan(int64_t first) const {
    constexpr int64_t kRows = 11;
    TrainPlan plan{
        .backward = true, .wants_entropy = true, .num_recomputed = 1};
    plan.batch.tokens_T = (at::arange(kRows) * 7 + first) % config_.vocab;
    plan.batch.positions_T =
        at::cat({at::arange(6), at::arange(5)}).to(at::kInt);
    plan.batch.nodes = {{.begin = 0, .end = 6, .subtree_end = 6},
                        {.begin = 6, .end = kRows, .subtree_end = kRows}};
    plan.batch.routing = Routing();
    plan.rows.routing = Routing();
    plan.score_index_R = at::arange(kRows);
    plan.rows.row_offsets = {0};
    for (int64_t row = 0; row < kRows; ++row) {
      plan.rows.targets.push_back((row * 11 + first) % config_.vocab);
      plan.rows.row_offsets.push_back(row + 1);
      plan.rows.temperatures.push_back(1.0f);
    }
    return plan;
  }

  lora::LoraRouting Routing() const {
    return {{.begin = 0, .end = 6, .version = versions_[0]},
            {.begin = 6, .end = 11, .version = versions_[1]}};
  }

  struct Outcome {
    std::vector<at::Tensor> logprobs, entropies, gradients;
  };

  // Runs four plans, `at_once` at a time, and collects the gradients of the
  // versions `trained`.
  Outcome Train(Executor& executor, int at_once,
                const std::vector<lora::AdapterVersionPtr>& trained) const {
    const lora::LoraGradients gradients =
        lora::ZeroGradients(trained, at::kCPU);
    Outcome outcome;
    for (int first = 0; first < 4; first += at_once) {
      std::vector<TrainPlan> plans;
      std::vector<at::Tensor> gradients_E;
      for (int i = first; i < first + at_once; ++i) {
        plans.push_back(MakePlan(i));
        gradients_E.push_back(at::arange(11, at::kFloat).add_(i).sin_());
      }
      for (const TrainScores& scores : executor.Forward(std::move(plans))) {
        outcome.logprobs.push_back(scores.logprobs_E);
        outcome.entropies.push_back(scores.entropies_R);
      }
      executor.Backward(gradients_E,
                        std::vector<lora::LoraGradients>(at_once, gradients));
    }
    for (const lora::LoraGradient& gradient : gradients) {
      outcome.gradients.push_back(gradient.gradient_N);
    }
    return outcome;
  }
  Outcome Train(Executor& executor, int at_once) const {
    return Train(executor, at_once, versions_);
  }

  const model_config::ModelConfig config_;
  std::vector<lora::AdapterVersionPtr> versions_;
};

// Each value sums over the widths of the layers, which are a few hundred terms.
void ExpectNear(const std::vector<at::Tensor>& actual,
                const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const double scale = expected[i].abs().max().item<double>();
    const double difference =
        (actual[i] - expected[i]).abs().max().item<double>();
    EXPECT_LE(difference, Tolerance(kEpsilonF32, 400, scale)) << i;
  }
}

TEST_P(ExecutorTest, TrainsAsOneRankDoes) {
  Outcome expected, actual, fewer;
  WithGroup(config_, {},
            [&](Executor& executor) { expected = Train(executor, 1); });
  WithGroup(config_, topology(), [&](Executor& executor) {
    actual = Train(executor, topology().num_replicas);
    // With fewer plans than replicas, the last replicas have nothing to do.
    fewer = Train(executor, 1);
  });
  for (const Outcome& outcome : {actual, fewer}) {
    ExpectNear(outcome.logprobs, expected.logprobs);
    ExpectNear(outcome.entropies, expected.entropies);
    ExpectNear(outcome.gradients, expected.gradients);
  }
}

TEST_P(ExecutorTest, TrainsOnlyTheVersionsThatItIsGivenGradientsOf) {
  Outcome both, second;
  WithGroup(config_, topology(), [&](Executor& executor) {
    both = Train(executor, topology().num_replicas);
    second = Train(executor, topology().num_replicas, {versions_[1]});
  });
  ASSERT_EQ(second.gradients.size(), 1);
  EXPECT_TRUE(at::equal(second.gradients[0], both.gradients[1]));
}

TEST_P(ExecutorTest, NewWeightsReachAllRanksAndOldOnesAreForgotten) {
  std::vector<Outcome> expected, actual;
  const auto train_twice = [&](int at_once, std::vector<Outcome>* outcomes) {
    return [this, at_once, outcomes](Executor& executor) {
      at::manual_seed(8);
      outcomes->push_back(Train(executor, at_once));
      executor.Ping();  // Drops nothing: versions_ still has all weights.
      const std::weak_ptr<const lora::AdapterVersion> old = versions_[1];
      versions_[1] = TinyVersion(config_, {.rank = 2, .alpha = 4}, at::kFloat);
      outcomes->push_back(Train(executor, at_once));
      EXPECT_TRUE(old.expired()) << "the executor keeps it alive";
      executor.Ping();
    };
  };
  const at::Tensor weights_N = versions_[1]->compute_N;
  WithGroup(config_, {}, train_twice(1, &expected));
  // The same weights under another id.
  versions_[1] = TinyVersion(config_, {.rank = 4, .alpha = 4}, at::kFloat);
  versions_[1]->compute_N.copy_(weights_N);
  WithGroup(config_, topology(), train_twice(topology().num_replicas, &actual));
  for (int i = 0; i < 2; ++i) {
    ExpectNear(actual[i].logprobs, expected[i].logprobs);
    ExpectNear(actual[i].gradients, expected[i].gradients);
  }
}

// Returns the log-probabilities [V] of all tokens, because the rule asked for V
// top_logprobs.
at::Tensor LogprobsOf(const std::optional<sampling::DrawResult>& drawn) {
  const auto& top = drawn.value().top_logprobs;
  at::Tensor logprobs_V = at::full({static_cast<int64_t>(top.size())}, NAN);
  for (const auto& [token, logprob] : top) logprobs_V[token] = logprob;
  return logprobs_V;
}

TEST_P(ExecutorTest, SamplesAsOneRankDoes) {
  using Drawn = std::vector<std::optional<sampling::DrawResult>>;
  const auto sample = [this](std::vector<at::Tensor>* outputs, Drawn* drawn) {
    return [this, outputs, drawn](Executor& executor) {
      constexpr int64_t kPageTokens = 4;
      const auto vocab = static_cast<int>(config_.vocab);
      executor.MakeCache(/*num_pages=*/4, kPageTokens, /*num_states=*/0);
      CachePlan prefill{
          .batch =
              {.tokens_T = at::arange(6) * 5,
               .positions_T = at::arange(6).to(at::kInt),
               .nodes = {{.begin = 0, .end = 6, .subtree_end = 6}},
               .routing = {{.begin = 0, .end = 6, .version = versions_[0]}}},
          .kv = {.slots_T = at::arange(6)},
          .logit_rows = {5},
          .logit_routing = {{.begin = 0, .end = 1, .version = versions_[0]}},
          .draws = {{.config = {.top_logprobs = vocab}}},
          .score_rows = {1, 3},
          .scores = {
              .row_offsets = {0, 1, 2},
              .targets = {9, 10},
              .temperatures = {1.0f, 1.0f},
              .routing = {{.begin = 0, .end = 2, .version = versions_[0]}}}};
      const CacheOutput first = executor.Run(prefill);
      outputs->push_back(LogprobsOf(first.drawn[0]));
      outputs->push_back(first.logprobs_E);
      // The second sequence begins like the first one.
      executor.Copy(PageCopy{.from = 1, .to = 2, .num_rows = 2});
      const CachePlan decode{
          .batch =
              {.tokens_T = at::tensor({30L, 31L}),
               .positions_T = at::tensor({6, 6}, at::kInt),
               .routing = {{.begin = 0, .end = 1, .version = versions_[0]}}},
          .kv = {.slots_T = at::tensor({6L, 10L}),
                 .decode = true,
                 .page_table_TL =
                     at::tensor({0, 1, 0, 2}, at::kInt).view({2, 2}),
                 .lengths_T = at::tensor({7, 7}, at::kInt)},
          .logit_rows = {0, 1},
          .logit_routing = {{.begin = 0, .end = 1, .version = versions_[0]}},
          .draws = {
              {.config = {.top_logprobs = vocab}, .seed = 5, .position = 7},
              {.config = {.temperature = 0, .top_logprobs = vocab}, .row = 1},
              {.seed = 6, .position = 7, .row = 1}}};
      *drawn = executor.Run(decode).drawn;
      outputs->push_back(LogprobsOf((*drawn)[0]));
      outputs->push_back(LogprobsOf((*drawn)[1]));
    };
  };
  std::vector<at::Tensor> expected, actual;
  Drawn expected_drawn, drawn;
  WithGroup(config_, {}, sample(&expected, &expected_drawn));
  WithGroup(config_, topology(), sample(&actual, &drawn));
  EXPECT_EQ(expected[0].sizes(), (std::vector<int64_t>{config_.vocab}));
  ExpectNear(actual, expected);
  ASSERT_EQ(drawn.size(), 3);
  for (size_t r = 0; r < drawn.size(); ++r) {
    EXPECT_EQ(drawn[r].value().token, expected_drawn[r].value().token);
    EXPECT_NEAR(drawn[r]->logprob, expected_drawn[r]->logprob,
                Tolerance(kEpsilonF32, 400, 10));
  }
  EXPECT_EQ(drawn[1]->token, actual.back().argmax().item<int64_t>());
}

INSTANTIATE_TEST_SUITE_P(Sizes, ExecutorTest,
                         ::testing::Values(std::tuple(1, 2), std::tuple(2, 1),
                                           std::tuple(4, 1), std::tuple(2, 2)),
                         [](const auto& test) {
                           return "Tensor" +
                                  std::to_string(std::get<0>(test.param)) +
                                  "Data" +
                                  std::to_string(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace weft::executor
