#include "src/engine/decode/kv_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::engine {
namespace {

constexpr uint64_t kBase = 0;  // Version of the base model's weights.
constexpr int64_t kPageBytes = 4096;
constexpr int kMaxSequences = 4;

// Makes a pool. `copies` collects the copies of pages.
KvPool MakePool(int64_t pages, std::vector<PageCopy>* copies = nullptr) {
  return {
      {.page = kPageBytes}, {.pages = pages}, [copies](const CacheCopy& copy) {
        if (copies == nullptr) return;
        copies->push_back(std::get<PageCopy>(copy));
      }};
}

TEST(KvPoolTest, HasAsManyPagesAsFit) {
  EXPECT_EQ(MakePool(3).bytes_per_page(), kPageBytes);
  EXPECT_EQ(MakePool(3).num_pages(), 3);
  const CacheUnits pages = {.page = kPageBytes};
  EXPECT_EQ(CountsIn(pages, 4 * kPageBytes - 1, kMaxSequences).pages, 3);
  EXPECT_EQ(CountsIn(pages, 0, kMaxSequences).pages, 1);
  EXPECT_EQ(CountsIn(pages, kPageBytes, kMaxSequences).states, 0);
  EXPECT_EQ(BytesFor(pages, 3, kMaxSequences), 3 * kPageBytes);
}

TEST(KvPoolTest, DividesTheBytesBetweenPagesAndStates) {
  const CacheUnits units = {.page = 10, .state = 100};
  // A prompt, a sample and the padding have states however few bytes there are.
  EXPECT_EQ(CountsIn(units, 0, kMaxSequences).states, 3);
  EXPECT_EQ(CountsIn(units, 0, kMaxSequences).pages, 1);
  EXPECT_EQ(CountsIn(units, 1000, kMaxSequences).states, 5);
  EXPECT_EQ(CountsIn(units, 1000, kMaxSequences).pages, 50);
  EXPECT_EQ(CountsIn(units, 10'000, kMaxSequences).states, 9);
  EXPECT_EQ(CountsIn(units, 10'000, kMaxSequences).pages, 910);
  for (const int64_t pages : {1, 20, 30, 31, 57, 89, 90, 91, 1000}) {
    const int64_t bytes = BytesFor(units, pages, kMaxSequences);
    EXPECT_GE(CountsIn(units, bytes, kMaxSequences).pages, pages);
  }
}

TEST(KvPoolTest, CountsPagesOfAPartFilledLastPage) {
  EXPECT_EQ(KvPool::PagesFor(0), 0);
  EXPECT_EQ(KvPool::PagesFor(1), 1);
  EXPECT_EQ(KvPool::PagesFor(16), 1);
  EXPECT_EQ(KvPool::PagesFor(17), 2);
}

// Returns an empty sequence with room for `count` tokens.
dispatch::SequencePages Sequence(KvPool& pool, int64_t count) {
  dispatch::SequencePages sequence = pool.Begin(kBase, {});
  EXPECT_TRUE(pool.Append(sequence, count));
  return sequence;
}

TEST(KvPoolTest, GivesAllTokensOrNone) {
  KvPool pool = MakePool(3);
  dispatch::SequencePages two = Sequence(pool, 20);
  EXPECT_EQ(pool.available_pages(), 1);
  dispatch::SequencePages other = pool.Begin(kBase, {});
  EXPECT_FALSE(pool.Append(other, 17));
  EXPECT_EQ(pool.available_pages(), 1);
  EXPECT_TRUE(pool.Append(two, 12));  // The last page of `two` has room for the
                                      // 12 tokens.
  EXPECT_EQ(pool.available_pages(), 1);
  two.Release();
  EXPECT_EQ(pool.available_pages(), 3);
}

TEST(KvPoolTest, AForkSharesFullPagesAndCopiesTheLast) {
  std::vector<PageCopy> copies;
  KvPool pool = MakePool(6, &copies);
  const dispatch::SequencePages source = Sequence(pool, 20);
  const std::optional<dispatch::SequencePages> fork = pool.Fork(source);
  ASSERT_TRUE(fork.has_value());
  EXPECT_EQ(fork->num_tokens(), 20);
  EXPECT_EQ(fork->pages()[0], source.pages()[0]);
  EXPECT_NE(fork->pages()[1], source.pages()[1]);
  EXPECT_EQ(pool.available_pages(), 3);
  EXPECT_EQ(copies, std::vector<PageCopy>({{.from = source.pages()[1],
                                            .to = fork->pages()[1],
                                            .num_rows = 4}}));
}

TEST(KvPoolTest, AForkThatHasNoRoomTakesNothing) {
  KvPool pool = MakePool(4);
  const dispatch::SequencePages source = Sequence(pool, 20);
  dispatch::SequencePages other = Sequence(pool, 32);
  EXPECT_FALSE(pool.Fork(source).has_value());
  EXPECT_EQ(pool.available_pages(), 0);
  other.Release();
  EXPECT_TRUE(pool.Fork(source).has_value());
}

// Caches the prefix of a new sequence and then ends the sequence.
void RememberNew(KvPool& pool, uint64_t version,
                 const std::vector<int32_t>& tokens) {
  dispatch::SequencePages sequence =
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
    const dispatch::SequencePages two = Sequence(pool, 32);
    EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 16);
    dispatch::SequencePages rest = pool.Begin(kBase, {});
    EXPECT_TRUE(pool.Append(rest, 1));
    EXPECT_EQ(pool.prefix_pages(), 0);
  }
  EXPECT_EQ(pool.available_pages(), 3);
}

TEST(KvPoolTest, AForkEvictsForItsCopy) {
  KvPool pool = MakePool(2);
  RememberNew(pool, kBase, std::vector<int32_t>(16, 7));
  const dispatch::SequencePages source = Sequence(pool, 5);
  EXPECT_TRUE(pool.Fork(source).has_value());
  EXPECT_EQ(pool.prefix_pages(), 0);
}

// A pool of `pages` pages and `states` states beside the padding's. `copies`
// collects the copies of states.
KvPool MakeStatePool(int64_t pages, int64_t states,
                     std::vector<StateCopy>* copies) {
  return {{.page = kPageBytes, .state = kPageBytes},
          {.pages = pages, .states = states + 1},
          [copies](const CacheCopy& copy) {
            const auto* const state = std::get_if<StateCopy>(&copy);
            if (state != nullptr) copies->push_back(*state);
          }};
}

// Returns a sequence that begins with the cached prefix of `tokens` and has
// room for all of them.
dispatch::SequencePages WithState(KvPool& pool,
                                  const std::vector<int32_t>& tokens) {
  dispatch::SequencePages sequence = pool.Begin(kBase, tokens);
  EXPECT_TRUE(pool.Append(
      sequence, static_cast<int64_t>(tokens.size()) - sequence.num_tokens()));
  EXPECT_TRUE(pool.TakeState(sequence));
  return sequence;
}

// As RememberNew, for a sequence that gives its state to the cache.
void RememberWithState(KvPool& pool, const std::vector<int32_t>& tokens) {
  dispatch::SequencePages sequence = WithState(pool, tokens);
  pool.CachePrefix(kBase, tokens, sequence);
  pool.CacheState(kBase, tokens, sequence, /*ends=*/true);
}

TEST(KvStateTest, ANewSequenceBeginsWithZeros) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(4, 2, &copies);
  EXPECT_EQ(pool.num_states(), 2);
  const dispatch::SequencePages sequence = WithState(pool, {1, 2, 3});
  EXPECT_NE(*sequence.state().id(), kPaddingState);
  EXPECT_EQ(copies, std::vector<StateCopy>({{.to = *sequence.state().id()}}));
  EXPECT_EQ(pool.available_states(), 1);
}

TEST(KvStateTest, AForkCopiesTheState) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(4, 2, &copies);
  const dispatch::SequencePages source = WithState(pool, {1, 2, 3});
  {
    const std::optional<dispatch::SequencePages> fork = pool.Fork(source);
    ASSERT_TRUE(fork.has_value());
    EXPECT_EQ(copies.back(), (StateCopy{.from = *source.state().id(),
                                        .to = *fork->state().id()}));
    EXPECT_FALSE(pool.HasRoomForState(source));
    EXPECT_FALSE(pool.Fork(source).has_value());
    EXPECT_EQ(pool.available_pages(), 2);
  }
  EXPECT_TRUE(pool.Fork(source).has_value());
}

TEST(KvStateTest, APrefixIsFoundWithACopyOfItsState) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(6, 3, &copies);
  const std::vector<int32_t> tokens(40, 7);
  const std::vector<int32_t> cached(32, 7);
  StateId kept = 0;
  {
    dispatch::SequencePages first = WithState(pool, tokens);
    pool.CachePrefix(kBase, cached, first);
    EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 0);
    pool.CacheState(kBase, cached, first, /*ends=*/false);
    EXPECT_EQ(copies.back().from, first.state().id());
    kept = copies.back().to;
    pool.CacheState(kBase, cached, first, /*ends=*/false);
    EXPECT_EQ(copies.size(), 2u);  // It is cached already.
  }
  EXPECT_EQ(pool.Begin(kBase, std::vector<int32_t>(31, 7)).num_tokens(), 0);
  dispatch::SequencePages again = pool.Begin(kBase, tokens);
  EXPECT_EQ(again.num_tokens(), 32);
  EXPECT_TRUE(pool.TakeState(again));
  EXPECT_EQ(copies.back(),
            (StateCopy{.from = kept, .to = *again.state().id()}));
}

TEST(KvStateTest, ASequenceThatEndsGivesItsState) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(6, 2, &copies);
  const std::vector<int32_t> tokens(16, 7);
  RememberWithState(pool, tokens);
  EXPECT_EQ(copies.size(), 1u);
  EXPECT_EQ(pool.available_states(), 2);
  const dispatch::SequencePages next =
      pool.Begin(kBase, std::vector<int32_t>(17, 7));
  EXPECT_EQ(next.num_tokens(), 16);
  EXPECT_EQ(next.state().id(), copies.front().to);
}

TEST(KvStateTest, CachedStatesGiveWayButNotThoseThatASequenceBeginsWith) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(6, 2, &copies);
  const std::vector<int32_t> tokens(16, 7);
  RememberWithState(pool, tokens);
  dispatch::SequencePages next = pool.Begin(kBase, tokens);
  EXPECT_EQ(pool.available_states(), 1);
  dispatch::SequencePages other = WithState(pool, {1, 2});
  EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 16);
  other.Release();
  EXPECT_TRUE(pool.TakeState(next));
  other = WithState(pool, {1, 2});
  EXPECT_EQ(pool.available_states(), 0);
  EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 0);  // It gave way.
}

// With no slot for a copy, a sequence takes the state of its prefix.
TEST(KvStateTest, TheOnlyUserOfACachedStateMayTakeIt) {
  std::vector<StateCopy> copies;
  KvPool pool = MakeStatePool(6, 2, &copies);
  const std::vector<int32_t> tokens(16, 7);
  RememberWithState(pool, tokens);
  const dispatch::SequencePages other = WithState(pool, {1, 2});
  dispatch::SequencePages next = pool.Begin(kBase, tokens);
  {
    const dispatch::SequencePages equal = pool.Begin(kBase, tokens);
    EXPECT_FALSE(pool.HasRoomForState(next));
    EXPECT_FALSE(pool.TakeState(next));
  }
  const size_t num_copies = copies.size();
  EXPECT_TRUE(pool.HasRoomForState(next));
  EXPECT_TRUE(pool.TakeState(next));
  EXPECT_EQ(next.num_tokens(), 16);
  EXPECT_EQ(next.state().id(), copies.front().to);
  EXPECT_EQ(copies.size(), num_copies);
  // The state is the sequence's own, and the cache has it no more.
  EXPECT_FALSE(pool.HasRoomForState(next));
  EXPECT_EQ(pool.Begin(kBase, tokens).num_tokens(), 0);
  next.Release();
  EXPECT_EQ(pool.available_states(), 1);
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
