// Tests the report of weftctl weights inspect, without Torch.
#include "src/model_config/checkpoint_report.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/model_config/weight_list.h"
#include "src/weights/safetensors.h"
#include "tests/support/processor_time.h"
#include "tests/weights/files.h"

namespace weft::model_config {
namespace {

constexpr char kConfig[] =
    R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 8,
        "num_hidden_layers": 3, "intermediate_size": 12,
        "num_attention_heads": 2, "max_position_embeddings": 16,
        "tie_word_embeddings": false})";

// A folder with every tensor of the model in f16. A test may leave tensors out,
// rename them or add others.
class CheckpointReportTest : public ::testing::Test {
 protected:
  CheckpointReportTest() {
    (void)folder_.Write("config.json", kConfig);
    entries_ = ListWeights(*ParseModelConfig(kConfig));
  }

  CheckpointReport Inspect() {
    std::vector<std::vector<std::byte>> data;
    std::vector<weights::NamedTensor> tensors;
    for (const WeightEntry& entry : entries_) {
      data.emplace_back(entry.num_elements() * 2);
      tensors.push_back(
          {entry.name, {weights::ScalarType::kF16, entry.shape, data.back()}});
    }
    (void)folder_.Write("model.safetensors",
                        weights::WriteSafetensors(tensors));
    return InspectCheckpoint(folder_.path());
  }

  weights::TempFolder folder_;
  std::vector<WeightEntry> entries_;
};

TEST_F(CheckpointReportTest, CountsTensorsOfAllLayersOnce) {
  entries_.push_back({.name = "vision.layers.0.w", .shape = {5}});
  const CheckpointReport report = Inspect();
  ASSERT_TRUE(report.config.has_value());
  EXPECT_TRUE(report.problems.empty());
  EXPECT_EQ(report.num_files, 1);
  EXPECT_EQ(report.num_tensors, 3 * 9 + 4);
  EXPECT_EQ(report.num_read_tensors, 3 * 9 + 3);
  EXPECT_EQ(report.read_bytes, 2 * report.config->num_parameters());
  EXPECT_EQ(report.size_bytes, report.read_bytes + 10);
  EXPECT_EQ(report.head_bytes, 2 * 2 * 10 * 8);
  ASSERT_EQ(report.groups.size(), 9 + 4);
  for (const TensorGroup& group : report.groups) {
    if (group.name == "model.layers.*.mlp.up_proj.weight") {
      EXPECT_EQ(group.count, 3);
      EXPECT_EQ(group.size_bytes, 3 * 12 * 8 * 2);
      EXPECT_TRUE(group.is_read);
    }
    EXPECT_EQ(group.is_read, group.name != "vision.layers.*.w");
  }
}

TEST_F(CheckpointReportTest, SaysOnceWhatIsWrongWithEveryLayer) {
  for (WeightEntry& entry : entries_) {
    if (entry.slot == WeightSlot::kDown) entry.name += "_scale";
    if (entry.slot == WeightSlot::kO) entry.shape = {8, 9};
  }
  const CheckpointReport report = Inspect();
  ASSERT_EQ(report.problems.size(), 3);
  EXPECT_EQ(report.problems[0].message,
            "tensor 'model.layers.*.self_attn.o_proj.weight' has shape [8, 9]; "
            "expected [8, 8]");
  EXPECT_EQ(report.problems[0].count, 3);
  EXPECT_EQ(
      report.problems[1].message,
      "tensor 'model.layers.*.mlp.down_proj.weight' is not in the checkpoint");
  EXPECT_EQ(report.problems[1].count, 3);
  EXPECT_EQ(report.problems[2].message,
            "tensor 'model.layers.0.mlp.down_proj.weight_scale' has no place "
            "in a llama as config.json describes it");
}

TEST_F(CheckpointReportTest, ListsTensorsOfAnUnknownArchitecture) {
  (void)folder_.Write("config.json", R"({"model_type": "mamba"})");
  const CheckpointReport report = Inspect();
  EXPECT_FALSE(report.config.has_value());
  ASSERT_EQ(report.problems.size(), 1);
  EXPECT_NE(report.problems[0].message.find("model_type is \"mamba\""),
            std::string::npos)
      << report.problems[0].message;
  EXPECT_EQ(report.num_tensors, static_cast<int64_t>(entries_.size()));
  EXPECT_EQ(report.num_read_tensors, 0);
}

TEST_F(CheckpointReportTest, TakesLinearTimeForManyNames) {
  for (int i = 0; i < 90'000; ++i) {
    entries_.push_back({.name = "x" + std::to_string(i), .shape = {1}});
  }
  const ProcessorTime time;
  EXPECT_EQ(Inspect().groups.size(), 90'000 + 9 + 3);
  EXPECT_LT(time.Seconds(), 3);
}

TEST_F(CheckpointReportTest, ABiasOfTheHeadHasNoPlace) {
  entries_.push_back({.name = "lm_head.bias", .shape = {10}});
  const CheckpointReport report = Inspect();
  ASSERT_EQ(report.problems.size(), 1);
  EXPECT_EQ(report.problems[0].message,
            "tensor 'lm_head.bias' has no place in a llama as config.json "
            "describes it");
}

TEST(InspectCheckpoint, SaysWhatIsMissingInAnEmptyFolder) {
  const weights::TempFolder folder;
  const CheckpointReport report = InspectCheckpoint(folder.path());
  EXPECT_EQ(report.problems.size(), 2);
  EXPECT_EQ(report.num_files, 0);
}

}  // namespace
}  // namespace weft::model_config
