// Tests that a remote worker keeps and drops weights as rank 0 tells it.
#include "src/executor/remote_worker.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/executor/message.h"
#include "src/model/decoder_weights.h"
#include "tests/model/tiny_model.h"

namespace weft::executor {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 4;

// Runs `lead` as rank 0 of two replicas. The other replica is a RemoteWorker.
// Returns the error that ends the worker, or "".
std::string ErrorOfWorker(const model_config::ModelConfig& config,
                          const std::function<void(parallel::Links&)>& lead) {
  const auto meeting = parallel::Rendezvous::InProcess();
  const parallel::Topology topology = {.num_replicas = 2};
  std::string error;
  std::thread worker([&] {
    at::set_num_threads(1);
    parallel::Links links =
        parallel::Meet(meeting, 1, topology, /*local=*/true);
    parallel::JoinOn(at::kCPU, &links);
    const model::Decoder decoder(
        config, model::MakeDummyWeights(config, at::kFloat, at::kCPU, 3),
        config.max_positions);
    try {
      RemoteWorker(decoder, loss::HeadOptions(), &links).Run();
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
    }
  });
  parallel::Links links = parallel::Meet(meeting, 0, topology, /*local=*/true);
  parallel::JoinOn(at::kCPU, &links);
  lead(links);
  worker.join();
  return error;
}

void Announce(const lora::AdapterVersionPtr& version, parallel::Links& links) {
  SendMessage(NewVersion{.id = version->id.value(),
                         .config = version->layout->config()},
              *links.commands);
  links.transfers->Send(version->compute_N, 1);
}

void Drop(const std::vector<uint64_t>& ids, parallel::Links& links) {
  SendMessage(DropVersions{.ids = ids}, *links.commands);
}

// Sends a step in which rank 0 has no work, and the worker scores one target
// with the weights of `version`.
void SendPlan(const lora::AdapterVersionPtr& version, parallel::Links& links) {
  TrainPlan plan;
  plan.batch = {.tokens_T = at::arange(kTokens) * 3,
                .positions_T = at::arange(kTokens).to(at::kInt),
                .nodes = {{.begin = 0, .end = kTokens, .subtree_end = kTokens}},
                .routing = {{.begin = 0, .end = kTokens, .version = version}}};
  plan.score_index_R = at::tensor({1L});
  plan.rows = {.row_offsets = {0, 1}, .targets = {7}, .temperatures = {1.0F}};
  SendMessage(TrainCommand{.plans = {TrainPlan(), std::move(plan)}},
              *links.commands);
}

float ReceiveScore(parallel::Links& links) {
  at::Tensor logprobs_E = at::empty({1});
  links.commands->Receive(logprobs_E, 1);
  return logprobs_E.item<float>();
}

class RemoteWorkerTest : public ::testing::Test {
 protected:
  RemoteWorkerTest() : config_(TinyConfig()) {
    at::manual_seed(6);
    for (lora::AdapterVersionPtr* version : {&kept_, &dropped_}) {
      *version = TinyVersion(config_, {.rank = 3, .alpha = 6}, at::kFloat);
    }
  }

  const model_config::ModelConfig config_;
  lora::AdapterVersionPtr kept_, dropped_;
};

TEST_F(RemoteWorkerTest, APlanOfForgottenWeightsEndsItWithAnError) {
  const std::string error = ErrorOfWorker(config_, [&](parallel::Links& links) {
    Announce(dropped_, links);
    SendPlan(dropped_, links);
    EXPECT_LT(ReceiveScore(links), 0);
    Drop({dropped_->id.value()}, links);
    SendPlan(dropped_, links);
  });
  EXPECT_THAT(error, HasSubstr("no weights have id " +
                               std::to_string(dropped_->id.value())));
}

TEST_F(RemoteWorkerTest, APlanOfWeightsThatItNeverHadEndsItWithAnError) {
  EXPECT_THAT(ErrorOfWorker(config_,
                            [&](parallel::Links& links) {
                              Announce(kept_, links);
                              SendPlan(dropped_, links);
                            }),
              HasSubstr("no weights have id"));
}

TEST_F(RemoteWorkerTest, OtherWeightsStayAndForgottenOnesMayComeAgain) {
  const auto lead = [&](parallel::Links& links) {
    Announce(kept_, links);
    Announce(dropped_, links);
    SendPlan(kept_, links);
    const float kept = ReceiveScore(links);
    SendPlan(dropped_, links);
    const float dropped = ReceiveScore(links);
    EXPECT_NE(kept, dropped);
    // Dropping an unknown id has no effect.
    Drop({dropped_->id.value(), ~uint64_t{0}}, links);
    SendPlan(kept_, links);
    EXPECT_EQ(ReceiveScore(links), kept);
    Announce(dropped_, links);
    SendPlan(dropped_, links);
    EXPECT_EQ(ReceiveScore(links), dropped);
    SendMessage(StopCommand(), *links.commands);
  };
  EXPECT_EQ(ErrorOfWorker(config_, lead), "");
}

}  // namespace
}  // namespace weft::executor
