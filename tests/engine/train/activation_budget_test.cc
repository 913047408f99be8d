#include "src/engine/train/activation_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "src/lora/lora_linear.h"
#include "tests/model/tiny_model.h"

namespace weft::engine {
namespace {

using ::testing::HasSubstr;

constexpr ActivationBytes kBytes = {
    .kept_layer = 100, .recomputed_layer = 10, .working = 50};

int Choose(GradientCheckpointing policy, int64_t budget) {
  return ChooseRecomputed(policy, kBytes, /*num_layers=*/4, budget).value();
}

TEST(ChooseRecomputedTest, AutoRecomputesNoMoreThanItMust) {
  // Keeping all layers takes 450 bytes. Each recomputed layer saves 90.
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 0), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 450), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 449), 1);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 360), 1);
  EXPECT_EQ(Choose(GradientCheckpointing::kAuto, 90), 4);
}

TEST(ChooseRecomputedTest, OffAndAllDoAsTheySay) {
  EXPECT_EQ(Choose(GradientCheckpointing::kOff, 450), 0);
  EXPECT_EQ(Choose(GradientCheckpointing::kAll, 450), 4);
}

TEST(ChooseRecomputedTest, RefusesWhatCannotFitWithBothNumbers) {
  const absl::Status all =
      ChooseRecomputed(GradientCheckpointing::kAuto, kBytes, 4, 89).status();
  EXPECT_TRUE(absl::IsResourceExhausted(all));
  EXPECT_THAT(std::string(all.message()), HasSubstr("needs 90 bytes"));
  EXPECT_THAT(std::string(all.message()), HasSubstr("there are 89"));
  const absl::Status off =
      ChooseRecomputed(GradientCheckpointing::kOff, kBytes, 4, 449).status();
  EXPECT_THAT(std::string(off.message()), HasSubstr("needs 450 bytes"));
  EXPECT_THAT(std::string(off.message()),
              HasSubstr("--gradient-checkpointing"));
}

TEST(ChooseRecomputedTest, AModelWithoutLayersFits) {
  EXPECT_EQ(
      ChooseRecomputed(GradientCheckpointing::kAuto, kBytes, 0, 50).value(), 0);
}

TEST(ActivationsOfTest, GrowsWithRowsAndCountsTheHeadByItsChunk) {
  const model_config::ModelConfig config = TinyConfig();
  const auto bytes = [&](int64_t rows, int64_t scored, int64_t chunk) {
    return ActivationsOf(config, 4, /*is_cpu=*/true, 8,
                         {.rows = rows, .scored = scored, .chunk = chunk});
  };
  EXPECT_EQ(bytes(20, 0, 8).kept_layer, 2 * bytes(10, 0, 8).kept_layer);
  EXPECT_LT(bytes(10, 0, 8).recomputed_layer, bytes(10, 0, 8).kept_layer / 8);
  // In both cases the head takes more than a layer, so `working` is the head's.
  EXPECT_LT(bytes(1, 1000, 10).working, bytes(1, 1000, 1000).working);
}

TEST(ActivationsOfTest, CountsTheSoftmaxAndThePartialSumsOfBf16) {
  const model_config::ModelConfig config = TinyConfig();
  const auto working = [&](int64_t element_bytes, const BatchRows& batch) {
    return ActivationsOf(config, element_bytes, /*is_cpu=*/false,
                         /*max_rank=*/8, batch)
        .working;
  };
  // Here the head takes more than a layer. The head holds the logits and, in
  // bf16, a copy of the logits.
  const BatchRows head = {.rows = 1, .scored = 4096, .chunk = 4096};
  EXPECT_EQ(working(2, head) - working(4, head), 4096 * config.vocab * 2);
  // 2049 rows make two partial sums of a gradient. Each has three tiles of 128
  // features, for q, k and v. The rank of 8 is padded to 16.
  const BatchRows layer = {.rows = 2049};
  const ActivationBytes bf16 =
      ActivationsOf(config, 2, /*is_cpu=*/false, 8, layer);
  constexpr int64_t kPartialSums = 2 * (3 * 128) * 16 * 4;
  // The residual stream counts four times. Attention takes more than the MLP. A
  // row of attention has, in bf16, 8 times the 32 query features and 6 times
  // the 16 key features. In f32, a row has the query features and one number
  // for each of 4 heads. The f32 part has 128 more rows for each node.
  constexpr int64_t kResidual = 2049 * 4 * 24 * 2;
  constexpr int64_t kSumsRow = (32 + 4) * 4;
  constexpr int64_t kAttention =
      2049 * (8 * 32 + 6 * 16) * 2 + (2049 + 128) * kSumsRow;
  EXPECT_EQ(bf16.working,
            bf16.kept_layer + kPartialSums + kResidual + kAttention);
  const BatchRows nine = {.rows = 2049, .nodes = 9};
  EXPECT_EQ(working(2, nine), bf16.working + 8 * 128 * kSumsRow);
}

TEST(ActivationsOfTest, CountsTheIdsOfSupports) {
  const auto working = [](int64_t support_ids) {
    return ActivationsOf(TinyConfig(), 4, /*is_cpu=*/true, 8,
                         {.rows = 1,
                          .scored = 4096,
                          .chunk = 4096,
                          .support_ids = support_ids})
        .working;
  };
  EXPECT_EQ(working(1000) - working(0), 1000 * 80);
}

TEST(ActivationsOfTest, RowsWithATeacherTakeASecondBufferOfLogits) {
  const model_config::ModelConfig config = TinyConfig();
  const auto head = [&](int64_t compared, int64_t chunk) {
    return ActivationsOf(config, 4, /*is_cpu=*/true, /*max_rank=*/8,
                         {.rows = 1,
                          .scored = 8192,
                          .compared = compared,
                          .chunk = chunk})
        .working;
  };
  const int64_t rows = head(4096, 64) - head(0, 64);
  EXPECT_EQ(head(4096, 128) - head(0, 128) - rows, 64 * config.vocab * 4);
  EXPECT_GT(rows, 64 * config.vocab * 4 + 4096 * config.hidden * 4);
}

// A token has one row for each of its experts. So the experts' gradients need a
// second partial sum at fewer tokens than other gradients do.
TEST(ActivationsOfTest, CountsThePartialSumsOfExperts) {
  model_config::ModelConfig config = TinyConfig();
  config.moe.shape = {
      .count = 4, .per_token = 2, .ffn = 1000, .layers = {true, true}};
  const auto bytes = [&](int64_t rows) {
    return ActivationsOf(config, 2, /*is_cpu=*/false, 8, {.rows = rows});
  };
  // 1024 tokens have 2048 rows, which are one part. With one more token there
  // are two parts. Each has 16 tiles of 128 features, for gate and up. The rank
  // is padded to 16.
  const auto working = [&](int64_t rows) {
    return bytes(rows).working - bytes(rows).kept_layer;
  };
  constexpr int64_t kTwoParts = 2 * (16 * 128) * 16 * 4;
  int64_t row = working(1024) - working(1023);
  EXPECT_EQ(working(1025) - working(1024), row + kTwoParts);
  // A shared expert of this width has one row for each token.
  config.moe.shape.per_token = 1;
  config.moe.shape.ffn = 8;
  config.moe.shape.shared_ffn = 1000;
  row = working(2048) - working(2047);
  EXPECT_EQ(working(2049) - working(2048), row + kTwoParts);
}

// Measured on an H100: 8 sequences of 512 tokens in Llama-3.1-8B's shape, with
// an adapter of rank 32 and no layer recomputed, took 13.70 GB beside model and
// adapter. This includes cuBLAS' workspaces and the allocator's rounding, which
// the bound leaves to the reserve of memory_split.cc.
TEST(ActivationsOfTest, IsWhatADeviceWasSeenToTake) {
  model_config::ModelConfig config{.num_layers = 32,
                                   .hidden = 4096,
                                   .ffn = 14336,
                                   .vocab = 128256,
                                   .num_heads = 32,
                                   .num_kv_heads = 8,
                                   .head_dim = 128};
  config.attention.resize(config.num_layers);
  constexpr int64_t kRows = 8 * 512;
  const int64_t bound = ActivationsOf(config, 2, /*is_cpu=*/false, 32,
                                      {.rows = kRows,
                                       .scored = kRows,
                                       .entries = kRows,
                                       .chunk = 1024,
                                       .nodes = 8})
                            .Total(config.num_layers, 0);
  // In bf16, a layer counts q, k, v, attention's output, gate, up, seven
  // products of rank 32, and the residual stream twice. In f32, it counts the
  // log-sum-exp of 32 heads. The head counts the logits of 1024 rows in f32 and
  // bf16, the hidden rows four times in f32, and the targets.
  constexpr int64_t kLayer =
      kRows * (2 * (2 * 4096 + 6144 + 4096 + 2 * 14336 + 7 * 32) + 4 * 32);
  constexpr int64_t kHead =
      1024 * 128256 * 6 + 4 * kRows * 4096 * 4 + kRows * 128;
  EXPECT_EQ(bound, 32 * kLayer + kHead);
  EXPECT_NEAR(static_cast<double>(bound), 13'696'499'712, 0.02 * 13.7e9);
}

TEST(ActivationsOfTest, CountsTheStatesOfADeltaRule) {
  model_config::ModelConfig config = TinyConfig();
  config.delta = {.layers = {false, true},
                  .key_heads = 2,
                  .value_heads = 4,
                  .key_features = 16,
                  .value_features = 16,
                  .conv_kernel = 4};
  const auto kept = [&](int64_t rows, int64_t nodes) {
    return ActivationsOf(config, 4, /*is_cpu=*/true, /*max_rank=*/8,
                         {.rows = rows, .nodes = nodes})
        .kept_layer;
  };
  // A head's state is [16, 16] in f32. There is one after each chunk of 64
  // rows, and up to two more for each node.
  constexpr int64_t kState = 4 * 16 * 16 * 4;
  EXPECT_EQ(kept(640, 3) - kept(640, 2), 2 * kState);
  // A row keeps the input projections (q, k and v; z; b and a), the output and
  // five products of rank 8. The tape has mixed q, k and v, the gates and u.
  // The rest is the residual stream twice and the MLP.
  constexpr int64_t kRow = (128 + 64 + 8) + 64 + 5 * 8 + (128 + 8 + 64);
  const int64_t rest = 2 * config.hidden + 2 * config.ffn + 3 * 8;
  EXPECT_EQ(kept(640, 1), 640 * 4 * (kRow + rest) + 12 * kState);
}

TEST(ActivationsOfTest, CountsTheBackwardPassOfADeltaRuleOnCuda) {
  // J key heads, H value heads, K key features, V value features.
  constexpr int64_t kJ = 2, kH = 8, kK = 128, kV = 256, kRows = 1000;
  model_config::ModelConfig config = TinyConfig();
  config.delta = {.layers = {false, true},
                  .key_heads = kJ,
                  .value_heads = kH,
                  .key_features = kK,
                  .value_features = kV,
                  .conv_kernel = 4};
  const ActivationBytes bytes =
      ActivationsOf(config, 2, /*is_cpu=*/false, 8, {.rows = kRows});
  const auto floats = [](std::initializer_list<std::vector<int64_t>> sizes) {
    int64_t sum = 0;
    for (const std::vector<int64_t>& size : sizes) {
      sum += std::accumulate(size.begin(), size.end(), int64_t{4},
                             std::multiplies<>());
    }
    return sum;
  };
  constexpr int64_t kW = 2 * kJ * kK + kH * kV;
  constexpr int64_t kSlices = kV / 64;
  // The states after 15 whole chunks, and two for the node.
  const int64_t rule =
      floats({{kRows, kW}, {kRows, kH}, {kRows, kH}, {15 + 2, kH, kK, kV}});
  // What cuda::RunDeltaChunksBackward allocates.
  const int64_t parts = floats({{kSlices, kRows, kH, kK},
                                {kSlices, kRows, kH, kK},
                                {kRows, kH, kV},
                                {kSlices, kRows, kH},
                                {kSlices, kRows, kH},
                                {kRows, kJ, kK}});
  // In bf16, the gradients of the projections, the output and its norm; the
  // scores of the chunks; the gradients of u and of the states.
  const int64_t narrow =
      2 * (kRows * (kW + 3 * kH * kV + 2 * kH) + kRows * kH * (3 * 64 + kV) +
           (15 + 2) * kH * kK * kV);
  const int64_t residual = 4 * kRows * config.hidden * 2;
  const int64_t lora = lora::GradientWorkspaceBytes(kRows, config.shape(), 8);
  EXPECT_EQ(bytes.working,
            bytes.kept_layer + residual + narrow + rule + parts + lora);
}

TEST(ActivationsOfTest, CountsOutputNormsAndTheScoresOfMaskedAttention) {
  model_config::ModelConfig config = TinyConfig();
  const auto bytes = [&](int64_t rows) {
    return ActivationsOf(config, 2, /*is_cpu=*/false, 8, {.rows = rows});
  };
  const ActivationBytes plain = bytes(1000);
  config.attention[1].rule.window = 1000;  // The window is longer than any path
                                           // can be.
  EXPECT_EQ(bytes(1000).working, plain.working);
  config.attention[1].rule.window = 100;
  // Counts four score matrices of a block, and keys, values and their
  // gradients.
  const auto scores = [&](int64_t keys) {
    return 4 * (4 * config.num_heads * 256 * keys +
                (2 * 1000 + 4 * keys) * config.num_kv_heads * config.head_dim);
  };
  EXPECT_EQ(bytes(1000).working, plain.working + scores(100 + 256));
  config.attention[0].rule.softcap = 50;
  EXPECT_EQ(bytes(1000).working, plain.working + scores(1000));
  config.norms = model_config::kGemmaNorms;
  EXPECT_EQ(bytes(1000).kept_layer,
            plain.kept_layer + 1000 * 2 * config.hidden * 2);
}

TEST(ActivationsOfTest, CountsAllScoresWhereNoFlashKernelRuns) {
  model_config::ModelConfig plain = TinyConfig();
  model_config::ModelConfig capped = plain;
  capped.attention[0].rule.softcap = 50;
  const auto bytes = [](const model_config::ModelConfig& config,
                        int64_t element_bytes, bool is_cpu) {
    return ActivationsOf(config, element_bytes, is_cpu, 8, {.rows = 1000});
  };
  // On CUDA, attention in f32 never uses the flash kernels.
  const ActivationBytes f32 = bytes(plain, 4, /*is_cpu=*/false);
  EXPECT_EQ(f32.working, bytes(capped, 4, /*is_cpu=*/false).working);
  EXPECT_GT(f32.working, f32.kept_layer + 4 * 4 * plain.num_heads * 256 * 1000);
  // In bf16, the flash kernels run without a softcap, but not for a head width
  // of 12.
  EXPECT_LT(bytes(plain, 2, /*is_cpu=*/false).working,
            bytes(capped, 2, /*is_cpu=*/false).working);
  plain.head_dim = capped.head_dim = 12;
  EXPECT_EQ(bytes(plain, 2, /*is_cpu=*/false).working,
            bytes(capped, 2, /*is_cpu=*/false).working);
  // On a CPU, no rule needs additional memory for scores.
  EXPECT_EQ(bytes(plain, 4, /*is_cpu=*/true).working,
            bytes(capped, 4, /*is_cpu=*/true).working);
}

TEST(DefaultHostBudgetTest, IsAPartOfThisMachine) {
  const HostBudget budget = DefaultHostBudget();
  EXPECT_GT(budget.bytes, int64_t{16} << 20);
  EXPECT_FALSE(budget.source.empty());
}

}  // namespace
}  // namespace weft::engine
