#include "src/engine/adapter_table.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using enum absl::StatusCode;

constexpr lora::ModelShape kShape = {.num_layers = 1,
                                     .hidden = 6,
                                     .q_width = 8,
                                     .kv_width = 4,
                                     .ffn = 10,
                                     .vocab = 12};

class AdapterTableTest : public ::testing::Test {
 protected:
  // What an optimizer step does.
  void Step(const std::string& id) {
    lora::Adapter* adapter = table_.Find(id);
    at::Tensor next = adapter->NextWeights();
    next.fill_(static_cast<double>(adapter->optim_steps() + 1));
    adapter->FinishStep(next);
    table_.Publish(id, adapter->optim_steps());
  }

  AdapterTable table_{kShape, at::kFloat, at::kCPU, /*max_adapters=*/3,
                      /*max_per_tenant=*/2};
};

TEST_F(AdapterTableTest, FindsWhatWasCreated) {
  const absl::StatusOr<lora::Adapter*> created =
      table_.Create("a", "tenant", {.rank = 2});
  ASSERT_THAT(created, IsOk());
  EXPECT_EQ(table_.Find("a"), *created);
  EXPECT_EQ(table_.Find("b"), nullptr);
  EXPECT_EQ(table_.Find(""), nullptr);
}

TEST_F(AdapterTableTest, RefusesASecondOfTheSameName) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  EXPECT_THAT(table_.Create("a", "tenant", {.rank = 4}),
              IsStatus(kAlreadyExists, "'a'"));
  EXPECT_EQ(table_.Find("a")->config().rank, 2);
}

TEST_F(AdapterTableTest, RefusesMoreThanItsSlotsUntilOneIsFree) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.Create("b", "tenant", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.Create("c", "another", {.rank = 2}), IsOk());
  EXPECT_THAT(table_.Create("d", "another", {.rank = 2}),
              IsStatus(kResourceExhausted, "all 3 adapter slots"));
  EXPECT_TRUE(table_.Erase("a"));
  EXPECT_THAT(table_.Create("d", "another", {.rank = 2}), IsOk());
}

TEST_F(AdapterTableTest, RefusesATenantMoreThanItsSlotsUntilOneIsFree) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.Create("b", "tenant", {.rank = 2}), IsOk());
  EXPECT_THAT(table_.Create("c", "tenant", {.rank = 2}),
              IsStatus(kResourceExhausted,
                       "all 2 adapter slots of tenant 'tenant' are in use "
                       "(--max-adapters-per-tenant)"));
  EXPECT_THAT(table_.Info("c"), IsStatus(kNotFound, "'c'"));
  EXPECT_TRUE(table_.Erase("a"));
  ASSERT_THAT(table_.Create("c", "tenant", {.rank = 2}), IsOk());
  EXPECT_EQ(table_.Info("c")->tenant, "tenant");
}

TEST_F(AdapterTableTest, ErasesOnceAndForgetsTheFacts) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  EXPECT_TRUE(table_.Erase("a"));
  EXPECT_FALSE(table_.Erase("a"));
  EXPECT_THAT(table_.Info("a"), IsStatus(kNotFound, "'a'"));
  EXPECT_THAT(table_.Infos(), IsEmpty());
  EXPECT_EQ(table_.resident_bytes(), 0u);
  // A result that comes after the end must not bring the facts back.
  table_.Publish("a", 3);
  EXPECT_THAT(table_.Infos(), IsEmpty());
}

TEST_F(AdapterTableTest, TellsTheFactsOfTheLastPublish) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2, .alpha = 6}), IsOk());
  Step("a");
  table_.Publish("a", 41);
  const absl::StatusOr<AdapterInfo> info = table_.Info("a");
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->adapter_id, "a");
  EXPECT_EQ(info->config.alpha, 6);
  EXPECT_EQ(info->last_step, 41u);
  EXPECT_EQ(info->optim_steps, 1u);
  EXPECT_EQ(info->version, 2u);
  EXPECT_EQ(info->num_parameters,
            static_cast<uint64_t>(table_.Find("a")->layout().num_parameters()));
  EXPECT_EQ(info->resident_bytes, info->num_parameters * 20);
}

TEST_F(AdapterTableTest, SumsTheBytesOfAllAdapters) {
  ASSERT_THAT(table_.Create("b", "tenant", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 4}), IsOk());
  const std::vector<AdapterInfo> infos = table_.Infos();
  ASSERT_EQ(infos.size(), 2u);
  EXPECT_EQ(infos[0].adapter_id, "a");
  EXPECT_EQ(infos[0].resident_bytes, 2 * infos[1].resident_bytes);
  EXPECT_EQ(table_.resident_bytes(), 3 * infos[1].resident_bytes);
}

TEST_F(AdapterTableTest, ASnapshotKeepsItsWeightsThroughSteps) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2, .seed = 3}), IsOk());
  const std::vector<float> weights = table_.Find("a")->latest()->HostWeights();
  EXPECT_THAT(table_.PublishSnapshot("a", "first"), IsOkAndHolds(1));
  Step("a");
  Step("a");
  EXPECT_EQ((*table_.Version("a", "first"))->HostWeights(), weights);
  EXPECT_EQ((*table_.Version("a", ""))->number, 3u);
  EXPECT_THAT(table_.Info("a")->snapshots, ElementsAre("first"));
}

TEST_F(AdapterTableTest, PublishingTheSameVersionAgainIsNoError) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  EXPECT_THAT(table_.PublishSnapshot("a", "s"), IsOkAndHolds(1));
  EXPECT_THAT(table_.PublishSnapshot("a", "s"), IsOkAndHolds(1));
  Step("a");
  EXPECT_THAT(table_.PublishSnapshot("a", "s"),
              IsStatus(kAlreadyExists, "pins version 1"));
  EXPECT_THAT(table_.ReleaseSnapshot("a", "s"), IsOk());
  EXPECT_THAT(table_.PublishSnapshot("a", "s"), IsOkAndHolds(2));
}

TEST_F(AdapterTableTest, RefusesSnapshotsThatAreNotThere) {
  EXPECT_THAT(table_.PublishSnapshot("a", "s"), IsStatus(kNotFound, "'a'"));
  EXPECT_THAT(table_.ReleaseSnapshot("a", "s"), IsStatus(kNotFound, "'a'"));
  EXPECT_THAT(table_.Version("a", ""), IsStatus(kNotFound, "'a'"));
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2}), IsOk());
  EXPECT_THAT(table_.ReleaseSnapshot("a", "s"), IsStatus(kNotFound, "'s'"));
  EXPECT_THAT(table_.Version("a", "s"), IsStatus(kNotFound, "'s'"));
}

TEST_F(AdapterTableTest, APinnedVersionOutlivesItsAdapter) {
  ASSERT_THAT(table_.Create("a", "tenant", {.rank = 2, .seed = 3}), IsOk());
  const absl::StatusOr<lora::AdapterVersionPtr> pinned =
      table_.Version("a", "");
  ASSERT_THAT(pinned, IsOk());
  const std::vector<float> weights = (*pinned)->HostWeights();
  EXPECT_TRUE(table_.Erase("a"));
  EXPECT_EQ((*pinned)->HostWeights(), weights);
}

TEST_F(AdapterTableTest, AnAdapterIsOnTheDeviceOnTheHostOrOnDisk) {
  ASSERT_THAT(table_.Create("a", "a", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.PublishSnapshot("a", "old"), IsOk());
  ASSERT_THAT(table_.PublishSnapshot("a", "same"), IsOk());
  Step("a");
  const uint64_t n = table_.Info("a")->num_parameters;
  EXPECT_EQ(table_.ImageBytes("a"), 20 * n) << "two versions";
  table_.MoveToHost("a", table_.Image("a"));
  EXPECT_EQ(table_.Find("a"), nullptr);
  EXPECT_EQ(table_.resident_bytes(), 0u);
  EXPECT_EQ(table_.Info("a")->location, AdapterLocation::kHost);
  lora::AdapterImage image = table_.Image("a");
  table_.MoveToDisk("a", image, "file");
  EXPECT_EQ(table_.File("a"), "file");
  EXPECT_EQ(table_.Info("a")->location, AdapterLocation::kDisk);
  EXPECT_FALSE(table_.Image("a").gradient_N.defined());
  table_.MoveToDevice("a", image);
  EXPECT_EQ(table_.File("a"), "");
  EXPECT_EQ(table_.Info("a")->location, AdapterLocation::kDevice);
  EXPECT_EQ(table_.Version("a", "")->get()->number, 2u);
  EXPECT_EQ(table_.Version("a", "old")->get()->number, 1u);
  EXPECT_EQ(*table_.Version("a", "old"), *table_.Version("a", "same"));
}

TEST_F(AdapterTableTest, AReleasedSnapshotFreesItsHostMemory) {
  ASSERT_THAT(table_.Create("a", "a", {.rank = 2}), IsOk());
  ASSERT_THAT(table_.PublishSnapshot("a", "s"), IsOk());
  ASSERT_THAT(table_.PublishSnapshot("a", "t"), IsOk());
  Step("a");
  table_.MoveToHost("a", table_.Image("a"));
  const uint64_t n = table_.Info("a")->num_parameters;
  ASSERT_THAT(table_.ReleaseSnapshot("a", "s"), IsOk());
  EXPECT_EQ(table_.ImageBytes("a"), 20 * n) << "t needs it";
  ASSERT_THAT(table_.ReleaseSnapshot("a", "t"), IsOk());
  EXPECT_EQ(table_.ImageBytes("a"), 16 * n);
}

}  // namespace
}  // namespace weft::engine
