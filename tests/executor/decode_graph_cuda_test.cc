// Tests on a device that a replayed decode step has the same bits as a launched
// one with the same padding, for any rows, lengths and adapters.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "src/executor/decode_graph.h"
#include "src/executor/message.h"
#include "src/executor/model_runner.h"
#include "src/model/decoder_weights.h"
#include "src/ops/cuda_dispatch.h"
#include "tests/executor/decode_plan.h"
#include "tests/model/device_decoder.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/model/tiny_model.h"

namespace weft::executor {
namespace {

constexpr int64_t kMaxRows = 8;

using MatrixFormat = model_config::MatrixFormat;

struct Form {
  std::string name;
  // Whether some layers compute a gated delta rule, and whether all layers have
  // experts. In both cases the model has widths that all kernels take.
  // Otherwise no vector divides its widths.
  bool has_delta = false;
  MatrixFormat format = MatrixFormat::kDtype;
  bool has_experts = false;
};

class DecodeGraphCudaTest : public ::testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(5);
    model_config::ModelConfig config = TinyConfig();
    if (GetParam().has_delta) {
      config = testing::WideConfig(/*num_layers=*/3);
      config.delta = testing::WideDelta();
    }
    if (GetParam().has_experts) {
      if (!ops::cuda::HasGroupedProduct()) GTEST_SKIP() << "no grouped product";
      config = testing::WideConfig(/*num_layers=*/2);
      config.moe.shape = {.count = 8,
                          .per_token = 2,
                          .ffn = 16,
                          .shared_ffn = 24,
                          .layers = {true, true}};
    }
    decoder_ = std::make_unique<model::Decoder>(
        config,
        model::MakeDummyWeights(config, at::kBFloat16, at::Device(at::kCUDA, 0),
                                /*seed=*/3, parallel::Shard(),
                                GetParam().format),
        config.max_positions);
    rank_ = std::make_unique<ModelRunner>(*decoder_,
                                          loss::HeadOptions{.softcap = 20});
    for (const int rank : {8, 24}) {
      LoraConfig lora = {.rank = rank, .alpha = 8};
      if (rank == 8) lora.target_modules = {TargetModule::kQProj};
      if (GetParam().has_delta) {
        lora.target_modules.insert(
            lora.target_modules.end(),
            {TargetModule::kInProjQkv, TargetModule::kOutProj});
      }
      const lora::AdapterLayout layout(config.shape(), lora);
      versions_.push_back(MakeVersion(
          *decoder_, lora,
          RandomTensor({layout.num_parameters()}, 0.2, at::kBFloat16)
              .to(at::kCUDA)));
    }
    store_ = FilledCache(*decoder_);
    graph_store_ = FilledCache(*decoder_);
    graphs_ =
        std::make_unique<DecodeGraphs>(*decoder_, rank_->head(), &graph_store_,
                                       kMaxRows, MakeStepDevice(*decoder_));
  }

  // Returns the plan padded to `rows` rows, with a page table as wide as the
  // graph's.
  static CachePlan Padded(CachePlan plan, int64_t rows) {
    const int64_t padding = rows - plan.batch.tokens_T.size(0);
    const auto pad = [&](at::Tensor& values, int64_t value) {
      values = at::constant_pad_nd(values, {0, padding}, value);
    };
    pad(plan.batch.tokens_T, 0);
    pad(plan.batch.positions_T, 0);
    pad(plan.kv.slots_T, -1);
    pad(plan.kv.lengths_T, 0);
    if (GetParam().has_delta) pad(plan.kv.state_slots_Q, kPaddingState);
    plan.kv.page_table_TL = at::constant_pad_nd(
        plan.kv.page_table_TL,
        {0, 512 / kPageTokens - kPagesOfSequence, 0, padding});
    plan.logit_rows.clear();
    for (int64_t r = 0; r < rows; ++r) plan.logit_rows.push_back(r);
    return plan;
  }

  void ExpectSame(const CachePlan& plan, int64_t bucket) {
    const CacheOutput output = rank_->Run(plan, &graph_store_, graphs_.get());
    ASSERT_TRUE(output.by_graph);
    const CacheOutput expected = rank_->Run(Padded(plan, bucket), &store_);
    ASSERT_EQ(output.drawn.size(), expected.drawn.size());
    for (size_t r = 0; r < output.drawn.size(); ++r) {
      EXPECT_EQ(output.drawn[r].value().token, expected.drawn[r].value().token);
      EXPECT_EQ(output.drawn[r]->logprob, expected.drawn[r]->logprob) << r;
    }
    ExpectSameCache(store_, graph_store_);
  }

  CachePlan Plan(int64_t num_rows, int64_t salt) const {
    return DecodePlan(num_rows, salt, decoder_->config());
  }

  const at::InferenceMode no_autograd_;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<ModelRunner> rank_;
  std::vector<lora::AdapterVersionPtr> versions_;
  model::KvStore store_, graph_store_;
  std::unique_ptr<DecodeGraphs> graphs_;
};

TEST_P(DecodeGraphCudaTest, ReplaysOfTheBaseModelHaveTheBitsOfLaunches) {
  for (int64_t salt = 0; salt < 6; ++salt) {
    ExpectSame(Plan(1, salt), 1);
    ExpectSame(Plan(5 + salt % 4, salt), 8);
  }
  EXPECT_EQ(graphs_->stats().graphs, 2);
}

TEST_P(DecodeGraphCudaTest, RulesChangeBetweenReplays) {
  for (int64_t salt = 0; salt < 6; ++salt) {
    const double step = 0.1 * static_cast<double>(salt);
    CachePlan plan = Plan(4, salt);
    plan.draws[0].config = {.temperature = 0};
    plan.draws[1].config = {.temperature = 0.5 + step, .top_k = 5};
    plan.draws[2].config = {.top_p = 0.9 - step};
    plan.draws[3].config = {.temperature = 2 - step, .min_p = step};
    ExpectSame(plan, 4);
  }
  EXPECT_EQ(graphs_->stats().graphs, 1);
}

TEST_P(DecodeGraphCudaTest, AdaptersChangeBetweenReplays) {
  for (int64_t salt = 0; salt < 6; ++salt) {
    CachePlan plan = Plan(7, salt);
    // The first segment has 1 to 3 rows. At most one row of the base model
    // follows. The second segment has the rest.
    const int64_t first = 1 + salt % 3;
    const int64_t second = first + salt % 2;
    plan.batch.routing = {
        {.begin = 0, .end = first, .version = versions_[salt % 2]},
        {.begin = second, .end = 7, .version = versions_[1]}};
    plan.logit_routing = plan.batch.routing;
    ExpectSame(plan, 8);
  }
  EXPECT_EQ(graphs_->stats().graphs, 1);
}

TEST_P(DecodeGraphCudaTest, AReplayWaitsForItsTokensAlone) {
  static_cast<void>(rank_->Run(Plan(2, 1), &graph_store_, graphs_.get()));
  auto& state = c10::cuda::warning_state();
  state.set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  CacheOutput output;
  EXPECT_NO_THROW(output =
                      rank_->Run(Plan(2, 2), &graph_store_, graphs_.get()));
  state.set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  EXPECT_TRUE(output.by_graph);
}

// A step that cannot be recorded does no harm to later ones.
TEST_P(DecodeGraphCudaTest, AFailedRecordLeavesTheDeviceAsItWas) {
  const std::unique_ptr<StepDevice> device = MakeStepDevice(*decoder_);
  const at::Tensor numbers = at::ones({64}, at::kCUDA);
  EXPECT_ANY_THROW(static_cast<void>(
      device->Record([&] { return at::full({}, numbers.sum().item()); })));
  EXPECT_EQ(numbers.sum().item<float>(), 64);
  at::Tensor total = at::zeros({}, at::kCUDA);
  const auto step = [&] { return total.add_(numbers.sum()); };
  device->Run(step);
  const std::unique_ptr<StepGraph> graph = device->Record(step);
  total.zero_();
  for (int time = 0; time < 3; ++time) graph->Replay();
  EXPECT_EQ(total.item<float>(), 3 * 64);
}

INSTANTIATE_TEST_SUITE_P(
    Forms, DecodeGraphCudaTest,
    ::testing::Values(Form{"Attention"}, Form{"GatedDelta", true},
                      Form{"GatedDeltaInt8", true, MatrixFormat::kInt8},
                      Form{.name = "Experts", .has_experts = true}),
    [](const auto& form) { return form.param.name; });

}  // namespace
}  // namespace weft::executor
