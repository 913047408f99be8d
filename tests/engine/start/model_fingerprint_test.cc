#include "src/engine/adapters/model_fingerprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "src/base/fingerprint.h"
#include "src/model_config/model_config.h"
#include "src/model_config/weight_list.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::engine {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Matrices of the MLP have 128 KiB, twice what is read of a tensor.
constexpr char kConfig[] = R"({"model_type": "llama", "num_hidden_layers": 2,
  "hidden_size": 32, "intermediate_size": 1024, "vocab_size": 96,
  "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 64, "rope_theta": 10000.0,
  "eos_token_id": 2, "tie_word_embeddings": true})";

class ModelFingerprintTest : public ::testing::Test {
 protected:
  ModelFingerprintTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    Write("config.json", kConfig);
    const auto config = model_config::ParseModelConfig(kConfig).value();
    for (const model_config::WeightEntry& entry :
         model_config::ListWeights(config)) {
      shapes_[entry.name] = entry.shape;
      tensors_[entry.name].assign(entry.num_elements(), 0.5F);
    }
    WriteTensors();
  }
  ~ModelFingerprintTest() override { fs::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }

  void WriteTensors() const {
    std::vector<weights::NamedTensor> views;
    for (const auto& [name, values] : tensors_) {
      views.push_back(
          {.name = name,
           .view = {.dtype = weights::ScalarType::kF32,
                    .shape = shapes_.at(name),
                    .bytes = absl::MakeConstSpan(
                        reinterpret_cast<const std::byte*>(values.data()),
                        values.size() * sizeof(float))}});
    }
    Write("model.safetensors", weights::WriteSafetensors(views));
  }

  // Writes config.json with `from` replaced by `to`.
  void Edit(const std::string& from, const std::string& to) const {
    const std::string text = absl::StrReplaceAll(kConfig, {{from, to}});
    EXPECT_NE(text, kConfig);
    Write("config.json", text);
  }

  std::string Fingerprint() const {
    return ModelFingerprint({.model_dir = folder_}).value();
  }

  const TempFolder temporary_;
  const fs::path folder_ = temporary_.path();
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::map<std::string, std::vector<float>> tensors_;
};

TEST_F(ModelFingerprintTest, IgnoresWhatTheDecoderDoesNotReadOrCompute) {
  const std::string first = Fingerprint();
  EXPECT_EQ(first.find(' '), kFingerprintDigits);
  Write("config.json", absl::StrCat(kConfig, "\n"));
  EXPECT_EQ(Fingerprint(), first);
  Edit(R"("eos_token_id": 2)", R"("eos_token_id": [2, 7], "dtype": "float32")");
  EXPECT_EQ(Fingerprint(), first);
  Edit(R"("max_position_embeddings": 64)", R"("max_position_embeddings": 128)");
  EXPECT_EQ(Fingerprint(), first);
  Edit(R"("rope_theta": 10000.0)",
       R"("rope_parameters": {"rope_type": "default", "rope_theta": 10000})");
  EXPECT_EQ(Fingerprint(), first);
  Write("generation_config.json", R"({"eos_token_id": [3]})");
  Write("training_args.bin", "anything");
  Write("another.safetensors", "anything");
  EXPECT_EQ(Fingerprint(), first);
  // A stored copy of the tied head is not read into the decoder.
  shapes_["lm_head.weight"] = shapes_["model.embed_tokens.weight"];
  tensors_["lm_head.weight"] = tensors_["model.embed_tokens.weight"];
  WriteTensors();
  EXPECT_EQ(Fingerprint(), first);
}

TEST_F(ModelFingerprintTest, NamesTheFieldThatDiffers) {
  const std::string first = Fingerprint();
  Edit(R"("rms_norm_eps": 1e-5)", R"("rms_norm_eps": 1e-6)");
  EXPECT_THAT(FingerprintDifference(first, Fingerprint()),
              HasSubstr("rms_norm_eps is 1.0000000000000001e-05, here "));
  Edit("10000.0", "20000.0");
  EXPECT_THAT(FingerprintDifference(first, Fingerprint()),
              HasSubstr("rope is"));
}

TEST_F(ModelFingerprintTest, SeesAChangeOfAnyWholeTensorAndNamesIt) {
  const std::string first = Fingerprint();
  for (auto& [name, values] : tensors_) {
    SCOPED_TRACE(name);
    const std::vector<float> before = values;
    for (float& value : values) value += 0.05F;
    WriteTensors();
    const std::string difference = FingerprintDifference(first, Fingerprint());
    if (name.starts_with("model.layers.1.")) {
      EXPECT_THAT(difference, HasSubstr("layer.1 is"));
    }
    EXPECT_THAT(difference,
                HasSubstr(absl::StrCat(
                    absl::StrReplaceAll(name, {{".0.", ".*."}, {".1.", ".*."}}),
                    " is ")));
    values = before;
  }
}

// The distance of two blocks is a fifteenth of a tensor.
TEST_F(ModelFingerprintTest, SeesAChangeOfAFifteenthOfALargeTensor) {
  const std::string first = Fingerprint();
  std::vector<float>& values = tensors_["model.layers.0.mlp.up_proj.weight"];
  const std::vector<float> before = values;
  const size_t piece = values.size() / 15;
  for (size_t begin = 0; begin + piece <= values.size(); begin += piece) {
    for (size_t i = 0; i < piece; ++i) values[begin + i] += 0.05F;
    WriteTensors();
    EXPECT_NE(Fingerprint(), first) << begin;
    values = before;
  }
}

TEST_F(ModelFingerprintTest, RandomWeightsNeedNoFiles) {
  fs::remove(folder_ / "model.safetensors");
  EXPECT_THAT(ModelFingerprint({.model_dir = folder_}).status(),
              IsStatus(absl::StatusCode::kNotFound, "model.safetensors"));
  EXPECT_THAT(ModelFingerprint(
                  {.model_dir = folder_, .load_format = LoadFormat::kDummy}),
              IsOk());
}

}  // namespace
}  // namespace weft::engine
