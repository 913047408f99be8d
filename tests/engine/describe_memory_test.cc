// Tests the engine functions behind weftd --check-config.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "src/engine/adapters/model_fingerprint.h"
#include "src/engine/engine.h"
#include "src/log/folder/state_folder.h"
#include "src/model_config/weight_list.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/weights/files.h"

namespace weft::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

// The sizes of Llama-3.1-8B.
constexpr char kLarge[] = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 131072, "rope_theta": 500000.0,
  "tie_word_embeddings": false, "eos_token_id": 128001})";

constexpr char kSmall[] = R"({
  "model_type": "llama", "vocab_size": 10, "hidden_size": 8,
  "num_hidden_layers": 3, "intermediate_size": 12, "num_attention_heads": 2,
  "max_position_embeddings": 16, "tie_word_embeddings": false})";

// The sizes of the text part of Qwen3.5-0.8B.
constexpr char kHybrid[] = R"({
  "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
  "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
  "num_hidden_layers": 24, "num_attention_heads": 8,
  "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
  "linear_num_key_heads": 16, "linear_num_value_heads": 16,
  "linear_key_head_dim": 128, "linear_value_head_dim": 128,
  "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
  "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
  "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0,
                      "partial_rotary_factor": 0.25},
  "tie_word_embeddings": true, "eos_token_id": 248044})";

// Returns the text with each run of spaces replaced by one space.
std::string Squeezed(absl::string_view text) {
  return absl::StrJoin(absl::StrSplit(text, ' ', absl::SkipEmpty()), " ");
}

class DescribeMemoryTest : public ::testing::Test {
 protected:
  void WriteConfig(const char* config) {
    (void)folder_.Write("config.json", config);
  }

  // Writes every tensor of kSmall except the first `missing` ones.
  void WriteWeights(size_t missing) {
    std::vector<model_config::WeightEntry> entries =
        model_config::ListWeights(*model_config::ParseModelConfig(kSmall));
    entries.erase(entries.begin(),
                  entries.begin() + static_cast<ptrdiff_t>(missing));
    std::vector<std::vector<std::byte>> data;
    std::vector<weights::NamedTensor> tensors;
    for (const model_config::WeightEntry& entry : entries) {
      data.emplace_back(entry.num_elements() * 2);
      tensors.push_back(
          {entry.name, {weights::ScalarType::kF16, entry.shape, data.back()}});
    }
    (void)folder_.Write("model.safetensors",
                        weights::WriteSafetensors(tensors));
  }

  absl::StatusOr<std::string> Describe(int64_t bytes) {
    options_.model_dir = folder_.path();
    return DescribeMemory(options_, bytes);
  }

  weights::TempFolder folder_;
  EngineOptions options_;
};

TEST_F(DescribeMemoryTest, ACheckedStartNamesWhatIsWrong) {
  options_.model_dir = folder_.path();
  options_.device = Device::kCpu;
  options_.checkpoint_dir = folder_.path() + "/new/checkpoints";
  options_.state_dir = folder_.path() + "/new/state";
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kNotFound, "config.json"));
  WriteConfig(kSmall);
  WriteWeights(0);
  EXPECT_THAT(CheckStart(options_), IsOk());
  EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/new"));
  options_.max_context_tokens = 1000;
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kInvalidArgument, "--max-context"));
  options_.max_context_tokens = 0;
  options_.tensor_parallel_size = 64;
  EXPECT_THAT(CheckStart(options_), IsStatus(absl::StatusCode::kInvalidArgument,
                                             "--tensor-parallel-size"));
  options_.tensor_parallel_size = 1;
  options_.state_dir = folder_.path() + "/config.json/state";
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kFailedPrecondition, "--state-dir"));
  // A start makes the state folder, but not its parents.
  options_.state_dir = folder_.path() + "/other/state/";
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "make the folder " + folder_.path() + "/other first"));
  std::filesystem::create_directory(folder_.path() + "/other");
  EXPECT_THAT(CheckStart(options_), IsOk());
  options_.state_dir = "";
  WriteWeights(1);
  EXPECT_FALSE(CheckStart(options_).ok());
}

TEST_F(DescribeMemoryTest, ACheckOfOneRankIgnoresTheLauncher) {
  options_.model_dir = folder_.path();
  options_.device = Device::kCpu;
  options_.load_format = LoadFormat::kDummy;
  WriteConfig(kSmall);
  ::setenv("RANK", "none", 1);
  EXPECT_THAT(CheckStart(options_), IsOk());
  options_.data_parallel_size = 2;
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kInvalidArgument, "RANK"));
  ::unsetenv("RANK");
}

TEST_F(DescribeMemoryTest, ACheckReadsAStateFolderThatIsInUse) {
  options_.model_dir = folder_.path();
  options_.device = Device::kCpu;
  options_.load_format = LoadFormat::kDummy;
  options_.state_dir = folder_.path() + "/state";
  WriteConfig(kSmall);
  const auto used =
      log::StateFolder::Open(options_.state_dir, *ModelFingerprint(options_));
  ASSERT_THAT(used.status(), IsOk());
  EXPECT_THAT(CheckStart(options_), IsOk());
  (void)folder_.Write("state/FORMAT",
                      R"({"format_version": 5, "model": "other"})");
  EXPECT_THAT(CheckStart(options_),
              IsStatus(absl::StatusCode::kFailedPrecondition,
                       "belongs to another base model"));
  options_.accept_base_model_change = true;
  EXPECT_THAT(CheckStart(options_), IsOk());
  (void)folder_.Write("state/FORMAT", R"({"format_version": 4, "model": ""})");
  EXPECT_THAT(
      CheckStart(options_),
      IsStatus(absl::StatusCode::kFailedPrecondition, "has format version 4"));
}

TEST_F(DescribeMemoryTest, SaysPartsBytesAndLimits) {
  WriteConfig(kLarge);
  options_.load_format = LoadFormat::kDummy;
  options_.max_rank = 64;
  const auto text = Describe(80 * kGiB);
  ASSERT_THAT(text.status(), IsOk());
  // memory_plan_test.cc expects the same numbers. The model's bytes include 64
  // cosines and 64 sines for each of 131,072 positions.
  EXPECT_THAT(
      Squeezed(*text),
      AllOf(HasSubstr("model 16127631360 15.02 8030261248 parameters"),
            HasSubstr("activations 13574144000 12.64 memory micro-batches of "
                      "4096 tokens, 0 of 32 layers recomputed"),
            HasSubstr("nothing 143355 tokens for up to 64 sequences; the "
                      "longest has 131072"),
            HasSubstr("decode graphs 74842112 0.07 nothing"),
            HasSubstr("memory 6; one of rank 64 on every layer has 4063690752"),
            HasSubstr("reserve 4360732160 4.06"),
            HasSubstr("all 77309411328 72.00")));
}

// One of 64 sequences has two states, and the padding of decode graphs has one.
// In each of 18 layers a state has three rows of 6144 features in bf16, and 16
// sums of 128 x 128 in f32. A token has keys and values in six layers, with two
// heads of 256 features.
TEST_F(DescribeMemoryTest, StatesHaveARow) {
  WriteConfig(kHybrid);
  options_.load_format = LoadFormat::kDummy;
  EXPECT_THAT(
      Squeezed(*Describe(80 * kGiB)),
      AllOf(HasSubstr("states 2520391680 2.35 nothing 129 for sequences and "
                      "cached prefixes"),
            HasSubstr("752393024 parameters")));
  options_.kv_cache_bytes = 2 * (5 * 19537920 + 1000 * 12288);
  EXPECT_THAT(Squeezed(*Describe(80 * kGiB)),
              HasSubstr("states 97689600 0.09 flag 5 for"));
}

TEST_F(DescribeMemoryTest, ARankOfSeveralHasItsPart) {
  WriteConfig(kLarge);
  options_.load_format = LoadFormat::kDummy;
  options_.tensor_parallel_size = 2;
  // A rank has half of the 8,029,995,008 weights in matrices, and all 65 norms
  // of 4096 weights. Each weight takes two bytes: 2 * (8,029,995,008 / 2 +
  // 266,240). Rotary tables are added.
  EXPECT_THAT(*Describe(80 * kGiB), HasSubstr(" 8097636352 "));
  options_.tensor_parallel_size = 64;  // The model has fewer heads.
  EXPECT_THAT(
      Describe(80 * kGiB).status(),
      IsStatus(absl::StatusCode::kInvalidArgument, "--tensor-parallel-size"));
}

// The matrices have 8,029,995,008 weights of one byte. Each group of 64 weights
// has a scale of two bytes. The 65 norms of 4096 weights take two bytes for
// each weight. Rotary tables are added.
TEST_F(DescribeMemoryTest, CountsWeightsOfEightBits) {
  WriteConfig(kLarge);
  options_.load_format = LoadFormat::kDummy;
  options_.base_weights = BaseWeights::kInt8;
  EXPECT_THAT(*Describe(80 * kGiB), HasSubstr(" 8348573696 "));
  options_.dtype = Dtype::kF32;
  EXPECT_THAT(Describe(80 * kGiB).status(),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "--weights=int8 with --dtype=f32"));
}

TEST_F(DescribeMemoryTest, FailsAsAStartWould) {
  WriteConfig(kLarge);
  options_.load_format = LoadFormat::kDummy;
  EXPECT_THAT(Describe(24 * kGiB).status(),
              IsStatus(absl::StatusCode::kResourceExhausted, "--max-context"));
  // Not even the model fits.
  EXPECT_THAT(Describe(8 * kGiB).status(),
              IsStatus(absl::StatusCode::kResourceExhausted, "leaves 0 bytes"));
  options_.device = Device::kCpu;
  EXPECT_THAT(Describe(80 * kGiB).status(),
              IsStatus(absl::StatusCode::kInvalidArgument, "--device=cpu"));
}

TEST_F(DescribeMemoryTest, ReadsHeadersUnlessWeightsAreDummies) {
  EXPECT_THAT(Describe(kGiB).status(),
              IsStatus(absl::StatusCode::kNotFound, "config.json"));
  WriteConfig(kSmall);
  EXPECT_THAT(Describe(2 * kGiB).status(),
              IsStatus(absl::StatusCode::kNotFound, "safetensors"));
  WriteWeights(/*missing=*/1);
  EXPECT_THAT(
      Describe(2 * kGiB).status(),
      IsStatus(absl::StatusCode::kNotFound, "model.embed_tokens.weight"));
  WriteWeights(/*missing=*/0);
  EXPECT_THAT(Describe(2 * kGiB).status(), IsOk());
}

TEST_F(DescribeMemoryTest, ShowsWhatFlagsLeaveToNobody) {
  WriteConfig(kSmall);
  WriteWeights(/*missing=*/0);
  options_.max_resident_adapters = 1;
  options_.kv_cache_bytes = 1 << 20;
  options_.memory_budget_bytes = 1 << 28;
  EXPECT_THAT(*Describe(2 * kGiB),
              AllOf(HasSubstr("not given away"), HasSubstr("  flag  ")));
}

}  // namespace
}  // namespace weft::engine
