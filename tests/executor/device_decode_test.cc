// Tests what a decode iteration launches, uploads and waits for, on the device
// of tests/support/host_device. A graph counts as one launch.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/executor/decode_graph.h"
#include "src/executor/model_runner.h"
#include "src/sampling/logit_edits.h"
#include "tests/executor/decode_plan.h"
#include "tests/model/device_decoder.h"
#include "tests/model/int8_weights.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/support/host_device/host_device.h"

namespace weft::executor {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::weft::testing::DeviceEvents;
using ::weft::testing::DeviceRecording;
using ::weft::testing::WeightsTo;
using ::weft::testing::WideConfig;

constexpr int64_t kMaxRows = 8;
// A bucket, so that graphs and launches have the same products.
constexpr int64_t kRows = 4;

class DeviceDecodeTest : public ::testing::Test {
 protected:
  DeviceDecodeTest()
      : decoder_(MakeDecoder()),
        rank_(decoder_, loss::HeadOptions{}),
        store_(FilledCache(decoder_)),
        graph_store_(FilledCache(decoder_)),
        graphs_(decoder_, rank_.head(), &graph_store_, kMaxRows,
                MakeStepDevice(decoder_)) {}

  static model::Decoder MakeDecoder() {
    at::set_num_threads(1);
    at::manual_seed(3);
    const model_config::ModelConfig config = WideConfig(/*num_layers=*/2);
    return {config,
            WeightsTo(TinyWeights(config, at::kBFloat16),
                      at::TensorOptions(at::kBFloat16).device(at::kCUDA)),
            config.max_positions};
  }

  CachePlan Plan(int64_t salt) const {
    return DecodePlan(kRows, salt, decoder_.config());
  }
  sampling::SharedEdits MakeEdits(const SamplingConfig& config) const {
    return {config, /*prompt=*/{3, 1, 3}, /*stops=*/{2},
            decoder_.config().vocab, at::kCUDA};
  }

  // Returns the events of an iteration by a graph that is already recorded.
  DeviceEvents EventsOf(const CachePlan& plan) {
    static_cast<void>(rank_.Run(Plan(0), &graph_store_, &graphs_));
    const DeviceRecording recording;
    EXPECT_TRUE(rank_.Run(plan, &graph_store_, &graphs_).by_graph);
    return recording.events();
  }

  const c10::InferenceMode no_autograd_;
  const model::Decoder decoder_;
  const ModelRunner rank_;
  model::KvStore store_, graph_store_;
  DecodeGraphs graphs_;
};

SamplingConfig EveryEdit() {
  SamplingConfig config;
  config.repetition_penalty = 1.5F;
  config.frequency_penalty = 0.25F;
  config.logit_bias = {{4, 2}};
  config.allowed_token_ids = {1, 2, 3, 4, 5, 6, 7};
  config.min_tokens = 3;
  return config;
}

TEST_F(DeviceDecodeTest, AnIterationIsAGraphAndADraw) {
  const DeviceEvents events = EventsOf(Plan(1));
  EXPECT_THAT(events.launches,
              ElementsAre("graph", "ChunkMaxKernel", "DrawKernel"));
  // The inputs of the step, and the rules of the draws.
  EXPECT_THAT(events.uploads, SizeIs(2));
  EXPECT_THAT(events.waits, ElementsAre("cudaStreamSynchronize"));
}

// A row's edits cost one launch and one copy, and so do the edits of all rows.
TEST_F(DeviceDecodeTest, EditsAddALaunch) {
  const sampling::SharedEdits shared = MakeEdits(EveryEdit());
  for (const int64_t num_edited : {int64_t{1}, kRows}) {
    SCOPED_TRACE(num_edited);
    CachePlan plan = Plan(1);
    std::vector<sampling::SequenceEdits> edits;
    for (int64_t row = 0; row < num_edited; ++row) {
      edits.emplace_back(&shared).Push(static_cast<int32_t>(row));
    }
    for (int64_t row = 0; row < num_edited; ++row) {
      plan.edits.push_back(
          {.row = row, .edits = &edits[row], .early = row % 2 == 0});
    }
    const DeviceEvents events = EventsOf(plan);
    EXPECT_THAT(events.launches, ElementsAre("graph", "EditLogitsKernel",
                                             "ChunkMaxKernel", "DrawKernel"));
    EXPECT_THAT(events.uploads, SizeIs(3));
    EXPECT_THAT(events.waits, ElementsAre("cudaStreamSynchronize"));
  }
}

// Supports, which reinforcement learning asks for, and lists of likely tokens
// add a launch and a copy. No row of logits is copied to the host.
TEST_F(DeviceDecodeTest, ListsAddALaunch) {
  CachePlan plan = Plan(1);
  plan.draws[0].config = {.top_logprobs = 2};
  plan.draws[2].config = {.top_k = 9, .top_p = 0.9, .support = true};
  const DeviceEvents events = EventsOf(plan);
  std::vector<std::string> launches = events.launches;
  EXPECT_EQ(std::erase(launches, "CountKernel"), 7);
  EXPECT_THAT(launches, ElementsAre("graph", "ChunkMaxKernel", "DrawKernel",
                                    "ListTokensKernel"));
  EXPECT_THAT(events.uploads, SizeIs(3));
  EXPECT_THAT(events.waits, ElementsAre("cudaStreamSynchronize"));
}

// Samples with and without edits draw the same tokens by a graph and by
// launches, while their edits grow.
TEST_F(DeviceDecodeTest, AGraphDrawsWhatLaunchesDraw) {
  const sampling::SharedEdits shared = MakeEdits(EveryEdit());
  sampling::SequenceEdits by_graph(&shared), by_launches(&shared);
  for (int64_t salt = 0; salt < 6; ++salt) {
    SCOPED_TRACE(salt);
    CachePlan plan = Plan(salt);
    plan.draws[0].config = {.top_k = 4};
    plan.draws[1].config = {.top_k = 9, .top_p = 0.9, .support = true};
    plan.draws[3].config = {.top_logprobs = 3};
    const auto run = [&](sampling::SequenceEdits* edits, model::KvStore* store,
                         DecodeGraphs* graphs) {
      plan.edits = {{.row = 2, .edits = edits, .early = salt < 3}};
      return rank_.Run(plan, store, graphs).drawn;
    };
    const Draws drawn = run(&by_graph, &graph_store_, &graphs_);
    const Draws expected = run(&by_launches, &store_, nullptr);
    ASSERT_THAT(drawn, SizeIs(kRows));
    for (int64_t row = 0; row < kRows; ++row) {
      EXPECT_EQ(drawn[row].value().token, expected[row].value().token) << row;
      EXPECT_EQ(drawn[row]->logprob, expected[row]->logprob) << row;
      EXPECT_EQ(drawn[row]->top_logprobs, expected[row]->top_logprobs) << row;
      EXPECT_EQ(drawn[row]->support, expected[row]->support) << row;
    }
    EXPECT_LE(drawn[2]->token, 7);
    by_graph.Push(drawn[2]->token);
    by_launches.Push(drawn[2]->token);
  }
}

// Makes a model on the device whose layers have experts and a shared one.
model::Decoder MakeExperts(bool is_int8 = false) {
  at::set_num_threads(1);
  at::manual_seed(6);
  model_config::ModelConfig config = WideConfig(/*num_layers=*/2);
  config.moe.shape = {.count = 8,
                      .per_token = 2,
                      .ffn = 16,
                      .shared_ffn = 24,
                      .layers = {true, true}};
  config.moe.normalizes_weights = true;
  const model::DecoderWeights weights = TinyWeights(config, at::kBFloat16);
  return {config,
          WeightsTo(is_int8 ? weft::testing::Quantized(weights) : weights,
                    at::TensorOptions(at::kBFloat16).device(at::kCUDA)),
          config.max_positions};
}

// Runs iterations of a model with experts by graphs and by launches.
class DeviceExpertsDecodeTest : public ::testing::Test {
 protected:
  DeviceExpertsDecodeTest()
      : decoder_(MakeExperts()),
        rank_(decoder_, loss::HeadOptions{}),
        store_(FilledCache(decoder_)),
        graph_store_(FilledCache(decoder_)),
        graphs_(decoder_, rank_.head(), &graph_store_, kMaxRows,
                MakeStepDevice(decoder_)) {
    for (model::KvStore* store : {&store_, &graph_store_}) {
      store->experts_PSE.fill_(-7);
    }
  }

  lora::AdapterVersionPtr Version(const LoraConfig& lora) const {
    auto version = std::make_shared<lora::AdapterVersion>(
        *TinyVersion(decoder_.config(), lora, at::kBFloat16));
    version->compute_N = version->compute_N.to(at::kCUDA);
    return version;
  }

  CachePlan Plan(int64_t num_rows, int64_t salt) const {
    return DecodePlan(num_rows, salt, decoder_.config());
  }

  // Runs the plan by a graph and by launches.
  void ExpectSame(const CachePlan& plan) {
    const CacheOutput output = rank_.Run(plan, &graph_store_, &graphs_);
    ASSERT_TRUE(output.by_graph);
    const CacheOutput expected = rank_.Run(plan, &store_);
    ASSERT_THAT(output.drawn, SizeIs(expected.drawn.size()));
    for (size_t row = 0; row < output.drawn.size(); ++row) {
      EXPECT_EQ(output.drawn[row].value().token,
                expected.drawn[row].value().token)
          << row;
      EXPECT_EQ(output.drawn[row]->logprob, expected.drawn[row]->logprob)
          << row;
    }
    ExpectSameCache(store_, graph_store_);
    EXPECT_TRUE(store_.experts_PSE.cpu().equal(graph_store_.experts_PSE.cpu()));
  }

  const c10::InferenceMode no_autograd_;
  const model::Decoder decoder_;
  const ModelRunner rank_;
  model::KvStore store_, graph_store_;
  DecodeGraphs graphs_;
};

// The last of four rows may be padding, which has experts, too.
TEST_F(DeviceExpertsDecodeTest, AGraphHasTheBitsOfLaunches) {
  for (int64_t salt = 0; salt < 5; ++salt) {
    SCOPED_TRACE(salt);
    ExpectSame(Plan(kRows, salt));
    ExpectSame(Plan(kRows - 1, salt));
  }
  EXPECT_EQ(graphs_.stats().graphs, 1);
}

// The adapters of a graph's iterations differ in their rows, in their rank, and
// in whether they have LoRA on experts at all.
TEST_F(DeviceExpertsDecodeTest, AGraphServesAdaptersOfExperts) {
  using enum TargetModule;
  const std::vector<lora::AdapterVersionPtr> versions = {
      Version({.rank = 8, .alpha = 16}),
      Version({.rank = 4, .alpha = 8, .target_modules = {kQProj}}),
      Version({.rank = 16, .alpha = 8, .target_modules = {kDownProj}}),
      Version({.rank = 3, .alpha = 8, .target_modules = {kUpProj, kVProj}})};
  for (size_t salt = 0; salt < 2 * versions.size(); ++salt) {
    SCOPED_TRACE(salt);
    CachePlan plan =
        Plan(salt % 2 == 0 ? kRows : kRows - 1, static_cast<int64_t>(salt));
    plan.batch.routing = {
        {.begin = 0, .end = 1, .version = versions[salt % versions.size()]},
        {.begin = 1,
         .end = 3,
         .version = versions[(salt + 1) % versions.size()]}};
    ExpectSame(plan);
  }
  EXPECT_EQ(graphs_.stats().graphs, 1);
}

TEST_F(DeviceExpertsDecodeTest, AnIterationIsAGraphAndADraw) {
  ExpectSame(Plan(kRows, 0));
  const DeviceRecording recording;
  EXPECT_TRUE(rank_.Run(Plan(kRows, 1), &graph_store_, &graphs_).by_graph);
  EXPECT_THAT(recording.events().launches,
              ElementsAre("graph", "ChunkMaxKernel", "DrawKernel"));
  EXPECT_THAT(recording.events().waits, ElementsAre("cudaStreamSynchronize"));
}

// A batch that gives its tokens experts must not have others without a word.
TEST_F(DeviceExpertsDecodeTest, GivenExpertsWantLaunches) {
  CachePlan plan = Plan(kRows, 1);
  plan.batch.experts_TE = at::zeros({kRows, 4}, at::kShort);
  EXPECT_FALSE(graphs_.Run(plan).has_value());
}

// Where the host sorts the rows of experts, there are no graphs.
TEST(DeviceStepTest, ExpertsThatTheHostSortsHaveNoGraphs) {
  const c10::InferenceMode no_autograd;
  EXPECT_NE(MakeStepDevice(MakeExperts()), nullptr);
  EXPECT_EQ(MakeStepDevice(MakeExperts(/*is_int8=*/true)), nullptr);
  weft::testing::cuda_on_host::compute_capability_major = 8;
  EXPECT_EQ(MakeStepDevice(MakeExperts()), nullptr);
  weft::testing::cuda_on_host::compute_capability_major = 9;
}

// Makes a model on the device in which some layers have states.
model::Decoder MakeHybrid() {
  at::manual_seed(4);
  const model_config::ModelConfig config = weft::testing::HybridConfig();
  model::DecoderWeights weights =
      WeightsTo(weft::testing::HybridWeights(config, at::kBFloat16),
                at::TensorOptions(at::kBFloat16).device(at::kCUDA));
  for (model::LayerWeights& layer : weights.layers) {
    for (at::Tensor* tensor : {&layer.conv_WR1, &layer.a_log_H,
                               &layer.dt_bias_H, &layer.delta_norm_V}) {
      if (tensor->defined()) *tensor = tensor->to(at::kCUDA);
    }
  }
  return {config, std::move(weights), config.max_positions};
}

// A row that fills up a graph neither reads nor writes a large state.
TEST(DeviceCacheTest, PaddingLeavesItsState) {
  const c10::InferenceMode no_autograd;
  const model::Decoder decoder = MakeHybrid();
  const ModelRunner rank(decoder, loss::HeadOptions{});
  model::KvStore store = FilledCache(decoder);
  DecodeGraphs graphs(decoder, rank.head(), &store, kMaxRows,
                      MakeStepDevice(decoder));
  const at::Tensor before = store.delta_NHKV[0].cpu();
  CachePlan plan = DecodePlan(kRows - 1, 1, decoder.config());
  plan.kv.state_slots_Q = at::arange(1, kRows);
  EXPECT_TRUE(rank.Run(plan, &store, &graphs).by_graph);
  const at::Tensor after = store.delta_NHKV[0].cpu();
  EXPECT_TRUE(after[kPaddingState].equal(before[kPaddingState]));
  EXPECT_FALSE(after[1].equal(before[1]));
}

// A fork copies a page and a state in all layers at once.
TEST(DeviceCacheTest, ACopyIsALaunchForEachPart) {
  const c10::InferenceMode no_autograd;
  const model::Decoder decoder = MakeHybrid();
  model::KvStore store = FilledCache(decoder);
  const auto copies = [&](const CacheCopy& copy) {
    const DeviceRecording recording;
    Copy(copy, &store);
    EXPECT_THAT(recording.events().waits, IsEmpty());
    return recording.events().launches;
  };
  EXPECT_THAT(copies(StateCopy{.from = 3, .to = 2}),
              ElementsAre("copy_", "copy_"));
  EXPECT_THAT(copies(StateCopy{.to = 4}), ElementsAre("zero_", "zero_"));
  EXPECT_THAT(copies(PageCopy{.from = 5, .to = 6, .num_rows = 7}),
              ElementsAre("copy_", "copy_"));
}

}  // namespace
}  // namespace weft::executor
