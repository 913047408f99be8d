// Tests decode steps as graphs on a fake device. Its graph keeps the step's
// function, and a replay calls the function again. A step reads only the buffer
// of its inputs and never waits for the host.
#include "src/executor/decode_graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/executor/model_runner.h"
#include "src/lora/lora_cuda.h"
#include "src/ops/cuda_dispatch.h"
#include "src/sampling/draw_rows.h"
#include "tests/executor/decode_plan.h"
#include "tests/model/int8_weights.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/model/tiny_model.h"
#include "tests/support/op_observer.h"

namespace weft::executor {
namespace {

using ::weft::testing::OpObserver;

constexpr int64_t kMaxRows = 12;

// What the fake device has done, and whether it fails.
struct Counts {
  int records = 0, replays = 0, uploads = 0;
  int64_t uploaded = 0;
  std::set<std::string> ops;         // Operators that replays have run.
  std::set<std::string> host_reads;  // Operators for which the host waits.
  bool fails = false;                // If true, recording a graph fails.
};

class FunctionGraph final : public StepGraph {
 public:
  FunctionGraph(StepFunction step, Counts* counts)
      : step_(std::move(step)), counts_(*counts) {}
  at::Tensor Replay() override {
    const OpObserver observer;
    at::Tensor logits_TV = step_();
    counts_.ops.insert(observer.ops().begin(), observer.ops().end());
    for (const std::string& op : observer.HostReads()) {
      counts_.host_reads.insert(op);
    }
    ++counts_.replays;
    return logits_TV;
  }

 private:
  const StepFunction step_;
  Counts& counts_;
};

class HostStepDevice final : public StepDevice {
 public:
  explicit HostStepDevice(Counts* counts) : counts_(*counts) {}

  void Run(const StepFunction& step) override { step(); }
  std::unique_ptr<StepGraph> Record(const StepFunction& step) override {
    TORCH_CHECK(!counts_.fails, "out of memory");
    ++counts_.records;
    return std::make_unique<FunctionGraph>(step, &counts_);
  }
  int64_t FreeBytes() override { return 1000 - 10 * counts_.records; }
  at::Tensor HostBuffer(int64_t bytes) override {
    return at::empty({bytes}, at::kByte);
  }
  void Upload(const at::Tensor& host, int64_t bytes,
              const at::Tensor& device) override {
    // Bytes that are not uploaded may have any value.
    device.fill_(0x7F);
    device.narrow(0, 0, bytes).copy_(host.narrow(0, 0, bytes));
    ++counts_.uploads;
    counts_.uploaded = bytes;
  }

 private:
  Counts& counts_;
};

class DecodeGraphTest : public ::testing::Test {
 protected:
  explicit DecodeGraphTest(model::Decoder decoder = TinyDecoder(at::kFloat,
                                                                /*seed=*/7))
      : decoder_(std::move(decoder)),
        rank_(decoder_, loss::HeadOptions{.softcap = 20}),
        store_(FilledCache(decoder_)),
        graph_store_(FilledCache(decoder_)),
        graphs_(decoder_, rank_.head(), &graph_store_, kMaxRows,
                std::make_unique<HostStepDevice>(&counts_)) {}

  CachePlan Plan(int64_t num_rows, int64_t salt) const {
    return DecodePlan(num_rows, salt, decoder_.config());
  }

  // Runs the plan by a graph and by launches, each with its own cache. Results
  // and caches must be equal.
  void ExpectSame(const CachePlan& plan) {
    const CacheOutput output = rank_.Run(plan, &graph_store_, &graphs_);
    ASSERT_TRUE(output.by_graph);
    const CacheOutput expected = rank_.Run(plan, &store_);
    ASSERT_FALSE(expected.by_graph);
    ASSERT_EQ(output.drawn.size(), expected.drawn.size());
    for (size_t r = 0; r < output.drawn.size(); ++r) {
      EXPECT_EQ(output.drawn[r]->token, expected.drawn[r]->token) << r;
      EXPECT_EQ(output.drawn[r]->logprob, expected.drawn[r]->logprob) << r;
      EXPECT_EQ(output.drawn[r]->top_logprobs, expected.drawn[r]->top_logprobs);
      EXPECT_EQ(output.drawn[r]->support, expected.drawn[r]->support) << r;
    }
    ExpectSameCache(store_, graph_store_);
  }

  const at::InferenceMode no_autograd_;
  const model::Decoder decoder_;
  const ModelRunner rank_;
  model::KvStore store_, graph_store_;
  Counts counts_;
  DecodeGraphs graphs_;
};

TEST_F(DecodeGraphTest, AFullBucketHasTheBitsOfLaunches) {
  for (int64_t salt = 0; salt < 4; ++salt) ExpectSame(Plan(4, salt));
  EXPECT_EQ(counts_.records, 1);
  EXPECT_EQ(counts_.replays, 4);
  EXPECT_EQ(counts_.uploads, 6);  // Four for replays, two for recording.
}

TEST_F(DecodeGraphTest, RowsOfABucketWithPaddingHaveTheBitsOfLaunches) {
  for (const int64_t num_rows : {11, 9, 12, 10}) {
    ExpectSame(Plan(num_rows, num_rows));
  }
  EXPECT_EQ(counts_.records, 1);
}

class HybridGraphTest : public DecodeGraphTest {
 protected:
  HybridGraphTest()
      : DecodeGraphTest(testing::HybridDecoder(at::kFloat, /*seed=*/7)) {}
};

TEST_F(HybridGraphTest, RowsReplaceTheirStatesAndPaddingItsOwn) {
  for (const int64_t num_rows : {11, 9, 12, 10}) {
    ExpectSame(Plan(num_rows, num_rows));
  }
  EXPECT_EQ(counts_.records, 1);
}

class Int8GraphTest : public DecodeGraphTest {
 protected:
  Int8GraphTest() : DecodeGraphTest(Int8Decoder()) {}

  static model::Decoder Int8Decoder() {
    const model::Decoder exact = TinyDecoder(at::kFloat, /*seed=*/7);
    return {exact.config(), testing::Quantized(exact.weights()),
            exact.config().max_positions};
  }
};

TEST_F(Int8GraphTest, RowsHaveTheBitsOfLaunches) {
  for (const int64_t num_rows : {3, 4}) ExpectSame(Plan(num_rows, num_rows));
  EXPECT_EQ(counts_.records, 1);
}

TEST_F(DecodeGraphTest, RulesChangeBetweenReplays) {
  for (int64_t salt = 0; salt < 4; ++salt) {
    CachePlan plan = Plan(3, salt);
    plan.draws[1].config = {.temperature = 0};
    plan.draws[2].config = {.min_p = 0.1 * static_cast<double>(salt)};
    ExpectSame(plan);
  }
  EXPECT_EQ(counts_.records, 1);
}

TEST_F(DecodeGraphTest, AReplayAsksTheHostForNothing) {
  ExpectSame(Plan(3, 1));
  ExpectSame(Plan(4, 2));
  EXPECT_TRUE(counts_.ops.contains("aten::index_select"));
  EXPECT_FALSE(counts_.ops.contains("aten::pin_memory"));
  EXPECT_EQ(counts_.host_reads, std::set<std::string>());
}

TEST_F(DecodeGraphTest, TheSearchFindsAnOpThatWaits) {
  const OpObserver observer;
  static_cast<void>(at::arange(3).sum().item<int64_t>());
  EXPECT_FALSE(observer.HostReads().empty());
}

TEST_F(DecodeGraphTest, EachShapeIsRecordedOnce) {
  CachePlan longer = Plan(2, 1);
  longer.kv.page_table_TL = at::zeros({2, 33}, at::kInt);
  longer.kv.page_table_TL.narrow(1, 0, 3).copy_(Plan(2, 1).kv.page_table_TL);
  for (int time = 0; time < 2; ++time) {
    ExpectSame(Plan(1, 1));
    ExpectSame(Plan(2, 1));
    ExpectSame(longer);
  }
  EXPECT_EQ(counts_.records, 3);
  EXPECT_EQ(graphs_.stats().graphs, 3);
  EXPECT_EQ(graphs_.stats().bytes, 30);
}

// What a request asks of its draws does not take the batch off the graph.
TEST_F(DecodeGraphTest, AGraphServesEveryKindOfDraw) {
  SamplingConfig config;
  config.repetition_penalty = 2;
  config.logit_bias = {{5, 30}};
  config.allowed_token_ids = {3, 5};
  const sampling::SharedEdits shared(config, {1, 2}, /*stops=*/{},
                                     decoder_.config().vocab, at::kCPU);
  sampling::SequenceEdits edits(&shared);
  edits.Push(3);
  ExpectSame(Plan(3, 1));
  CachePlan plan = Plan(3, 1);
  plan.draws[0].config = {.top_k = 3, .truncated_logprobs = true};
  plan.draws[1].config = {.top_logprobs = 2};
  plan.draws[2].config = {.top_p = 0.8, .support = true};
  plan.edits = {{.row = 1, .edits = &edits}};
  ExpectSame(plan);
  const CacheOutput output = rank_.Run(plan, &graph_store_, &graphs_);
  EXPECT_EQ(output.drawn[1]->token, 5);
  EXPECT_EQ(output.drawn[1]->top_logprobs.front().first, 5);
  EXPECT_FALSE(output.drawn[2]->support.empty());
  EXPECT_EQ(counts_.records, 1);
}

TEST_F(DecodeGraphTest, OnlyRowsOfTheBatchHaveTheirTablesUploaded) {
  ExpectSame(Plan(9, 1));
  const int64_t bytes = counts_.uploaded;
  ExpectSame(Plan(10, 1));
  constexpr int64_t kRowOfTable = 512 / kPageTokens * 4;
  EXPECT_EQ(counts_.uploaded, bytes + kRowOfTable);
}

// In a build with CUDA's LoRA kernels, the step has an adapter table.
// DecodeInputs::Write puts the plan's adapters into the table.
TEST_F(DecodeGraphTest, AStepReadsItsAdaptersInTheBuffer) {
  if constexpr (!ops::kHasCudaKernels) GTEST_SKIP() << "no kernels for CUDA";
  if constexpr (ops::kHasCudaKernels) {
    CachePlan plan = Plan(3, 1);
    plan.batch.routing = {
        {.begin = 1,
         .end = 3,
         .version =
             TinyVersion(decoder_.config(), {.rank = 20}, at::kBFloat16)}};
    const DecodeInputs inputs({.rows = 4, .table_entries = 32, .max_rank = 32},
                              decoder_);
    ASSERT_TRUE(inputs.Fits(plan));
    const at::Tensor buffer = at::full({inputs.bytes()}, 0x7F, at::kByte);
    const DecodeStep step = inputs.At(buffer);
    ASSERT_NE(step.batch.table, nullptr);
    EXPECT_TRUE(step.batch.routing.empty());
    const int64_t count = inputs.Write(
        plan,
        {static_cast<std::byte*>(buffer.mutable_data_ptr()), buffer.nbytes()});
    EXPECT_LT(count, inputs.bytes());  // A padding row has no page table.
    const kernels::cuda::LoraTable& table = step.batch.table->table();
    ASSERT_EQ(*table.num_few, 1);
    EXPECT_EQ(table.few[0].row, 1);
    EXPECT_EQ(table.few[0].num_rows, 2);
    EXPECT_EQ(table.few[0].weights,
              plan.batch.routing.front().version->compute_N.const_data_ptr());
    EXPECT_EQ(table.max_few_rows, 4);
    // The step also reads the plan's tokens.
    EXPECT_TRUE(step.batch.tokens_T.narrow(0, 0, 3).equal(plan.batch.tokens_T));
  }
}

TEST_F(DecodeGraphTest, OtherPlansWantLaunches) {
  std::vector<CachePlan> plans(6, Plan(2, 1));
  plans[0] = Plan(kMaxRows + 1, 1);
  plans[1].score_rows = {1};
  plans[2].draws.clear();
  plans[3].logit_rows = {1, 0};
  plans[4].kv.decode = false;
  // A graph takes adapters only in bf16 on CUDA. This adapter is f32 on a CPU.
  plans[5].batch.routing = {
      {.begin = 0,
       .end = 1,
       .version = TinyVersion(decoder_.config(), {.rank = 3}, at::kFloat)}};
  for (const CachePlan& plan : plans) {
    EXPECT_FALSE(graphs_.Run(plan).has_value()) << &plan - plans.data();
  }
  EXPECT_EQ(counts_.uploads, 0);
}

TEST_F(DecodeGraphTest, AShapeThatCannotBeRecordedRunsByLaunches) {
  counts_.fails = true;
  EXPECT_FALSE(rank_.Run(Plan(2, 1), &graph_store_, &graphs_).by_graph);
  EXPECT_EQ(graphs_.stats().graphs, 0);
  // This shape is not tried again, but other shapes are.
  counts_.fails = false;
  const CacheOutput output = rank_.Run(Plan(2, 1), &graph_store_, &graphs_);
  EXPECT_FALSE(output.by_graph);
  EXPECT_EQ(output.drawn.size(), 2);
  EXPECT_EQ(counts_.records, 0);
  ExpectSame(Plan(3, 1));
}

// A copy replaces one page or state of every layer, and no other.
TEST(CacheCopyTest, ReplacesOnePlaceOfEveryLayer) {
  const at::InferenceMode no_autograd;
  const model::Decoder decoder = testing::HybridDecoder(at::kFloat, 7);
  model::KvStore store = FilledCache(decoder);
  const model::KvStore before = FilledCache(decoder);
  Copy(StateCopy{.from = 3, .to = 2}, &store);
  Copy(StateCopy{.to = 4}, &store);
  Copy(PageCopy{.from = 5, .to = 6, .num_rows = 7}, &store);
  for (const size_t layer : {0, 1, 2}) {
    for (const auto part :
         {&model::KvStore::conv_NRW, &model::KvStore::delta_NHKV}) {
      if (layer == 1) continue;
      at::Tensor expected = (before.*part)[layer].clone();
      expected[2].copy_(expected[3]);
      expected[4].zero_();
      EXPECT_TRUE((store.*part)[layer].equal(expected)) << layer;
    }
    for (const auto part :
         {&model::KvStore::k_pages_PSKC, &model::KvStore::v_pages_PSKC}) {
      if (layer != 1) continue;
      at::Tensor expected = (before.*part)[layer].clone();
      expected[6].narrow(0, 0, 7).copy_(expected[5].narrow(0, 0, 7));
      EXPECT_TRUE((store.*part)[layer].equal(expected));
    }
  }
}

}  // namespace
}  // namespace weft::executor
