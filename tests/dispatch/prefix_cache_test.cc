#include "src/dispatch/prefix_cache.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/dispatch/sequence_pages.h"

namespace weft::dispatch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Tokens = std::vector<int32_t>;

constexpr int32_t kPageSize = 2;
constexpr uint64_t kBase = 0;

class PrefixCacheTest : public ::testing::Test {
 protected:
  // Returns a sequence of `tokens`. The sequence begins with the pages that the
  // cache finds for `tokens`.
  SequencePages Start(uint64_t version, const Tokens& tokens) {
    SequencePages sequence(&allocator_, kPageSize,
                           cache_.Lookup(version, tokens).pages);
    const auto count = static_cast<int64_t>(tokens.size());
    EXPECT_TRUE(sequence.AppendMany(count - sequence.num_tokens()));
    return sequence;
  }

  // Computes the tokens, caches them and releases the sequence. Returns the
  // pages of the sequence.
  std::vector<PageId> Run(uint64_t version, const Tokens& tokens) {
    SequencePages sequence = Start(version, tokens);
    cache_.Insert(version, tokens, sequence);
    return sequence.pages();
  }

  explicit PrefixCacheTest(bool has_states = false)
      : cache_(&allocator_, kPageSize, has_states ? &states_ : nullptr) {}

  PageAllocator allocator_{8};
  PageAllocator states_{2};
  PrefixCache cache_;
};

TEST_F(PrefixCacheTest, FindsTheLongestPrefixInWholePages) {
  const std::vector<PageId> pages = Run(kBase, {1, 2, 3, 4, 5});
  EXPECT_EQ(cache_.num_pages(), 2);
  EXPECT_THAT(cache_.Lookup(kBase, {1, 2, 3, 4, 5, 6}).pages,
              ElementsAre(pages[0], pages[1]));
  EXPECT_THAT(cache_.Lookup(kBase, {1, 2, 3}).pages, ElementsAre(pages[0]));
  EXPECT_THAT(cache_.Lookup(kBase, {1, 2, 3, 5}).pages, ElementsAre(pages[0]));
  EXPECT_THAT(cache_.Lookup(kBase, {1}).pages, IsEmpty());
  EXPECT_THAT(cache_.Lookup(kBase, {2, 1, 3, 4}).pages, IsEmpty());
}

// The keys and values of a token depend on the tokens before it.
TEST_F(PrefixCacheTest, APageIsFoundOnlyAfterThePagesBeforeIt) {
  const std::vector<PageId> first = Run(kBase, {1, 1, 2, 2});
  const std::vector<PageId> second = Run(kBase, {3, 3, 2, 2});
  EXPECT_NE(first[1], second[1]);
  EXPECT_THAT(cache_.Lookup(kBase, {3, 3, 2, 2}).pages,
              ElementsAre(second[0], second[1]));
  EXPECT_THAT(cache_.Lookup(kBase, {2, 2}).pages, IsEmpty());
}

TEST_F(PrefixCacheTest, VersionsKnowNothingOfEachOther) {
  const std::vector<PageId> base = Run(kBase, {1, 2});
  EXPECT_THAT(cache_.Lookup(7, {1, 2}).pages, IsEmpty());
  const std::vector<PageId> other = Run(7, {1, 2});
  EXPECT_NE(base[0], other[0]);
  cache_.DropVersion(7);
  EXPECT_THAT(cache_.Lookup(7, {1, 2}).pages, IsEmpty());
  EXPECT_THAT(cache_.Lookup(kBase, {1, 2}).pages, ElementsAre(base[0]));
}

TEST_F(PrefixCacheTest, KeptPagesAreIdleNotFree) {
  {
    SequencePages sequence = Start(kBase, {1, 2, 3, 4, 5});
    cache_.Insert(kBase, {1, 2, 3, 4, 5}, sequence);
    EXPECT_EQ(allocator_.num_idle(), 0);
    EXPECT_EQ(allocator_.num_used(), 3);
  }
  EXPECT_EQ(allocator_.num_idle(), 2);
  EXPECT_EQ(allocator_.num_used(), 0);
  const SequencePages again = Start(kBase, {1, 2, 3, 4});
  EXPECT_EQ(allocator_.num_idle(), 0);
  EXPECT_EQ(allocator_.num_used(), 2);
}

TEST_F(PrefixCacheTest, EvictsTheLeastRecentlyUsedLeafFirst) {
  Run(kBase, {1, 1, 2, 2});
  Run(kBase, {1, 1, 3, 3});
  Run(kBase, {4, 4});
  (void)cache_.Lookup(kBase, {1, 1, 2, 2});  // {3, 3} is now the oldest.
  EXPECT_EQ(cache_.Evict(1), 1);
  EXPECT_EQ(cache_.Lookup(kBase, {4, 4}).pages.size(), 1u);
  EXPECT_EQ(cache_.Evict(1),
            1);  // Evicts {2, 2}, whose parent is as old but not a leaf.
  EXPECT_EQ(cache_.Lookup(kBase, {4, 4}).pages.size(), 1u);
  EXPECT_EQ(cache_.Lookup(kBase, {1, 1, 2, 2}).pages.size(), 1u);
  EXPECT_EQ(cache_.Evict(9), 2);
  EXPECT_EQ(cache_.num_pages(), 0);
  EXPECT_EQ(allocator_.num_free(), 8);
}

TEST_F(PrefixCacheTest, NeverEvictsWhatASequenceUses) {
  SequencePages sequence = Start(kBase, {1, 1, 2, 2});
  cache_.Insert(kBase, {1, 1, 2, 2}, sequence);
  Run(kBase, {1, 1, 3, 3});
  EXPECT_EQ(cache_.Evict(9), 1);
  EXPECT_THAT(cache_.Lookup(kBase, {1, 1, 2, 2}).pages,
              ElementsAre(sequence.pages()[0], sequence.pages()[1]));
}

TEST_F(PrefixCacheTest, ADroppedVersionKeepsThePagesOfRunningSequences) {
  {
    SequencePages sequence = Start(7, {1, 1, 2, 2});
    cache_.Insert(7, {1, 1, 2, 2}, sequence);
    cache_.DropVersion(7);
    EXPECT_EQ(cache_.num_pages(), 0);
    EXPECT_EQ(allocator_.num_used(), 2);
  }
  EXPECT_EQ(allocator_.num_free(), 8);
}

// Two sequences computed the same tokens at the same time.
TEST_F(PrefixCacheTest, TheFirstPageWithTheSameTokensIsSharedByBoth) {
  SequencePages first = Start(kBase, {1, 1, 2, 2});
  SequencePages second = Start(kBase, {1, 1, 2, 2, 3, 3, 4});
  const std::vector<PageId> own = second.pages();
  cache_.Insert(kBase, {1, 1, 2, 2}, first);
  cache_.Insert(kBase, {1, 1, 2, 2, 3, 3, 4}, second);
  EXPECT_THAT(second.pages(),
              ElementsAre(first.pages()[0], first.pages()[1], own[2], own[3]));
  EXPECT_THAT(cache_.Lookup(kBase, {1, 1, 2, 2, 3, 3}).pages,
              ElementsAre(first.pages()[0], first.pages()[1], own[2]));
  EXPECT_EQ(allocator_.num_used(), 4);
  EXPECT_EQ(allocator_.num_free(), 4);
  // `second` still uses the pages that both shared.
  first.Release();
  EXPECT_EQ(allocator_.num_idle(), 0);
}

class PrefixStateTest : public PrefixCacheTest {
 protected:
  PrefixStateTest() : PrefixCacheTest(/*has_states=*/true) {}

  // Caches the tokens, and the state after them unless there is one or no slot
  // is free.
  void RunWithState(uint64_t version, const Tokens& tokens) {
    SequencePages sequence = Start(version, tokens);
    cache_.Insert(version, tokens, sequence);
    const StateSlot state = StateSlot::Allocate(&states_);
    if (state.id() && cache_.LacksState(version, tokens)) {
      cache_.InsertState(version, tokens, *state.id());
    }
  }
};

TEST_F(PrefixStateTest, APrefixEndsWhereThereIsAState) {
  RunWithState(kBase, {1, 1, 2, 2});
  EXPECT_FALSE(cache_.LacksState(kBase, {1, 1, 2, 2}));
  EXPECT_TRUE(cache_.LacksState(kBase, {1, 1}));
  EXPECT_FALSE(cache_.LacksState(kBase, {1, 1, 2}));  // Not whole pages.
  EXPECT_FALSE(cache_.LacksState(kBase, {3, 3}));     // Not cached.
  EXPECT_FALSE(cache_.LacksState(kBase, {}));
  Run(kBase, {1, 1, 2, 2, 3, 3});
  const PrefixCache::Prefix found = cache_.Lookup(kBase, {1, 1, 2, 2, 3, 3});
  EXPECT_THAT(found.pages, SizeIs(2));
  EXPECT_TRUE(found.state.has_value());
  EXPECT_EQ(found.fork_tokens, 0);  // Nothing follows {3, 3}.
  const PrefixCache::Prefix none = cache_.Lookup(kBase, {1, 1, 4, 4});
  EXPECT_THAT(none.pages, IsEmpty());
  EXPECT_FALSE(none.state.has_value());
  EXPECT_EQ(none.fork_tokens, 2);
}

TEST_F(PrefixStateTest, EvictsTheStateWhoseUseIsOldest) {
  RunWithState(kBase, {1, 1});
  RunWithState(kBase, {1, 1, 2, 2});
  // This uses the page of {1, 1}, but not its state.
  EXPECT_THAT(cache_.Lookup(kBase, {1, 1, 2, 2}).pages, SizeIs(2));
  EXPECT_TRUE(cache_.EvictState());
  EXPECT_THAT(cache_.Lookup(kBase, {1, 1}).pages, IsEmpty());
  {
    const StateSlot user(&states_, *cache_.Lookup(kBase, {1, 1, 2, 2}).state);
    EXPECT_FALSE(cache_.EvictState());  // A sequence uses the other state.
  }
  EXPECT_TRUE(cache_.EvictState());
  EXPECT_FALSE(cache_.EvictState());
  EXPECT_EQ(states_.num_free(), 2);
  EXPECT_EQ(cache_.num_pages(), 2);
}

TEST_F(PrefixStateTest, StatesGoWithTheirPages) {
  RunWithState(kBase, {1, 1});
  RunWithState(7, {1, 1});
  EXPECT_EQ(states_.num_idle(), 2);
  EXPECT_EQ(cache_.Evict(1), 1);
  EXPECT_EQ(states_.num_free(), 1);
  cache_.DropVersion(7);
  EXPECT_EQ(states_.num_free(), 2);
  EXPECT_FALSE(cache_.EvictState());
}

TEST_F(PrefixStateTest, ADroppedStateStaysWithItsUser) {
  RunWithState(7, {1, 1});
  {
    SequencePages user(&allocator_, kPageSize);
    user.SetState({&states_, *cache_.Lookup(7, {1, 1}).state});
    cache_.DropVersion(7);
    EXPECT_EQ(states_.num_used(), 1);
    const SequencePages moved = std::move(user);
    EXPECT_EQ(states_.num_used(), 1);
  }
  EXPECT_EQ(states_.num_free(), 2);
}

TEST(PrefixCacheLifetimeTest, GivesItsPagesBack) {
  PageAllocator allocator(2);
  {
    PrefixCache cache(&allocator, 1);
    SequencePages sequence(&allocator, 1);
    ASSERT_TRUE(sequence.AppendMany(2));
    cache.Insert(kBase, Tokens{1, 2}, sequence);
  }
  EXPECT_EQ(allocator.num_free(), 2);
}

// A simple model of the cache. It maps each prefix to the page of the prefix's
// last tokens, and to the time when the page was last used.
class Model {
 public:
  using Prefix = std::pair<uint64_t, Tokens>;
  struct Page {
    PageId page = 0;
    int64_t last_used = 0;
  };

  std::vector<PageId> Lookup(uint64_t version, const Tokens& tokens) {
    std::vector<PageId> pages;
    ++now_;
    for (const Prefix& prefix : PrefixesOf(version, tokens)) {
      const auto found = pages_.find(prefix);
      if (found == pages_.end()) break;
      found->second.last_used = now_;
      pages.push_back(found->second.page);
    }
    return pages;
  }

  // Returns the sequence's pages after the insertion.
  std::vector<PageId> Insert(uint64_t version, const Tokens& tokens,
                             std::vector<PageId> pages) {
    ++now_;
    size_t i = 0;
    for (const Prefix& prefix : PrefixesOf(version, tokens)) {
      Page& page = pages_.try_emplace(prefix, Page{pages[i]}).first->second;
      pages[i++] = page.page;
      page.last_used = now_;
    }
    return pages;
  }

  void Drop(uint64_t version) {
    std::erase_if(pages_,
                  [&](const auto& p) { return p.first.first == version; });
  }

  // Evicts the least recently used leaf that no sequence uses.
  bool EvictOne(const PageAllocator& allocator) {
    auto oldest = pages_.end();
    for (auto it = pages_.begin(); it != pages_.end(); ++it) {
      if (!IsLeaf(it->first) || allocator.num_references(it->second.page) > 1) {
        continue;
      }
      if (oldest == pages_.end() ||
          it->second.last_used < oldest->second.last_used) {
        oldest = it;
      }
    }
    if (oldest == pages_.end()) return false;
    pages_.erase(oldest);
    return true;
  }

  int64_t size() const { return static_cast<int64_t>(pages_.size()); }

 private:
  static std::vector<Prefix> PrefixesOf(uint64_t version,
                                        const Tokens& tokens) {
    std::vector<Prefix> prefixes;
    for (size_t end = kPageSize; end <= tokens.size(); end += kPageSize) {
      prefixes.emplace_back(version,
                            Tokens(tokens.begin(), tokens.begin() + end));
    }
    return prefixes;
  }

  bool IsLeaf(const Prefix& prefix) const {
    return std::ranges::none_of(pages_, [&](const auto& page) {
      const auto& [version, tokens] = page.first;
      return version == prefix.first && tokens.size() > prefix.second.size() &&
             std::equal(prefix.second.begin(), prefix.second.end(),
                        tokens.begin());
    });
  }

  std::map<Prefix, Page> pages_;
  int64_t now_ = 0;
};

TEST(RandomPrefixCacheTest, AgreesWithASimpleModel) {
  struct Running {
    uint64_t version;
    Tokens tokens;
    SequencePages pages;
  };
  constexpr int kNumPages = 40;
  std::mt19937 random(11);
  PageAllocator allocator(kNumPages);
  PrefixCache cache(&allocator, kPageSize);
  Model model;
  std::vector<Running> running;
  const auto pick = [&] { return running.begin() + random() % running.size(); };
  for (int round = 0; round < 20000; ++round) {
    switch (random() % 8) {
      case 0:
      case 1:
      case 2: {  // Starts a sequence. It has few distinct tokens, so that
                 // prefixes repeat.
        const uint64_t version = random() % 3;
        Tokens tokens(random() % 9);
        for (int32_t& token : tokens)
          token = static_cast<int32_t>(random() % 2);
        const std::vector<PageId> found = cache.Lookup(version, tokens).pages;
        ASSERT_EQ(found, model.Lookup(version, tokens));
        SequencePages pages(&allocator, kPageSize, found);
        const auto count = static_cast<int64_t>(tokens.size());
        if (pages.AppendMany(count - pages.num_tokens())) {
          running.push_back({version, tokens, std::move(pages)});
        }
        break;
      }
      case 3: {
        if (running.empty()) break;
        const auto it = pick();
        const std::vector<PageId> expected =
            model.Insert(it->version, it->tokens, it->pages.pages());
        cache.Insert(it->version, it->tokens, it->pages);
        ASSERT_EQ(it->pages.pages(), expected);
        break;
      }
      case 4:
      case 5:
        if (!running.empty()) running.erase(pick());
        break;
      case 6: {
        const int64_t count = random() % 3;
        int64_t expected = 0;
        while (expected < count && model.EvictOne(allocator)) ++expected;
        ASSERT_EQ(cache.Evict(count), expected);
        break;
      }
      default:
        if (random() % 16 == 0) {
          cache.DropVersion(round % 3);
          model.Drop(round % 3);
        }
    }
    ASSERT_EQ(cache.num_pages(), model.size());
    ASSERT_EQ(
        allocator.num_used() + allocator.num_idle() + allocator.num_free(),
        kNumPages);
  }
  running.clear();
  EXPECT_EQ(allocator.num_idle(), cache.num_pages());
  // All idle pages can be evicted.
  EXPECT_EQ(cache.Evict(kNumPages), model.size());
  EXPECT_EQ(allocator.num_free(), kNumPages);
}

}  // namespace
}  // namespace weft::dispatch
