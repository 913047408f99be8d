// Tests what a decode iteration launches, uploads and waits for, on the device
// of tests/support/host_device. A graph counts as one launch.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
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
