// Tests the threads of RunLossGraph. tests/oracle/test_custom_loss.py compares
// what it computes with PyTorch.
#include "src/loss/run_loss_graph.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace weft::loss {
namespace {

// The loss is the sum of logprobs[index], whose backward pass adds each value
// of `index` to one of the few gradients.
constexpr char kGraph[] = R"({"format": 1, "nodes": [
  {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
  {"op": "placeholder", "name": "index", "target": "index"},
  {"op": "placeholder", "name": "scale", "target": "scale"},
  {"op": "call_function", "name": "picked", "target": "operator.getitem",
   "args": [{"ref": "logprobs"}, {"ref": "index"}]},
  {"op": "call_function", "name": "mul", "target": "operator.mul",
   "args": [{"ref": "picked"}, {"ref": "scale"}]},
  {"op": "call_method", "name": "total", "target": "sum",
   "args": [{"ref": "mul"}]},
  {"op": "output", "name": "output", "target": "output",
   "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]}]})";

class RunLossGraphTest : public ::testing::Test {
 protected:
  RunLossGraphTest() {
    loss_.graph = kGraph;
    loss_.inputs = {{.name = "logprobs", .rank = 1},
                    {.name = "index", .rank = 1},
                    {.name = "scale", .rank = 1}};
    datum_.tokens.assign(kTargets, 3);
    datum_.targets.assign(kTargets, 3);
    CustomInput& index = datum_.custom_inputs["index"];
    CustomInput& scale = datum_.custom_inputs["scale"];
    index.is_int = true;
    index.shape = scale.shape = {kPicked};
    for (int64_t i = 0; i < kPicked; ++i) {
      index.ints.push_back(i * 7 % kTargets);
      scale.floats.push_back(1.0F / static_cast<float>(1 + i % 1000));
    }
    at::set_num_threads(kThreads);
  }
  ~RunLossGraphTest() override { at::set_num_threads(before_); }

  std::vector<float> Gradients() {
    const LossGraph graph = ReadLossGraph(loss_).value();
    const std::vector<float> logprobs(kTargets, -1.5F);
    std::vector<float> losses(kTargets);
    std::vector<float> gradients(kTargets);
    MetricSums metrics;
    const absl::Status run =
        RunLossGraph(graph, loss_, datum_, GraphLimitsOf(kTargets, 1), logprobs,
                     /*backward=*/true, absl::MakeSpan(losses),
                     absl::MakeSpan(gradients), &metrics);
    EXPECT_TRUE(run.ok()) << run;
    gradients.push_back(losses[0]);
    return gradients;
  }

  static constexpr int kThreads = 4;
  static constexpr int64_t kTargets = 64;
  static constexpr int64_t kPicked = 50'000;  // Enough for several threads.
  const int before_ = at::get_num_threads();
  CustomLoss loss_;
  Datum datum_;
};

TEST_F(RunLossGraphTest, GivesTheSameBitsEachTime) {
  const std::vector<float> first = Gradients();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(Gradients(), first) << i;
  EXPECT_EQ(at::get_num_threads(), kThreads);
}

TEST_F(RunLossGraphTest, LeavesTheThreadsOfOthersAlone) {
  std::atomic<bool> ended = false;
  std::thread other([&] {
    // Each thread asks once how many threads its loops have.
    while (!ended) {
      std::thread([] { EXPECT_EQ(at::get_num_threads(), kThreads); }).join();
    }
  });
  for (int i = 0; i < 20; ++i) (void)Gradients();
  ended = true;
  other.join();
}

}  // namespace
}  // namespace weft::loss
