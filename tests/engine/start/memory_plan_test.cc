#include "src/engine/start/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "prometheus/text_serializer.h"
#include "src/engine/decode/kv_pool.h"
#include "src/engine/start/memory_metrics.h"
#include "src/executor/model_runner.h"
#include "src/model_config/weight_list.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/model/tiny_model.h"
#include "tests/support/dtype_name.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

class MemoryPlanTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  MemoryPlanTest()
      : decoder_(TinyDecoder(GetParam(), /*seed=*/3)),
        sizes_(SizesOf(decoder_)) {
    options_.max_context_tokens = 64;
    options_.max_rank = 8;
  }

  int64_t ActivationsOfAll(int64_t tokens, int recomputed) const {
    return BatchActivations(sizes_, options_, tokens)
        .Total(decoder_.config().num_layers, recomputed);
  }

  const model::Decoder decoder_;
  const ModelSizes sizes_;
  EngineOptions options_;
};

TEST_P(MemoryPlanTest, CountsWhatTheLargestAdapterHolds) {
  LoraConfig config{.rank = 8};
  config.target_modules.assign(kAllTargetModules.begin(),
                               kAllTargetModules.end());
  const lora::Adapter adapter(config, decoder_.config().shape(),
                              decoder_.dtype(), at::kCPU);
  EXPECT_EQ(LargestAdapterBytes(sizes_, 8), adapter.resident_bytes());
}

TEST_P(MemoryPlanTest, FillsInWhatIsNotSet) {
  const auto split = PlanMemory(sizes_, 8 * kGiB, &options_).value();
  // Memory is ample, so the plan has the default number of adapters.
  EXPECT_EQ(options_.max_resident_adapters, kDefaultResidentAdapters);
  EXPECT_EQ(options_.kv_cache_bytes, options_.max_decode_sequences *
                                         (64 / kPageTokens) *
                                         CacheUnitsOf(sizes_).page);
  EXPECT_EQ(options_.memory_budget_bytes, split.activations);
  EXPECT_GT(options_.memory_budget_bytes, 6 * kGiB);
  EXPECT_EQ(options_.max_batch_tokens, 16384);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.batch_limit, Limit::kNothing);
}

TEST_P(MemoryPlanTest, PagesAndStatesAreThoseThatTheCacheAllocates) {
  const model::Decoder hybrid = testing::HybridDecoder(GetParam(), /*seed=*/3);
  for (const model::Decoder* decoder : {&decoder_, &hybrid}) {
    const CacheUnits units = CacheUnitsOf(SizesOf(*decoder));
    const model::KvStore store = executor::AllocateCache(
        *decoder, /*num_pages=*/5, kPageTokens, /*num_states=*/3);
    int64_t bytes = 0;
    for (const auto* layers : {&store.k_pages_PSKC, &store.v_pages_PSKC,
                               &store.conv_NRW, &store.delta_NHKV}) {
      for (const at::Tensor& layer : *layers) {
        if (layer.defined()) bytes += static_cast<int64_t>(layer.nbytes());
      }
    }
    EXPECT_EQ(units.state > 0, decoder == &hybrid);
    EXPECT_EQ(5 * units.page + 3 * units.state, bytes);
  }
}

TEST_P(MemoryPlanTest, ACacheBelowItsLeastSizeEndsTheStart) {
  const ModelSizes hybrid =
      SizesOf(testing::HybridDecoder(GetParam(), /*seed=*/3));
  const CacheUnits units = CacheUnitsOf(hybrid);
  options_.kv_cache_bytes = units.page + 3 * units.state;
  const auto split = PlanMemory(hybrid, 8 * kGiB, &options_).value();
  EXPECT_EQ(split.cache, units.page + 3 * units.state);
  const std::string least = absl::StrCat(options_.kv_cache_bytes--);
  EXPECT_THAT(
      PlanMemory(hybrid, 8 * kGiB, &options_).status(),
      IsStatus(absl::StatusCode::kInvalidArgument,
               absl::StrCat("--kv-cache-bytes=", options_.kv_cache_bytes,
                            " is below ", least,
                            ", the bytes of 16 tokens and of 3 states")));
}

TEST_P(MemoryPlanTest, KeepsWhatIsSet) {
  options_.max_resident_adapters = 3;
  options_.kv_cache_bytes = 1 << 20;
  options_.memory_budget_bytes = 1 << 30;
  options_.max_batch_tokens = 100;
  ASSERT_TRUE(PlanMemory(sizes_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_resident_adapters, 3);
  EXPECT_EQ(options_.kv_cache_bytes, 1 << 20);
  EXPECT_EQ(options_.memory_budget_bytes, 1 << 30);
  EXPECT_EQ(options_.max_batch_tokens, 100);
}

TEST_P(MemoryPlanTest, NeverPlansForMoreAdaptersThanMayExist) {
  options_.max_adapters = 5;
  ASSERT_TRUE(PlanMemory(sizes_, 8 * kGiB, &options_).ok());
  EXPECT_EQ(options_.max_resident_adapters, 5);
}

TEST_P(MemoryPlanTest, AMicroBatchIsAsLongAsTheBudgetTakes) {
  const auto plan = [&](int64_t budget) {
    options_.max_batch_tokens = 0;
    options_.memory_budget_bytes = budget;
    return PlanMemory(sizes_, 8 * kGiB, &options_).value();
  };
  EXPECT_EQ(plan(ActivationsOfAll(5120, 0)).batch_tokens, 5120);
  const MemorySplit good = plan(ActivationsOfAll(5120, 0) - 1);
  EXPECT_EQ(good.batch_tokens, 4096);
  EXPECT_EQ(good.recomputed_layers, 0);
  EXPECT_EQ(good.batch_limit, Limit::kFlag);
  EXPECT_EQ(plan(ActivationsOfAll(4096, 0) - 1).recomputed_layers, 1);
  EXPECT_EQ(plan(ActivationsOfAll(4096, 2)).batch_tokens, 4096);
  EXPECT_EQ(plan(ActivationsOfAll(4096, 2) - 1).batch_tokens, 2048);
}

TEST_P(MemoryPlanTest, AMicroBatchThatCannotFitEndsTheStart) {
  options_.max_batch_tokens = int64_t{1} << 30;
  EXPECT_THAT(
      PlanMemory(sizes_, 8 * kGiB, &options_).status(),
      IsStatus(absl::StatusCode::kResourceExhausted, "--max-batch-tokens"));
}

TEST_P(MemoryPlanTest, FollowsThePolicyOfRecomputing) {
  options_.gradient_checkpointing = GradientCheckpointing::kAll;
  options_.memory_budget_bytes = ActivationsOfAll(8192, 2);
  MemorySplit split = PlanMemory(sizes_, 8 * kGiB, &options_).value();
  EXPECT_EQ(split.batch_tokens, 8192);
  EXPECT_EQ(split.recomputed_layers, 2);
  options_.gradient_checkpointing = GradientCheckpointing::kOff;
  options_.max_batch_tokens = 0;
  options_.memory_budget_bytes = ActivationsOfAll(2048, 0);
  split = PlanMemory(sizes_, 8 * kGiB, &options_).value();
  EXPECT_EQ(split.batch_tokens, 2048);
  EXPECT_EQ(split.recomputed_layers, 0);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MemoryPlanTest,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         weft::testing::DtypeName);

// Published models in bf16 on devices of published sizes. The available memory
// is nine tenths of the device, minus the model and its rotary tables. The
// reserve is 512 MiB plus a sixteenth of the available memory.
ModelSizes Llama8B() {
  return {.config = *model_config::ParseModelConfig(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "eos_token_id": 128001})")};
}

ModelSizes Qwen8B() {
  return {.config = *model_config::ParseModelConfig(R"({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "use_sliding_window": false,
    "tie_word_embeddings": false, "eos_token_id": 151645})")};
}

ModelSizes SmolLm() {
  return {.config = *model_config::ParseModelConfig(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "tie_word_embeddings": true, "eos_token_id": 0})")};
}

constexpr int64_t k24GB = 24 * kGiB;
constexpr int64_t k80GB = 80 * kGiB;
constexpr int64_t k141GB = 141'000'000'000;

absl::StatusOr<MemorySplit> PlanFor(const ModelSizes& sizes,
                                    int64_t device_bytes,
                                    EngineOptions options = {},
                                    int max_rank = 64) {
  options.max_rank = max_rank;
  options.max_context_tokens = *ContextTokens(options, sizes.config);
  const int64_t rotary =
      int64_t{4} * options.max_context_tokens * sizes.config.head_dim;
  return PlanMemory(
      sizes,
      device_bytes / 10 * 9 - rotary -
          model_config::WeightBytes(sizes.config, sizes.element_bytes),
      &options);
}

TEST(ContextTokensTest, AreAtMostTheModels) {
  const model_config::ModelConfig config = Llama8B().config;
  EXPECT_EQ(*ContextTokens({}, config), config.max_positions);
  EXPECT_EQ(*ContextTokens({.max_context_tokens = 64}, config), 64);
  EXPECT_THAT(ContextTokens({.max_context_tokens =
                                 static_cast<int>(config.max_positions) + 1},
                            config),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       absl::StrCat(" is above the model's limit of ",
                                    config.max_positions)));
}

TEST(PublishedModelsTest, SizesAreThoseWorkedOutByHand) {
  const ModelSizes llama = Llama8B();
  // The model has 8,030,261,248 parameters.
  EXPECT_EQ(model_config::WeightBytes(llama.config, 2), 16'060'522'496);
  // At rank 64, an adapter has 64 parameters for each input and each output of
  // a matrix. In each of 32 layers, q and o have 8192 inputs and outputs each,
  // k and v have 5120 each, and gate, up and down have 18432 each. Embedding
  // and head have 132,352 each. This makes 184,713,216 parameters. Each takes
  // 5 x 4 + 2 bytes: five copies in f32 and one in bf16.
  EXPECT_EQ(LargestAdapterBytes(llama, 64), 22 * int64_t{184'713'216});
  // A token has keys and values in 32 layers, with 8 heads of 128 features.
  EXPECT_EQ(executor::PageBytes(llama.config, 2, /*page_tokens=*/1), 131'072);
  EXPECT_EQ(CacheUnitsOf(llama).page, 16 * 131'072);
  EXPECT_EQ(CacheUnitsOf(llama).state, 0);
  // A graph has 64 rows. Each row has its logits twice in f32, and in bf16 four
  // vectors of 4096, three of 14336 and two of 6144.
  EXPECT_EQ(DecodeGraphBytes(llama, {}),
            64 * (2 * 128'256 * 4 + 2 * (4 * 4096 + 3 * 14'336 + 2 * 6144)));
  EXPECT_EQ(DecodeGraphBytes(llama, {.decode_graphs = false}), 0);
  // Layers of the gated delta rule, with the widths of Qwen3.5-0.8B. In bf16 a
  // row has 6144 + 2048 + 32 inputs, 2048 outputs twice, and three earlier rows
  // of the convolution twice. In f32 it has 6144 mixed features and 32 gates.
  ModelSizes hybrid = llama;
  hybrid.config.delta = {
      .layers = std::vector<bool>(llama.config.num_layers, true),
      .key_heads = 16,
      .value_heads = 16,
      .key_features = 128,
      .value_features = 128,
      .conv_kernel = 4};
  EXPECT_EQ(DecodeGraphBytes(hybrid, {}),
            64 * (2 * 128'256 * 4 + 2 * (4 * 4096 + 3 * 14'336) +
                  2 * (8224 + 2 * 2048 + 2 * 3 * 6144) + 4 * 6176));
  // Layers of experts, with the widths of Qwen3-30B-A3B. In bf16 a row has 8
  // times its input, its output and three vectors of 768. In f32 it has 128
  // logits twice.
  ModelSizes moe = llama;
  moe.config.moe.shape = {
      .count = 128,
      .per_token = 8,
      .ffn = 768,
      .layers = std::vector<bool>(llama.config.num_layers, true)};
  EXPECT_EQ(DecodeGraphBytes(moe, {}),
            DecodeGraphBytes(llama, {}) +
                64 * (2 * 8 * (2 * 4096 + 3 * 768) + 4 * 2 * 128));
  EXPECT_EQ(DecodeGraphBytes(moe, {.base_weights = BaseWeights::kInt8}), 0);
  moe.element_bytes = 4;
  EXPECT_EQ(DecodeGraphBytes(moe, {}), 0);
  ModelSizes shared = llama;
  shared.tensor_size = 2;
  EXPECT_EQ(DecodeGraphBytes(shared, {}), 0);
  // SmolLM2 ties its head, so its 134,515,008 parameters count once. Each of
  // the 61 norms of 576 takes 128 bytes more, so that the next one begins at a
  // multiple of 256.
  EXPECT_EQ(model_config::WeightBytes(SmolLm().config, 2),
            269'030'016 + 61 * 128);
}

TEST(PublishedModelsTest, Llama8BOn80GB) {
  // 77,309,411,328 - 16,060,522,496 - 67,108,864 = 61,181,779,968 bytes are
  // available. The reserve takes 4,360,732,160 of them. One adapter takes
  // 4,063,690,752. One context takes 17,179,869,184, which also holds 64
  // sequences of 2048 tokens. Graphs take 74,842,112. 4096 tokens without
  // recomputation take 32 layers of 390,070,272 plus 1,091,895,296 for the
  // head. Then 21,928,501,760 are left. This is enough for five more adapters,
  // and too little for 5120 tokens or a sixth adapter.
  const MemorySplit split = *PlanFor(Llama8B(), k80GB);
  EXPECT_EQ(split.reserve, 4'360'732'160);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.activations, 32 * int64_t{390'070'272} + 1'091'895'296);
  EXPECT_EQ(split.decode_graphs, 74'842'112);
  EXPECT_EQ(split.num_adapters, 6);
  EXPECT_EQ(split.cache,
            17'179'869'184 + 21'928'501'760 - 5 * int64_t{4'063'690'752});
  EXPECT_EQ(split.batch_limit, Limit::kMemory);
  EXPECT_EQ(split.adapters_limit, Limit::kMemory);
  EXPECT_EQ(split.cache_limit, Limit::kNothing);
}

TEST(PublishedModelsTest, TheDefaultRankHalvesTheAdaptersOn80GB) {
  // An adapter takes 8,127,381,504, and 4096 tokens take more, too. So there is
  // room for two adapters beside the required one.
  const MemorySplit split =
      *PlanFor(Llama8B(), k80GB, {}, EngineOptions().max_rank);
  EXPECT_EQ(split.num_adapters, 3);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 0);
}

TEST(PublishedModelsTest, LongBatchesOfTheOperatorsOn80GB) {
  // 8192 tokens take 26,832,027,648, which is 13,257,883,648 more than 4096
  // tokens. So there is room for two adapters beside the required one.
  const MemorySplit batch =
      *PlanFor(Llama8B(), k80GB, {.max_batch_tokens = 8192});
  EXPECT_EQ(batch.batch_tokens, 8192);
  EXPECT_EQ(batch.recomputed_layers, 0);
  EXPECT_EQ(batch.num_adapters, 3);
  EXPECT_EQ(batch.batch_limit, Limit::kFlag);
  // Six adapters leave 15,184,192,000 for activations, so 17 layers of
  // 713,031,680 are recomputed.
  const MemorySplit both = *PlanFor(
      Llama8B(), k80GB, {.max_resident_adapters = 6, .max_batch_tokens = 8192});
  EXPECT_EQ(both.num_adapters, 6);
  EXPECT_EQ(both.recomputed_layers, 17);
  EXPECT_EQ(both.batch_limit, Limit::kMemory);
}

TEST(PublishedModelsTest, Llama8BOn141GB) {
  // 103,312,224,688 remain without the reserve of 7,460,143,952. The minimum of
  // each part, the graphs and a batch of 4096 tokens leave 68,419,678,640.
  // Seven more adapters leave 39,973,843,376. Together with the 13,574,144,000
  // that the 4096 tokens take, this is enough for 15,360 tokens
  // (50,328,387,584), but not for 16,384.
  const MemorySplit split = *PlanFor(Llama8B(), k141GB);
  EXPECT_EQ(split.num_adapters, 8);
  EXPECT_EQ(split.batch_tokens, 15'360);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.activations, 50'328'387'584);
  EXPECT_EQ(split.batch_limit, Limit::kMemory);
}

TEST(PublishedModelsTest, Llama8BOn24GB) {
  // 7,065,192,033 are available, which is less than one whole context.
  EXPECT_THAT(std::string(PlanFor(Llama8B(), k24GB).status().message()),
              AllOf(HasSubstr("4063690752 for an adapter (--max-rank)"),
                    HasSubstr("17179869184 for keys and values "
                              "(--kv-cache-bytes, --max-context)"),
                    HasSubstr("594935808 for activations (--memory-budget")));
  // A context of 8192 takes 1,073,741,824, and an adapter of rank 16 takes
  // 1,015,922,688. 3,981,222,395 remain for activations. 4096 tokens need
  // 13,459,865,600 without recomputation. Each recomputed layer saves
  // 353,763,328, so 27 layers are recomputed.
  const MemorySplit split =
      *PlanFor(Llama8B(), k24GB, {.max_context_tokens = 8192}, 16);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 27);
  EXPECT_EQ(split.activations, 13'459'865'600 - 27 * int64_t{353'763'328});
  EXPECT_EQ(split.num_adapters, 1);
  EXPECT_EQ(split.decode_graphs, 74'842'112);
  EXPECT_EQ(split.cache_limit, Limit::kMemory);
}

TEST(PublishedModelsTest, Qwen8BOn80GB) {
  // 56,563,412,608 remain without the reserve. An adapter takes 4,280,320,000,
  // a context 6,039,797,760, graphs 86,179,840, and 4096 tokens without
  // recomputation 15,587,966,976. The cache takes 13,287,555,072 more for 64
  // sequences of 2048 tokens. The remaining 17,281,592,960 are enough for four
  // more adapters.
  const MemorySplit split = *PlanFor(Qwen8B(), k80GB);
  EXPECT_EQ(split.batch_tokens, 4096);
  EXPECT_EQ(split.recomputed_layers, 0);
  EXPECT_EQ(split.activations, 15'587'966'976);
  EXPECT_EQ(split.num_adapters, 5);
  EXPECT_GE(split.cache, 64 * 2048 * int64_t{147'456});
  EXPECT_EQ(split.cache_limit, Limit::kNothing);
}

TEST(PublishedModelsTest, SmallModelsHaveAllThatIsOfUse) {
  // 20,952,211,979 remain without the reserve of a device of 24 GiB. 64
  // sequences of 2048 tokens take 3,019,898,880, eight adapters take
  // 569,868,288 each, and 16,384 tokens take 6,638,309,888. With the graphs,
  // this leaves 6,708,760,587, which is enough for eleven more adapters.
  const MemorySplit small = *PlanFor(SmolLm(), k24GB);
  EXPECT_EQ(small.batch_tokens, 16'384);
  EXPECT_EQ(small.recomputed_layers, 0);
  EXPECT_EQ(small.num_adapters, 19);
  EXPECT_EQ(small.batch_limit, Limit::kNothing);
  for (const int64_t device_bytes : {k80GB, k141GB}) {
    const MemorySplit split = *PlanFor(SmolLm(), device_bytes);
    EXPECT_EQ(split.num_adapters, 64);
    EXPECT_EQ(split.batch_tokens, 16'384);
    EXPECT_EQ(split.adapters_limit, Limit::kNothing);
    EXPECT_EQ(split.cache_limit, Limit::kNothing);
  }
}

TEST(MemoryMetricsTest, SayPartsAndWhatIsShort) {
  prometheus::Registry registry;
  ShowMemory({.model = 5,
              .adapters = 1,
              .cache = 2,
              .activations = 3,
              .decode_graphs = 4,
              .reserve = 6,
              .batch_tokens = 4096,
              .recomputed_layers = 7,
              .adapters_limit = Limit::kMemory,
              .cache_limit = Limit::kFlag},
             &registry);
  const std::string page =
      prometheus::TextSerializer().Serialize(registry.Collect());
  for (const char* line :
       {"weft_memory_part_bytes{part=\"model\"} 5\n",
        "weft_memory_part_bytes{part=\"adapters\"} 1\n",
        "weft_memory_part_bytes{part=\"kv_cache\"} 2\n",
        "weft_memory_part_bytes{part=\"activations\"} 3\n",
        "weft_memory_part_bytes{part=\"decode_graphs\"} 4\n",
        "weft_memory_part_bytes{part=\"reserve\"} 6\n",
        "weft_memory_part_short{part=\"adapters\"} 1\n",
        "weft_memory_part_short{part=\"kv_cache\"} 0\n",
        "weft_max_batch_tokens 4096\n", "weft_recomputed_layers 7\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
}

}  // namespace
}  // namespace weft::engine
