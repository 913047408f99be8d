#include "src/engine/adapters/adapter_table.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"

namespace weft::engine::adapter_table_test {
namespace {

using ::testing::ElementsAre;
using enum absl::StatusCode;

constexpr model_config::ModelShape kShape = {.num_layers = 1,
                                             .hidden = 6,
                                             .q_width = 8,
                                             .kv_width = 4,
                                             .ffn = 10,
                                             .vocab = 12};
constexpr auto kA = static_cast<AdapterKey>(1);
constexpr auto kB = static_cast<AdapterKey>(2);

class AdapterTableTest : public ::testing::Test {
 protected:
  // Does what an optimizer step does to the adapter.
  void Step(AdapterKey key) {
    lora::Adapter* adapter = table_.Find(key);
    at::Tensor next = adapter->NextWeights();
    next.fill_(static_cast<double>(adapter->optim_steps() + 1));
    adapter->FinishStep(next);
  }

  AdapterTable table_{kShape, at::kFloat, at::kCPU};
};

TEST_F(AdapterTableTest, FindsWhatWasCreated) {
  const lora::Adapter& created = table_.Create(kA, {.rank = 2});
  EXPECT_EQ(table_.Find(kA), &created);
  EXPECT_EQ(table_.Find(kB), nullptr);
  EXPECT_EQ(table_.Find(AdapterKey::kBaseModel), nullptr);
}

TEST_F(AdapterTableTest, ErasesOnce) {
  table_.Create(kA, {.rank = 2});
  EXPECT_TRUE(table_.Erase(kA));
  EXPECT_FALSE(table_.Erase(kA));
  EXPECT_EQ(table_.Find(kA), nullptr);
}

TEST_F(AdapterTableTest, TellsTheFactsOfNow) {
  table_.Create(kA, {.rank = 2, .alpha = 6});
  Step(kA);
  const AdapterInfo info = table_.Facts(kA).info;
  EXPECT_EQ(info.config.alpha, 6);
  EXPECT_EQ(info.optim_steps, 1u);
  EXPECT_EQ(info.version, 2u);
  EXPECT_EQ(info.num_parameters,
            static_cast<uint64_t>(table_.Find(kA)->layout().num_parameters()));
  EXPECT_EQ(info.resident_bytes, info.num_parameters * 20);
}

TEST_F(AdapterTableTest, ASnapshotKeepsItsWeightsThroughSteps) {
  table_.Create(kA, {.rank = 2, .seed = 3});
  const std::vector<float> weights = table_.Find(kA)->latest()->HostWeights();
  EXPECT_THAT(table_.PublishSnapshot(kA, "first"), IsOkAndHolds(1));
  Step(kA);
  Step(kA);
  EXPECT_EQ((*table_.Version(kA, "first"))->HostWeights(), weights);
  EXPECT_EQ((*table_.Version(kA, ""))->number, 3u);
  EXPECT_THAT(table_.Facts(kA).info.snapshots, ElementsAre("first"));
}

TEST_F(AdapterTableTest, PublishingTheSameVersionAgainIsNoError) {
  table_.Create(kA, {.rank = 2});
  EXPECT_THAT(table_.PublishSnapshot(kA, "s"), IsOkAndHolds(1));
  EXPECT_THAT(table_.PublishSnapshot(kA, "s"), IsOkAndHolds(1));
  Step(kA);
  EXPECT_THAT(table_.PublishSnapshot(kA, "s"),
              IsStatus(kAlreadyExists, "pins version 1"));
  EXPECT_THAT(table_.ReleaseSnapshot(kA, "s"), IsOk());
  EXPECT_THAT(table_.PublishSnapshot(kA, "s"), IsOkAndHolds(2));
}

TEST_F(AdapterTableTest, AnAdapterHasACertainNumberOfSnapshots) {
  table_.Create(kA, {.rank = 2});
  for (size_t i = 0; i < kMaxSnapshots; ++i) {
    EXPECT_THAT(table_.PublishSnapshot(kA, absl::StrCat("s", i)), IsOk());
  }
  EXPECT_THAT(table_.PublishSnapshot(kA, "s0"), IsOk());
  EXPECT_THAT(table_.PublishSnapshot(kA, "more"),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "more than 64 snapshots of the adapter; call "
                       "ReleaseSnapshot first"));
  EXPECT_THAT(table_.ReleaseSnapshot(kA, "s7"), IsOk());
  EXPECT_THAT(table_.PublishSnapshot(kA, "more"), IsOk());
}

TEST_F(AdapterTableTest, SnapshotsOfOlderVersionsAreResident) {
  table_.Create(kA, {.rank = 2});
  ASSERT_THAT(table_.PublishSnapshot(kA, "s"), IsOk());
  const AdapterInfo before = table_.Facts(kA).info;
  EXPECT_EQ(before.resident_bytes, before.num_parameters * 20);
  Step(kA);
  EXPECT_EQ(table_.Facts(kA).info.resident_bytes, before.num_parameters * 24);
}

TEST_F(AdapterTableTest, RefusesSnapshotsThatAreNotThere) {
  EXPECT_THAT(table_.PublishSnapshot(kA, "s"),
              IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(table_.ReleaseSnapshot(kA, "s"),
              IsStatus(kNotFound, "does not exist"));
  EXPECT_THAT(table_.Version(kA, ""), IsStatus(kNotFound, "does not exist"));
  table_.Create(kA, {.rank = 2});
  EXPECT_THAT(table_.ReleaseSnapshot(kA, "s"), IsStatus(kNotFound, "'s'"));
  EXPECT_THAT(table_.Version(kA, "s"), IsStatus(kNotFound, "'s'"));
}

TEST_F(AdapterTableTest, APinnedVersionOutlivesItsAdapter) {
  table_.Create(kA, {.rank = 2, .seed = 3});
  const lora::AdapterVersionPtr pinned = table_.Version(kA, "").value();
  const std::vector<float> weights = pinned->HostWeights();
  EXPECT_TRUE(table_.Erase(kA));
  EXPECT_EQ(pinned->HostWeights(), weights);
}

TEST_F(AdapterTableTest, AnAdapterIsOnTheDeviceOnTheHostOrOnDisk) {
  table_.Create(kA, {.rank = 2});
  ASSERT_THAT(table_.PublishSnapshot(kA, "old"), IsOk());
  ASSERT_THAT(table_.PublishSnapshot(kA, "same"), IsOk());
  Step(kA);
  const uint64_t n = table_.Facts(kA).info.num_parameters;
  EXPECT_EQ(table_.ImageBytes(kA), 20 * n) << "two versions";
  table_.MoveToHost(kA, table_.Image(kA));
  EXPECT_EQ(table_.Find(kA), nullptr);
  EXPECT_EQ(table_.Facts(kA).info.resident_bytes, 0u);
  EXPECT_EQ(table_.Facts(kA).info.location, AdapterLocation::kHost);
  lora::AdapterImage image = table_.Image(kA);
  table_.MoveToDisk(kA, image, "file");
  EXPECT_EQ(table_.File(kA).name, "file");
  EXPECT_EQ(table_.Facts(kA).info.location, AdapterLocation::kDisk);
  EXPECT_FALSE(table_.Image(kA).gradient_N.defined());
  table_.MoveToDevice(kA, image);
  EXPECT_EQ(table_.File(kA).name, "");
  EXPECT_EQ(table_.Facts(kA).info.location, AdapterLocation::kDevice);
  EXPECT_EQ(table_.Version(kA, "")->get()->number, 2u);
  EXPECT_EQ(table_.Version(kA, "old")->get()->number, 1u);
  EXPECT_EQ(*table_.Version(kA, "old"), *table_.Version(kA, "same"));
}

// Without memory, but a device that is not the host.
TEST(AdapterTableOffHostTest, ABorrowedVersionIsOnTheHost) {
  const at::InferenceMode no_autograd;
  AdapterTable host(kShape, at::kFloat, at::kCPU);
  host.Create(kA, {.rank = 2, .seed = 3});
  lora::AdapterImage image = host.Image(kA);
  AdapterTable table(kShape, at::kBFloat16, at::kMeta);
  table.AddOnDisk(kA, {.rank = 2, .seed = 3}, image, {},
                  {.name = "file", .durable = true}, absl::UnixEpoch());
  EXPECT_THAT(table.CopyBytes(kA, "none"), IsStatus(kNotFound, "'none'"));
  const int64_t n = image.versions[0].weights_N.numel();
  EXPECT_THAT(table.CopyBytes(kA, ""), IsOkAndHolds(6 * n));
  const auto borrowed = table.Borrow(kA, "", image).value();
  EXPECT_EQ(borrowed->HostWeights(), host.Find(kA)->latest()->HostWeights());
  EXPECT_EQ(*table.Borrow(kA, "", image), borrowed);
  const lora::AdapterVersionPtr copy = table.OnDevice(borrowed);
  EXPECT_EQ(copy->number, borrowed->number);
  EXPECT_TRUE(copy->weights_N.is_meta());
  EXPECT_EQ(copy->compute_N.scalar_type(), at::kBFloat16);
  EXPECT_EQ(table.OnDevice(copy), copy);
  // The adapter's own weights come to the device, too.
  lora::AdapterImage read = table.Image(kA);
  for (size_t i = 0; i < image.Tensors().size(); ++i) {
    *read.Tensors()[i] = *image.Tensors()[i];
  }
  table.MoveToDevice(kA, read);
  EXPECT_TRUE(table.Find(kA)->latest()->weights_N.is_meta());
}

TEST_F(AdapterTableTest, AnAdapterLeavesABorrowedVersionAsItIs) {
  table_.Create(kA, {.rank = 2, .seed = 3});
  table_.MoveToHost(kA, table_.Image(kA));
  const auto borrowed = table_.Borrow(kA, "", table_.Image(kA)).value();
  const std::vector<float> weights = borrowed->HostWeights();
  EXPECT_EQ(table_.OnDevice(borrowed), borrowed);
  table_.MoveToDevice(kA, table_.Image(kA));
  Step(kA);
  EXPECT_EQ(borrowed->HostWeights(), weights);
}

TEST_F(AdapterTableTest, AReleasedSnapshotFreesItsHostMemory) {
  table_.Create(kA, {.rank = 2});
  ASSERT_THAT(table_.PublishSnapshot(kA, "s"), IsOk());
  ASSERT_THAT(table_.PublishSnapshot(kA, "t"), IsOk());
  Step(kA);
  table_.MoveToHost(kA, table_.Image(kA));
  const uint64_t n = table_.Facts(kA).info.num_parameters;
  ASSERT_THAT(table_.ReleaseSnapshot(kA, "s"), IsOk());
  EXPECT_EQ(table_.ImageBytes(kA), 20 * n) << "t needs it";
  ASSERT_THAT(table_.ReleaseSnapshot(kA, "t"), IsOk());
  EXPECT_EQ(table_.ImageBytes(kA), 16 * n);
}

}  // namespace
}  // namespace weft::engine::adapter_table_test
