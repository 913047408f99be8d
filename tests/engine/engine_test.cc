// The engine through its public interface, over a tiny model in a folder.
#include "src/engine/engine.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <future>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/registry.h"
#include "src/lora/peft_format.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

using ::testing::SizeIs;
using enum absl::StatusCode;

constexpr char kConfigJson[] = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "tie_word_embeddings": true, "eos_token_id": 39})";

// Collects random tensors and writes them as one file.
class CheckpointWriter {
 public:
  void Add(const std::string& name, const std::vector<int64_t>& shape,
           double mean) {
    const at::Tensor& tensor =
        tensors_.emplace_back(at::randn(shape, at::kFloat) * 0.25 + mean);
    const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    views_.push_back({.name = name,
                      .view = {.dtype = weights::ScalarType::kF32,
                               .shape = shape,
                               .bytes = {bytes, tensor.nbytes()}}});
  }

  void Write(const std::filesystem::path& path) const {
    std::ofstream(path, std::ios::binary) << weights::WriteSafetensors(views_);
  }

 private:
  std::list<at::Tensor> tensors_;
  std::vector<weights::NamedTensor> views_;
};

void WriteModel(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << kConfigJson;
  at::manual_seed(41);
  CheckpointWriter writer;
  writer.Add("model.embed_tokens.weight", {40, 16}, 0);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    writer.Add(prefix + "input_layernorm.weight", {16}, 1);
    writer.Add(prefix + "self_attn.q_proj.weight", {16, 16}, 0);
    writer.Add(prefix + "self_attn.k_proj.weight", {8, 16}, 0);
    writer.Add(prefix + "self_attn.v_proj.weight", {8, 16}, 0);
    writer.Add(prefix + "self_attn.o_proj.weight", {16, 16}, 0);
    writer.Add(prefix + "post_attention_layernorm.weight", {16}, 1);
    writer.Add(prefix + "mlp.gate_proj.weight", {24, 16}, 0);
    writer.Add(prefix + "mlp.up_proj.weight", {24, 16}, 0);
    writer.Add(prefix + "mlp.down_proj.weight", {16, 24}, 0);
  }
  writer.Add("model.norm.weight", {16}, 1);
  writer.Write(folder / "model.safetensors");
}

// Runs `start` with a callback and waits for what it is called with.
template <typename T, typename Start>
absl::StatusOr<T> Wait(const Start& start) {
  // Shared: the callback may still be running when get() returns.
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  std::future<absl::StatusOr<T>> result = promise->get_future();
  start([promise](absl::StatusOr<T> value) {
    promise->set_value(std::move(value));
  });
  return result.get();
}

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              absl::StrCat("weft_engine_test_", getpid());
    WriteModel(folder_ / "model");
    absl::StatusOr<std::unique_ptr<Engine>> engine =
        StartEngine({.model_dir = folder_ / "model",
                     .checkpoint_dir = folder_ / "checkpoints",
                     .device = Device::kCpu,
                     .dtype = Dtype::kF32,
                     .num_threads = 1,
                     .kv_cache_bytes = 1 << 20},
                    &registry_);
    ASSERT_THAT(engine, IsOk());
    engine_ = *std::move(engine);
  }

  void TearDown() override {
    engine_.reset();
    std::filesystem::remove_all(folder_);
  }

  absl::StatusOr<AdapterInfo> Create(const std::string& id) {
    return Wait<AdapterInfo>([&](auto done) {
      engine_->CreateAdapter(
          {.adapter_id = id, .config = {.rank = 2, .alpha = 4, .seed = 5}},
          done);
    });
  }

  absl::StatusOr<StepReply<TrainResult>> Train(const std::string& id,
                                               uint64_t step = 0,
                                               int32_t first_token = 3) {
    TrainRequest request{.adapter_id = id, .step = step};
    Datum datum;
    for (int32_t i = 0; i < 8; ++i) {
      datum.tokens.push_back((first_token + i) % 40);
      datum.targets.push_back((first_token + i + 1) % 40);
    }
    request.data = {datum, datum};
    return Wait<StepReply<TrainResult>>(
        [&](auto done) { engine_->Train(request, done); });
  }

  absl::StatusOr<StepReply<OptimStepResult>> Optim(const std::string& id) {
    return Wait<StepReply<OptimStepResult>>([&](auto done) {
      engine_->OptimStep({.adapter_id = id, .adamw = {.learning_rate = 1e-2}},
                         done);
    });
  }

  void Learn(const std::string& id, int steps) {
    for (int step = 0; step < steps; ++step) {
      ASSERT_THAT(Train(id), IsOk());
      ASSERT_THAT(Optim(id), IsOk());
    }
  }

  absl::StatusOr<SampleResult> Sample(const std::string& id,
                                      const std::string& snapshot = "") {
    return Wait<SampleResult>([&](auto done) {
      engine_->Sample(
          {.adapter_id = id,
           .snapshot = snapshot,
           .prompt = {1, 2, 3},
           .config = {.max_tokens = 12, .seed = 9, .stop = StopRule()}},
          /*on_delta=*/{}, done);
    });
  }

  // The tensors of the exported adapter.
  std::string Exported(const std::string& id) {
    const absl::StatusOr<PeftFiles> files = Wait<PeftFiles>([&](auto done) {
      engine_->ExportAdapter({.adapter_id = id, .snapshot = ""}, done);
    });
    EXPECT_THAT(files, IsOk());
    return files.ok() ? files->at(1).second : "";
  }

  std::filesystem::path folder_;
  prometheus::Registry registry_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, TellsWhatItLoaded) {
  EXPECT_EQ(engine_->info().architecture, "llama");
  EXPECT_EQ(engine_->info().dtype, "f32");
  EXPECT_EQ(engine_->info().vocab_size, 40);
  EXPECT_EQ(engine_->info().context_length, 64);
  EXPECT_EQ(engine_->info().eos_token_ids, std::vector<int32_t>{39});
}

TEST_F(EngineTest, LearnsWhatItIsTaught) {
  ASSERT_THAT(Create("a"), IsOk());
  const double before = Train("a")->result.metrics.at("loss:sum");
  ASSERT_THAT(Optim("a"), IsOk());
  Learn("a", 10);
  const double after = Train("a")->result.metrics.at("loss:sum");
  EXPECT_LT(after, before);
  const auto info =
      Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter("a", done); });
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->optim_steps, 11u);
  EXPECT_EQ(info->version, 12u);
  EXPECT_EQ(info->last_step, 23u);
}

TEST_F(EngineTest, AReplayedStepTrainsOnce) {
  ASSERT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Create("b"), IsOk());
  const auto first = Train("a", 1), again = Train("a", 1);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(again, IsOk());
  EXPECT_FALSE(first->replayed);
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(first->result.data[0].logprobs, again->result.data[0].logprobs);
  ASSERT_THAT(Train("b", 1), IsOk());
  EXPECT_EQ(Optim("a")->result.grad_norm, Optim("b")->result.grad_norm);
  EXPECT_THAT(Train("a", 1, /*first_token=*/7),
              IsStatus(kAlreadyExists, "step"));
}

TEST_F(EngineTest, RefusesAdaptersThatAreNotThere) {
  EXPECT_THAT(Train("a"), IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(Optim("a"), IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(Sample("a"), IsStatus(kNotFound, "'a' does not exist"));
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Sample("a", "s"), IsStatus(kNotFound, "'s' does not exist"));
}

TEST_F(EngineTest, ARepeatedCreationIsAnsweredUntilTheFirstStep) {
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Create("a"), IsOk());
  ASSERT_THAT(Train("a"), IsOk());
  EXPECT_THAT(Create("a"), IsStatus(kAlreadyExists, "'a'"));
}

TEST_F(EngineTest, AdaptersDoNotTouchEachOther) {
  for (const char* id : {"a", "b", "c"}) ASSERT_THAT(Create(id), IsOk());
  Learn("a", 2);
  // b learns the same with another's steps and samples between its own.
  for (int step = 0; step < 2; ++step) {
    ASSERT_THAT(Train("b"), IsOk());
    ASSERT_THAT(Train("c", 0, /*first_token=*/20), IsOk());
    ASSERT_THAT(Sample("c"), IsOk());
    ASSERT_THAT(Optim("b"), IsOk());
    ASSERT_THAT(Optim("c"), IsOk());
  }
  EXPECT_EQ(Exported("a"), Exported("b"));
  EXPECT_NE(Exported("a"), Exported("c"));
}

TEST_F(EngineTest, ASnapshotSamplesTheSameAfterMoreSteps) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 3);
  ASSERT_THAT(Wait<StepReply<uint64_t>>([&](auto done) {
                engine_->PublishSnapshot({.adapter_id = "a", .name = "s"},
                                         done);
              }),
              IsOk());
  const absl::StatusOr<SampleResult> before = Sample("a", "s");
  ASSERT_THAT(before, IsOk());
  EXPECT_THAT(before->samples[0].tokens, SizeIs(12));
  Learn("a", 3);
  const absl::StatusOr<SampleResult> after = Sample("a", "s");
  ASSERT_THAT(after, IsOk());
  EXPECT_EQ(before->version, 4u);
  EXPECT_EQ(after->version, 4u);
  EXPECT_EQ(after->samples[0].tokens, before->samples[0].tokens);
  EXPECT_EQ(after->samples[0].logprobs, before->samples[0].logprobs);
  EXPECT_NE(Sample("a")->samples[0].logprobs, before->samples[0].logprobs);
}

TEST_F(EngineTest, ACheckpointBringsEveryBitBack) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  ASSERT_THAT(Wait<StepReply<CheckpointInfo>>([&](auto done) {
                engine_->SaveCheckpoint({.adapter_id = "a", .name = "c"}, done);
              }),
              IsOk());
  Learn("a", 2);
  const std::string expected = Exported("a");
  ASSERT_THAT(Wait<StepReply<AdapterInfo>>([&](auto done) {
                engine_->LoadCheckpoint(
                    {.adapter_id = "a", .source_adapter_id = "a", .name = "c"},
                    done);
              }),
              IsOk());
  EXPECT_NE(Exported("a"), expected);
  // The moments are back as well, or the same steps would end elsewhere.
  Learn("a", 2);
  EXPECT_EQ(Exported("a"), expected);
}

TEST_F(EngineTest, AnExportComesBackAsAnImport) {
  ASSERT_THAT(Create("a"), IsOk());
  Learn("a", 2);
  const absl::StatusOr<PeftFiles> files = Wait<PeftFiles>([&](auto done) {
    engine_->ExportAdapter({.adapter_id = "a", .snapshot = ""}, done);
  });
  ASSERT_THAT(files, IsOk());
  ASSERT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine_->ImportAdapter({.adapter_id = "b", .files = *files},
                                       done);
              }),
              IsOk());
  EXPECT_EQ(Exported("b"), Exported("a"));
  EXPECT_EQ(Sample("b")->samples[0].logprobs, Sample("a")->samples[0].logprobs);
}

TEST_F(EngineTest, RefusesToImportALargeRankOfOneLayer) {
  LoraConfig config{.rank = 2, .alpha = 4};
  config.overrides = {{1, TargetModule::kVProj, {.rank = 65, .alpha = 4}}};
  const lora::ModelShape shape = {.num_layers = 2,
                                  .hidden = 16,
                                  .q_width = 16,
                                  .kv_width = 8,
                                  .ffn = 24,
                                  .vocab = 40};
  const std::vector<float> weights(
      lora::AdapterLayout(shape, config).num_parameters());
  EXPECT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine_->ImportAdapter(
                    {.adapter_id = "b",
                     .files = lora::WritePeft(config, shape, weights, "base")},
                    done);
              }),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "rank 65 is above the limit 64 (--max-rank)"));
}

TEST_F(EngineTest, RefusesWorkOnceItDrains) {
  ASSERT_THAT(Create("a"), IsOk());
  EXPECT_THAT(Wait<bool>([&](auto done) { engine_->Drain(done); }),
              IsOkAndHolds(true));
  EXPECT_THAT(Train("a"), IsStatus(kUnavailable, ""));
  EXPECT_THAT(Sample("a"), IsStatus(kUnavailable, ""));
}

}  // namespace
}  // namespace weft
