#include "src/engine/kv_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::engine {
namespace {

constexpr uint64_t kBase = 0;  // Version of the base model's weights.
constexpr int64_t kPageBytes = 4096;

// Makes a pool. `copies` collects the copies of pages.
KvPool MakePool(int64_t pages, std::vector<kv::PageCopy>* copies = nullptr) {
  return {kPageBytes, pages * kPageBytes, [copies](const kv::PageCopy& copy) {
            if (copies != nullptr) copies->push_back(copy);
          }};
}

TEST(KvPoolTest, HasAsManyPagesAsFit) {
  EXPECT_EQ(MakePool(3).bytes_per_page(), kPageBytes);
  EXPECT_EQ(MakePool(3).num_pages(), 3);
  const KvPool rounded(kPageBytes, 4 * kPageBytes - 1, nullptr);
  EXPECT_EQ(rounded.num_pages(), 3);
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

// Returns an empty sequence with room for `count` tokens.
kv::SequencePages Sequence(KvPool& pool, int64_t count) {
  kv::SequencePages sequence = pool.Begin(kBase, {});
  EXPECT_TRUE(pool.Append(sequence, count));
  return sequence;
}

TEST(KvPoolTest, GivesAllTokensOrNone) {
  KvPool pool = MakePool(3);
  kv::SequencePages two = Sequence(pool, 20);
  EXPECT_EQ(pool.available_pages(), 1);
  kv::SequencePages other = pool.Begin(kBase, {});
  EXPECT_FALSE(pool.Append(other, 17));
  EXPECT_EQ(pool.available_pages(), 1);
  EXPECT_TRUE(pool.Append(two, 12));  // The last page of `two` has room for the
                                      // 12 tokens.
  EXPECT_EQ(pool.available_pages(), 1);
  two.Release();
  EXPECT_EQ(pool.available_pages(), 3);
}

TEST(KvPoolTest, AForkSharesFullPagesAndCopiesTheLast) {
  std::vector<kv::PageCopy> copies;
  KvPool pool = MakePool(6, &copies);
  const kv::SequencePages source = Sequence(pool, 20);
  const std::optional<kv::SequencePages> fork = pool.Fork(source);
  ASSERT_TRUE(fork.has_value());
  EXPECT_EQ(fork->num_tokens(), 20);
  EXPECT_EQ(fork->pages()[0], source.pages()[0]);
  EXPECT_NE(fork->pages()[1], source.pages()[1]);
  EXPECT_EQ(pool.available_pages(), 3);
  EXPECT_EQ(copies, std::vector<kv::PageCopy>({{.from = source.pages()[1],
                                                .to = fork->pages()[1],
                                                .num_rows = 4}}));
}

TEST(KvPoolTest, AForkThatHasNoRoomTakesNothing) {
  KvPool pool = MakePool(4);
  const kv::SequencePages source = Sequence(pool, 20);
  kv::SequencePages other = Sequence(pool, 32);
  EXPECT_FALSE(pool.Fork(source).has_value());
  EXPECT_EQ(pool.available_pages(), 0);
  other.Release();
  EXPECT_TRUE(pool.Fork(source).has_value());
}

// Caches the prefix of a new sequence and then ends the sequence.
void RememberNew(KvPool& pool, uint64_t version,
                 const std::vector<int32_t>& tokens) {
  kv::SequencePages sequence =
      Sequence(pool, static_cast<int64_t>(tokens.size()));
  pool.CachePrefix(version, tokens, sequence);
}

TEST(KvPoolTest, RememberedPagesAreFoundUntilOthersNeedThem) {
  KvPool pool = MakePool(3);
  const std::vector<int32_t> tokens(40, 7);
  RememberNew(pool, kBase, tokens);
  EXPECT_EQ(pool.prefix_pages(), 2);
  EXPECT_EQ(pool.available_pages(), 3);
  EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 32);
  EXPECT_EQ(pool.Begin(/*version=*/1, tokens).num_tokens(), 0);
  {
    const kv::SequencePages two = Sequence(pool, 32);
    EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 16);
    kv::SequencePages rest = pool.Begin(kBase, {});
    EXPECT_TRUE(pool.Append(rest, 1));
    EXPECT_EQ(pool.prefix_pages(), 0);
  }
  EXPECT_EQ(pool.available_pages(), 3);
}

TEST(KvPoolTest, AForkEvictsForItsCopy) {
  KvPool pool = MakePool(2);
  RememberNew(pool, kBase, std::vector<int32_t>(16, 7));
  const kv::SequencePages source = Sequence(pool, 5);
  EXPECT_TRUE(pool.Fork(source).has_value());
  EXPECT_EQ(pool.prefix_pages(), 0);
}

TEST(KvPoolTest, ForgetsAVersion) {
  KvPool pool = MakePool(2);
  const std::vector<int32_t> tokens(16, 7);
  RememberNew(pool, /*version=*/1, tokens);
  pool.Forget(1);
  EXPECT_EQ(pool.Begin(/*version=*/1, tokens).num_tokens(), 0);
  EXPECT_EQ(pool.prefix_pages(), 0);
}

}  // namespace
}  // namespace weft::engine
