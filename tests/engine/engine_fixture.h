// Uses the engine through its public interface, with a tiny model in a folder.
#ifndef WEFT_TESTS_ENGINE_ENGINE_FIXTURE_H_
#define WEFT_TESTS_ENGINE_ENGINE_FIXTURE_H_

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
#include "src/engine/engine.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::testing {

inline constexpr char kConfigJson[] = R"({
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

inline void WriteModel(const std::filesystem::path& folder) {
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

// Runs `start` with a callback and returns the result that the callback gets.
template <typename T, typename Start>
absl::StatusOr<T> Wait(const Start& start) {
  // The promise is shared, because the callback may still be running when get()
  // returns.
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  std::future<absl::StatusOr<T>> result = promise->get_future();
  start([promise](absl::StatusOr<T> value) {
    promise->set_value(std::move(value));
  });
  return result.get();
}

class EngineFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteModel(folder_ / "model");
    Start(Options());
  }

  void TearDown() override { engine_.reset(); }

  EngineOptions Options() const {
    return {.model_dir = folder_ / "model",
            .device = Device::kCpu,
            .dtype = Dtype::kF32,
            .num_threads = 1,
            .checkpoint_dir = folder_ / "checkpoints",
            .kv_cache_bytes = 1 << 20};
  }

  void Start(const EngineOptions& options) {
    engine_.reset();
    registry_ = std::make_unique<prometheus::Registry>();
    engine_ =
        engine::StartEngine(options, World(), registry_.get(), {}).value();
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
      engine_->Sample({.adapter_id = id,
                       .snapshot = snapshot,
                       .prompt = {1, 2, 3},
                       .config = {.max_tokens = 12,
                                  .seed = 9,
                                  .stop = {.ignore_eos = true}}},
                      /*on_delta=*/{}, done);
    });
  }

  // Returns the tensors of the exported adapter.
  std::string Exported(const std::string& id,
                       const std::string& snapshot = "") {
    const auto files = Wait<PeftFiles>([&](auto done) {
      engine_->ExportAdapter({.adapter_id = id, .snapshot = snapshot}, done);
    });
    return files.value().at(1).second;
  }

  const TempFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  std::unique_ptr<prometheus::Registry> registry_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_ENGINE_ENGINE_FIXTURE_H_
