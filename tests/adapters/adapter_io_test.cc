#include "src/adapters/adapter_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/peft/adapter_layout.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using nlohmann::json;

constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
constexpr lora::ModelShape kShape = {.num_layers = 2,
                                     .hidden = 4,
                                     .q_width = 6,
                                     .kv_width = 2,
                                     .ffn = 8,
                                     .vocab = 10};

// Returns a config with one override of every kind.
LoraConfig Uneven() {
  return {
      .rank = 3,
      .alpha = 5,
      .target_modules = {TargetModule::kQProj, TargetModule::kVProj,
                         TargetModule::kLmHead, TargetModule::kEmbedTokens},
      .seed = 77,
      .overrides = {{0, TargetModule::kVProj, {}},
                    {1, TargetModule::kQProj, {.rank = 2, .alpha = 1.5}},
                    {2, TargetModule::kEmbedTokens, {.rank = 1, .alpha = 5}}}};
}

lora::AdapterState StateOf(const LoraConfig& config) {
  std::vector<float> values(
      lora::AdapterLayout(kShape, config).num_parameters());
  std::iota(values.begin(), values.end(), 1.0F);
  lora::AdapterState state{.weights = values, .optim_steps = 4};
  for (auto* buffer : {&state.gradient, &state.moment1, &state.moment2}) {
    for (float& value : values) value += 0.25F;
    *buffer = values;
  }
  return state;
}

class AdapterIoTest : public ::testing::Test {
 protected:
  AdapterIoTest()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                absl::StrCat("weft_adapter_io_test_", getpid())),
        io_(folder_, "base", kShape) {}
  ~AdapterIoTest() override { std::filesystem::remove_all(folder_); }

  void Save(const LoraConfig& config) {
    ASSERT_THAT(io_.Save({.adapter_id = "a", .name = "c", .overwrite = true},
                         config, StateOf(config), /*last_step=*/9),
                IsOk());
  }

  // Changes the configuration in the manifest.
  template <typename Edit>
  void EditConfig(Edit edit) {
    const std::filesystem::path path = folder_ / "a" / "c" / "MANIFEST.json";
    json manifest = json::parse(std::ifstream(path));
    edit(manifest["fields"]["config"]);
    std::ofstream(path) << manifest;
  }

  const std::filesystem::path folder_;
  const AdapterIo io_;
};

TEST_F(AdapterIoTest, BringsLayersOfAnotherShapeBack) {
  Save(Uneven());
  const auto loaded = io_.Load({.source_adapter_id = "a", .name = "c"});
  ASSERT_THAT(loaded, IsOk());
  EXPECT_EQ(loaded->info.config, Uneven());
  const lora::AdapterState expected = StateOf(Uneven());
  EXPECT_EQ(loaded->state.weights, expected.weights);
  EXPECT_EQ(loaded->state.gradient, expected.gradient);
  EXPECT_EQ(loaded->state.moment1, expected.moment1);
  EXPECT_EQ(loaded->state.moment2, expected.moment2);
  EXPECT_EQ(loaded->state.optim_steps, 4u);
}

TEST_F(AdapterIoTest, DescribesWithoutReadingTensors) {
  Save(Uneven());
  const auto info = io_.Describe("a", "c");
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->config, Uneven());
  EXPECT_EQ(info->last_step, 9u);
  EXPECT_THAT(io_.Describe("a", "other"),
              IsStatus(absl::StatusCode::kNotFound, "other"));
}

TEST_F(AdapterIoTest, ANameThatIsNotThereNamesSomeThatAre) {
  EXPECT_THAT(io_.Describe("a", "x"),
              IsStatus(absl::StatusCode::kNotFound, "\"x\" does not exist"));
  Save(Uneven());
  const char* const one = "\"x\" does not exist; there are 'c'";
  EXPECT_THAT(io_.Describe("a", "x"),
              IsStatus(absl::StatusCode::kNotFound, one));
  EXPECT_THAT(io_.Load({.source_adapter_id = "a", .name = "x"}),
              IsStatus(absl::StatusCode::kNotFound, one));
  for (const char* name : {"c1", "c2", "c3", "c4", "c5", "c6"}) {
    std::filesystem::copy(folder_ / "a" / "c", folder_ / "a" / name,
                          std::filesystem::copy_options::recursive);
  }
  EXPECT_THAT(io_.Describe("a", "x"),
              IsStatus(absl::StatusCode::kNotFound,
                       "'c', 'c1', 'c2', 'c3', 'c4' and 2 more"));
}

TEST_F(AdapterIoTest, ListsNothingOfTheDaemonsOwnFolders) {
  Save({.rank = 2, .alpha = 3});
  std::filesystem::create_directories(folder_ / ".spill" / "0");
  ::testing::internal::CaptureStderr();
  const auto infos = io_.List("");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ASSERT_THAT(infos, IsOk());
  EXPECT_EQ(infos->size(), 1u);
}

TEST_F(AdapterIoTest, ReadsManifestsFromBeforeLayersCouldDiffer) {
  const LoraConfig even = {.rank = 2, .alpha = 3};
  Save(even);
  EditConfig([](json& config) { config.erase("overrides"); });
  const auto loaded = io_.Load({.source_adapter_id = "a", .name = "c"});
  ASSERT_THAT(loaded, IsOk());
  EXPECT_EQ(loaded->info.config, even);
}

TEST_F(AdapterIoTest, RefusesADamagedManifest) {
  const std::vector<json> damaged = {
      "none",
      json::array({1}),
      {{{"layer", 0}, {"module", 0}, {"rank", 1}}},
      {{{"layer", 0}, {"module", 9}, {"rank", 1}, {"alpha", 1}}},
      {{{"layer", -1}, {"module", 0}, {"rank", 1}, {"alpha", 1}}},
      {{{"layer", 0}, {"module", 0}, {"rank", 1 << 20}, {"alpha", 1}}}};
  for (const json& overrides : damaged) {
    Save(Uneven());
    EditConfig([&](json& config) { config["overrides"] = overrides; });
    EXPECT_THAT(io_.Load({.source_adapter_id = "a", .name = "c"}),
                IsStatus(kDataLoss, "manifest is damaged"))
        << overrides;
  }
}

// Weights of one shape with moments of another would be read past their end.
TEST_F(AdapterIoTest, RefusesAManifestOfAnotherAdapter) {
  Save(Uneven());
  EditConfig([](json& config) { config["overrides"] = json::array(); });
  EXPECT_THAT(io_.Load({.source_adapter_id = "a", .name = "c"}),
              IsStatus(kDataLoss, "adapter_config.json and manifest differ"));
}

}  // namespace
}  // namespace weft::engine
