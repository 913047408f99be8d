#include "src/engine/kv_pool.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "tests/model/tiny_model.h"

namespace weft::engine {
namespace {

using ::weft::testing::TinyConfig;

// Two layers of keys and values, 16 tokens, 2 heads of 8 features, f32.
constexpr int64_t kTinyPageBytes = 2 * 2 * 16 * 2 * 8 * 4;

KvPool MakePool(int64_t pages) {
  return {TinyConfig(), pages * kTinyPageBytes, at::kFloat, at::kCPU};
}

TEST(KvPoolTest, HasAsManyPagesAsFit) {
  EXPECT_EQ(MakePool(3).bytes_per_page(), kTinyPageBytes);
  EXPECT_EQ(MakePool(3).num_pages(), 3);
  const KvPool rounded(TinyConfig(), 4 * kTinyPageBytes - 1, at::kFloat,
                       at::kCPU);
  EXPECT_EQ(rounded.num_pages(), 3);
  const KvPool half(TinyConfig(), 3 * kTinyPageBytes, at::kBFloat16, at::kCPU);
  EXPECT_EQ(half.num_pages(), 6);
}

TEST(KvPoolTest, HasAPageHoweverFewBytesThereAre) {
  EXPECT_EQ(MakePool(0).num_pages(), 1);
}

TEST(KvPoolTest, CountsPagesOfAPartFilledLastPage) {
  EXPECT_EQ(KvPool::PagesFor(0), 0);
  EXPECT_EQ(KvPool::PagesFor(1), 1);
  EXPECT_EQ(KvPool::PagesFor(16), 1);
  EXPECT_EQ(KvPool::PagesFor(17), 2);
}

TEST(KvPoolTest, GivesAllTokensOrNone) {
  KvPool pool = MakePool(3);
  std::optional<kv::SequencePages> two = pool.Allocate(20);
  ASSERT_TRUE(two.has_value());
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_FALSE(pool.Allocate(17).has_value());
  EXPECT_EQ(pool.free_pages(), 1);
  two.reset();
  EXPECT_EQ(pool.free_pages(), 3);
}

TEST(KvPoolTest, AForkSharesFullPagesAndCopiesTheLast) {
  KvPool pool = MakePool(6);
  const std::optional<kv::SequencePages> source = pool.Allocate(20);
  ASSERT_TRUE(source.has_value());
  for (auto* pages : {&pool.store().k_pages_PSKC, &pool.store().v_pages_PSKC}) {
    for (at::Tensor& layer : *pages) layer.copy_(at::randn(layer.sizes()));
  }
  const std::optional<kv::SequencePages> fork = pool.Fork(*source, 40);
  ASSERT_TRUE(fork.has_value());
  EXPECT_EQ(fork->num_tokens(), 40);
  EXPECT_EQ(fork->pages()[0], source->pages()[0]);
  EXPECT_NE(fork->pages()[1], source->pages()[1]);
  EXPECT_EQ(pool.free_pages(), 2);
  for (auto* pages : {&pool.store().k_pages_PSKC, &pool.store().v_pages_PSKC}) {
    for (const at::Tensor& layer : *pages) {
      EXPECT_TRUE(at::equal(layer[fork->pages()[1]].slice(0, 0, 4),
                            layer[source->pages()[1]].slice(0, 0, 4)));
    }
  }
}

TEST(KvPoolTest, AForkThatHasNoRoomTakesNothing) {
  KvPool pool = MakePool(4);
  const std::optional<kv::SequencePages> source = pool.Allocate(20);
  ASSERT_TRUE(source.has_value());
  // One page for the copy and three more: there are two.
  EXPECT_FALSE(pool.Fork(*source, 65).has_value());
  EXPECT_EQ(pool.free_pages(), 2);
  EXPECT_TRUE(pool.Fork(*source, 48).has_value());
}

}  // namespace
}  // namespace weft::engine
