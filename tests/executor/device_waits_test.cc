// Tests on a device that a step waits only for its results. LibTorch's
// SyncDebugMode turns every other wait of LibTorch into an error.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "src/executor/message.h"
#include "src/executor/model_runner.h"
#include "src/model/decoder_weights.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/model/tiny_model.h"

namespace weft::executor {
namespace {

using ::weft::testing::WideDelta;

// While this object exists, every wait through LibTorch throws. Intended waits
// call CUDA directly and do not throw.
class WaitsThrow {
 public:
  WaitsThrow() { Set(c10::cuda::SyncDebugMode::L_ERROR); }
  ~WaitsThrow() { Set(c10::cuda::SyncDebugMode::L_DISABLED); }
  WaitsThrow(const WaitsThrow&) = delete;
  WaitsThrow& operator=(const WaitsThrow&) = delete;

 private:
  static void Set(c10::cuda::SyncDebugMode mode) {
    c10::cuda::warning_state().set_sync_debug_mode(mode);
  }
};

// The parameter: whether some layers of the model compute a gated delta rule.
class DeviceWaitsTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int64_t kTokens = 11;

  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(5);
    config_ = TinyConfig(/*num_layers=*/3);
    if (GetParam()) config_.delta = WideDelta();
    decoder_ = std::make_unique<model::Decoder>(
        config_,
        model::MakeDummyWeights(config_, at::kBFloat16,
                                at::Device(at::kCUDA, 0),
                                /*seed=*/3, parallel::Shard()),
        config_.max_positions);
    rank_ = std::make_unique<ModelRunner>(
        *decoder_, loss::HeadOptions{.chunk_rows = 4, .softcap = 20});
    // Targets all modules of a layer, and the head.
    LoraConfig lora = {
        .rank = 8,
        .alpha = 8,
        .target_modules = {TargetModule::kQProj, TargetModule::kOProj,
                           TargetModule::kGateProj, TargetModule::kDownProj,
                           TargetModule::kLmHead}};
    if (GetParam()) {
      lora.target_modules.insert(
          lora.target_modules.end(),
          {TargetModule::kInProjQkv, TargetModule::kOutProj});
    }
    const lora::AdapterLayout layout(config_.shape(), lora);
    version_ =
        MakeVersion(*decoder_, lora,
                    RandomTensor({layout.num_parameters()}, 0.2, at::kBFloat16)
                        .to(at::kCUDA));
    gradient_N_ = at::zeros({version_->compute_N.numel()},
                            at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  }

  // A prompt of three tokens that two sequences share. Every row is scored.
  TrainPlan MakePlan() const {
    TrainPlan plan{
        .backward = true, .wants_entropy = true, .num_recomputed = 1};
    plan.batch.tokens_T = at::arange(kTokens) * 4;
    plan.batch.positions_T =
        at::cat({at::arange(7), at::arange(3, 7)}).to(at::kInt);
    plan.batch.nodes = {
        {.begin = 0, .end = 3, .subtree_end = kTokens},
        {.begin = 3, .end = 7, .parent = 0, .subtree_end = 7},
        {.begin = 7, .end = kTokens, .parent = 0, .subtree_end = kTokens}};
    plan.batch.routing = {{.begin = 0, .end = kTokens, .version = version_}};
    plan.rows.routing = plan.batch.routing;
    plan.score_index_R = at::arange(kTokens);
    plan.rows.row_offsets = {0};
    for (int64_t row = 0; row < kTokens; ++row) {
      plan.rows.targets.push_back(row * 3);
      plan.rows.row_offsets.push_back(row + 1);
      plan.rows.temperatures.push_back(1.0F);
    }
    return plan;
  }

  model::KvStore MakeStore() const {
    model::KvStore store =
        AllocateCache(*decoder_, /*num_pages=*/4, /*page_tokens=*/4,
                      /*num_states=*/GetParam() ? 3 : 0);
    for (std::vector<at::Tensor>* states :
         {&store.conv_NRW, &store.delta_NHKV}) {
      for (at::Tensor& state : *states) {
        if (state.defined()) state.zero_();
      }
    }
    return store;
  }

  // Returns the slots of sequences for MakeStore's states.
  at::Tensor StateSlots(int64_t num_sequences) const {
    return GetParam() ? at::arange(1, 1 + num_sequences) : at::Tensor();
  }

  model_config::ModelConfig config_;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<ModelRunner> rank_;
  lora::AdapterVersionPtr version_;
  at::Tensor gradient_N_;
};

TEST_P(DeviceWaitsTest, TheSearchFindsAWait) {
  const at::InferenceMode no_autograd;
  const WaitsThrow waits_throw;
  EXPECT_THROW((void)gradient_N_.sum().item<float>(), c10::Error);
  EXPECT_THROW((void)at::arange(3).to(at::kCUDA), c10::Error);
}

TEST_P(DeviceWaitsTest, ATrainingStepWaitsForItsScoresAlone) {
  const at::InferenceMode no_autograd;
  const at::Tensor gradients_E = at::arange(kTokens, at::kFloat).sin_();
  // The first call may wait, because it creates the handles of CUDA libraries.
  for (const bool first : {true, false}) {
    std::unique_ptr<WaitsThrow> waits_throw;
    if (!first) waits_throw = std::make_unique<WaitsThrow>();
    gradient_N_.zero_();
    const TrainScores scores = rank_->Forward(MakePlan());
    EXPECT_TRUE(scores.logprobs_E.is_cpu());
    EXPECT_TRUE(scores.logprobs_E.isfinite().all().item<bool>());
    EXPECT_TRUE(scores.entropies_R.isfinite().all().item<bool>());
    rank_->Backward(gradients_E,
                    {{.version = version_, .gradient_N = gradient_N_}});
  }
  EXPECT_GT(gradient_N_.abs().max().item<float>(), 0);
  EXPECT_TRUE(gradient_N_.isfinite().all().item<bool>());
}

TEST_P(DeviceWaitsTest, APrefillWaitsForItsScoresAndFirstTokensAlone) {
  const at::InferenceMode no_autograd;
  model::KvStore store = MakeStore();
  const lora::LoraRouting routing = {
      {.begin = 0, .end = 1, .version = version_}};
  const CachePlan plan = {
      .batch = {.tokens_T = at::arange(6) * 5,
                .positions_T = at::arange(6).to(at::kInt),
                .nodes = {{.begin = 0, .end = 6, .subtree_end = 6}},
                .routing = {{.begin = 0, .end = 6, .version = version_}}},
      .kv = {.slots_T = at::arange(6), .state_slots_Q = StateSlots(1)},
      .logit_rows = {5},
      .logit_routing = routing,
      .draws = {{.seed = 3}, {.seed = 3, .sample_index = 1}},
      .score_rows = {1},
      .scores = {.row_offsets = {0, 1},
                 .targets = {9},
                 .temperatures = {1.0F},
                 .routing = routing}};
  static_cast<void>(rank_->Run(plan, &store));
  const WaitsThrow waits_throw;
  const CacheOutput output = rank_->Run(plan, &store);
  ASSERT_EQ(output.drawn.size(), 2);
  EXPECT_TRUE(output.drawn[0].has_value() && output.drawn[1].has_value());
  EXPECT_TRUE(output.logprobs_E.isfinite().all().item<bool>());
}

TEST_P(DeviceWaitsTest, ADecodeIterationWaitsForItsTokensAlone) {
  const at::InferenceMode no_autograd;
  model::KvStore store = MakeStore();
  const lora::LoraRouting routing = {
      {.begin = 0, .end = 2, .version = version_}};
  // Only the first row has a list of likely tokens.
  const CachePlan plan = {
      .batch = {.tokens_T = at::tensor({3L, 4L}),
                .positions_T = at::tensor({0, 0}, at::kInt),
                .routing = routing},
      .kv = {.slots_T = at::tensor({0L, 4L}),
             .decode = true,
             .page_table_TL = at::tensor({0, 1}, at::kInt).view({2, 1}),
             .lengths_T = at::tensor({1, 1}, at::kInt),
             .state_slots_Q = StateSlots(2)},
      .logit_rows = {0, 1},
      .logit_routing = routing,
      .draws = {{.config = {.top_logprobs = 2}},
                {.config = {.top_k = 3}, .row = 1}}};
  static_cast<void>(rank_->Run(plan, &store));
  const WaitsThrow waits_throw;
  const CacheOutput output = rank_->Run(plan, &store);
  ASSERT_EQ(output.drawn.size(), 2);
  EXPECT_EQ(output.drawn[0].value().top_logprobs.size(), 2);
  EXPECT_LT(output.drawn[1].value().token, config_.vocab);
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceWaitsTest, ::testing::Bool(),
                         [](const auto& model) {
                           return model.param ? "GatedDelta" : "Attention";
                         });

}  // namespace
}  // namespace weft::executor
