#include "src/dispatch/sequence_pages.h"

#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace weft::dispatch {
namespace {

TEST(SequencePagesTest, FillsAPageBeforeItTakesTheNext) {
  PageAllocator allocator(4);
  SequencePages sequence(&allocator, /*page_size=*/3);
  for (int64_t token = 0; token < 7; ++token) {
    ASSERT_TRUE(sequence.AppendMany(1));
    EXPECT_EQ(sequence.Slot(token), token);  // Pages are allocated in the order
                                             // 0, 1, 2.
  }
  EXPECT_EQ(sequence.pages(), (std::vector<PageId>{0, 1, 2}));
  EXPECT_EQ(allocator.num_used(), 3);
}

TEST(SequencePagesTest, ChangesNothingWhenPagesRunOut) {
  PageAllocator allocator(2);
  SequencePages sequence(&allocator, 2);
  ASSERT_TRUE(sequence.AppendMany(3));
  EXPECT_FALSE(sequence.AppendMany(2));
  EXPECT_EQ(sequence.num_tokens(), 3);
  EXPECT_TRUE(sequence.AppendMany(1));
  EXPECT_FALSE(sequence.AppendMany(1));
  EXPECT_EQ(sequence.num_tokens(), 4);
}

TEST(SequencePagesTest, ForkSharesFullPagesAndCopiesThePartialOne) {
  PageAllocator allocator(5);
  SequencePages prompt(&allocator, 4);
  ASSERT_TRUE(prompt.AppendMany(10));
  auto fork = prompt.ForkSequence();
  ASSERT_TRUE(fork.has_value());
  EXPECT_EQ(fork->copy, (PageCopy{.from = 2, .to = 3, .num_rows = 2}));
  EXPECT_EQ(fork->sequence.pages(), (std::vector<PageId>{0, 1, 3}));
  EXPECT_EQ(allocator.num_references(0), 2);
  EXPECT_EQ(allocator.num_references(2), 1);
  // Both sequences continue in their own pages.
  ASSERT_TRUE(prompt.AppendMany(1) && fork->sequence.AppendMany(1));
  EXPECT_EQ(prompt.Slot(10), 2 * 4 + 2);
  EXPECT_EQ(fork->sequence.Slot(10), 3 * 4 + 2);
}

TEST(SequencePagesTest, ForkOfFullPagesNeedsNoPage) {
  PageAllocator allocator(2);
  SequencePages prompt(&allocator, 4);
  ASSERT_TRUE(prompt.AppendMany(8));
  const auto fork = prompt.ForkSequence();
  ASSERT_TRUE(fork.has_value());
  EXPECT_FALSE(fork->copy.has_value());
  EXPECT_EQ(fork->sequence.num_tokens(), 8);
}

TEST(SequencePagesTest, ForkFailsWithoutAPageForTheCopy) {
  PageAllocator allocator(2);
  SequencePages prompt(&allocator, 4);
  ASSERT_TRUE(prompt.AppendMany(5));
  EXPECT_FALSE(prompt.ForkSequence().has_value());
  EXPECT_EQ(allocator.num_references(0), 1);
}

TEST(SequencePagesTest, ExchangesAPageForOneThatOthersUse) {
  PageAllocator allocator(4);
  SequencePages first(&allocator, 2);
  SequencePages second(&allocator, 2);
  ASSERT_TRUE(first.AppendMany(2));
  ASSERT_TRUE(second.AppendMany(3));
  second.Exchange(0, first.pages()[0]);
  EXPECT_EQ(second.Slot(1), first.Slot(1));
  EXPECT_EQ(second.num_tokens(), 3);
  EXPECT_EQ(allocator.num_used(), 2);
  first.Release();
  EXPECT_EQ(allocator.num_used(), 2);
  second.Release();
  EXPECT_EQ(allocator.num_free(), 4);
}

TEST(SequencePagesTest, ReleasesItsPagesOnceHoweverItIsMoved) {
  PageAllocator allocator(4);
  {
    SequencePages first(&allocator, 2);
    ASSERT_TRUE(first.AppendMany(4));
    SequencePages second(std::move(first));
    SequencePages third(&allocator, 2);
    ASSERT_TRUE(third.AppendMany(1));
    third = std::move(second);
    EXPECT_EQ(allocator.num_used(), 2);
    EXPECT_EQ(third.num_tokens(), 4);
    third.Release();
    EXPECT_EQ(allocator.num_used(), 0);
  }
  EXPECT_EQ(allocator.num_free(), 4);
}

TEST(SequencePagesTest, NeverGivesTwoSequencesTheSameOwnSlot) {
  std::mt19937 random(7);
  PageAllocator allocator(64);
  std::vector<SequencePages> sequences;
  for (int round = 0; round < 5000; ++round) {
    const size_t pick = sequences.empty() ? 0 : random() % sequences.size();
    switch (random() % 8) {
      case 0:
        if (sequences.size() < 12) sequences.emplace_back(&allocator, 4);
        break;
      case 1:
        if (!sequences.empty() && sequences.size() < 12) {
          auto fork = sequences[pick].ForkSequence();
          if (fork) sequences.push_back(std::move(fork->sequence));
        }
        break;
      case 2:
        if (!sequences.empty()) sequences.erase(sequences.begin() + pick);
        break;
      default:
        if (!sequences.empty() && sequences[pick].AppendMany(1)) {
          // No other sequence uses the page that was just written.
          EXPECT_EQ(allocator.num_references(sequences[pick].pages().back()),
                    1);
        }
    }
  }
  sequences.clear();
  EXPECT_EQ(allocator.num_free(), 64);
}

}  // namespace
}  // namespace weft::dispatch
