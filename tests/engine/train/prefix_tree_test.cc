#include "src/engine/train/prefix_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace weft::engine {
namespace {

using ::testing::SizeIs;

PrefixTree Build(const std::vector<std::vector<int32_t>>& sequences,
                 int64_t min_saved_rows) {
  std::vector<absl::Span<const int32_t>> spans(sequences.begin(),
                                               sequences.end());
  return BuildPrefixTree(spans, min_saved_rows);
}

std::vector<int32_t> Letters(const std::string& text) {
  return {text.begin(), text.end()};
}

// Shows every node as "begin-end^parent/end of its subtree".
std::string Show(const PrefixTree& tree) {
  std::string out;
  for (const ops::AttentionNode& node : tree.nodes) {
    out += std::to_string(node.begin) + "-" + std::to_string(node.end) + "^" +
           std::to_string(node.parent) + "/" +
           std::to_string(node.subtree_end) + " ";
  }
  return out;
}

// Checks that the spans of each sequence give the sequence's tokens at the
// right positions.
void ExpectHolds(const PrefixTree& tree,
                 const std::vector<std::vector<int32_t>>& sequences) {
  ASSERT_EQ(tree.spans.size(), sequences.size());
  for (size_t s = 0; s < sequences.size(); ++s) {
    std::vector<int32_t> tokens;
    for (const RowSpan& span : tree.spans[s]) {
      for (int64_t r = span.begin; r < span.begin + span.count; ++r) {
        EXPECT_EQ(tree.positions[r], static_cast<int32_t>(tokens.size()));
        tokens.push_back(tree.tokens[r]);
      }
    }
    EXPECT_EQ(tokens, sequences[s]);
  }
}

// Checks that nodes are in depth-first order, with contiguous subtrees.
void ExpectWellFormed(const PrefixTree& tree) {
  int64_t row = 0;
  for (size_t n = 0; n < tree.nodes.size(); ++n) {
    const ops::AttentionNode& node = tree.nodes[n];
    EXPECT_EQ(node.begin, row);
    EXPECT_GT(node.end, node.begin);
    EXPECT_LT(node.parent, static_cast<int64_t>(n));
    if (node.parent >= 0) {
      EXPECT_LE(node.subtree_end, tree.nodes[node.parent].subtree_end);
      EXPECT_GE(node.begin, tree.nodes[node.parent].end);
    }
    row = node.end;
  }
  EXPECT_EQ(row, static_cast<int64_t>(tree.tokens.size()));
}

TEST(PrefixTreeTest, IsTheWorkedExampleOfTheHeader) {
  const auto sequences = {Letters("abcd"), Letters("abcef"), Letters("abc")};
  const PrefixTree tree = Build(sequences, 1);
  EXPECT_EQ(Show(tree), "0-3^-1/6 3-4^0/4 4-6^0/6 ");
  ExpectHolds(tree, sequences);
}

TEST(PrefixTreeTest, KeepsTheOrderWithoutSharing) {
  const auto sequences = {Letters("bb"), Letters("aa"), Letters("aa")};
  const PrefixTree tree = Build(sequences, kNeverShare);
  EXPECT_EQ(Show(tree), "0-2^-1/2 2-4^-1/4 4-6^-1/6 ");
  ExpectHolds(tree, sequences);
}

TEST(PrefixTreeTest, RunsEqualSequencesOnce) {
  const auto sequences = {Letters("abc"), Letters("abc"), Letters("abc")};
  const PrefixTree tree = Build(sequences, 2);
  EXPECT_EQ(Show(tree), "0-3^-1/3 ");
  ExpectHolds(tree, sequences);
}

TEST(PrefixTreeTest, NestsPrefixes) {
  const auto sequences = {Letters("systemAx1"), Letters("systemAx2"),
                          Letters("systemBy1"), Letters("systemBy2")};
  const PrefixTree tree = Build(sequences, 2);
  EXPECT_EQ(Show(tree),
            "0-6^-1/14 6-8^0/10 8-9^1/9 9-10^1/10 10-12^0/14 12-13^4/13 "
            "13-14^4/14 ");
  ExpectHolds(tree, sequences);
}

TEST(PrefixTreeTest, LeavesAloneWhatSavesTooLittle) {
  const auto sequences = {Letters("abx"), Letters("aby"), Letters("abyz")};
  // Sharing "ab" would save 4 rows. Sharing "aby" between the last two
  // sequences would save 3.
  EXPECT_THAT(Build(sequences, 5).nodes, SizeIs(3));
  EXPECT_THAT(Build(sequences, 4).nodes, SizeIs(4));
  ExpectHolds(Build(sequences, 5), sequences);
}

TEST(PrefixTreeTest, SkipsAShortBeginningToShareALongOneBehindIt) {
  // Sharing "a" alone would save 2 rows. Sharing "abcdef" between two sequences
  // saves 6.
  const auto sequences = {Letters("abcdefx"), Letters("abcdefy"),
                          Letters("azz")};
  const PrefixTree tree = Build(sequences, 4);
  EXPECT_EQ(Show(tree), "0-6^-1/8 6-7^0/7 7-8^0/8 8-11^-1/11 ");
  ExpectHolds(tree, sequences);
}

TEST(AddedRowsTest, CountsWhatThePreviousSequenceDoesNotHold) {
  const Datum prompt{.tokens = std::vector<int32_t>(40, 7)};
  Datum first = prompt, second = prompt;
  first.tokens.insert(first.tokens.end(), {1, 2, 3});
  second.tokens.insert(second.tokens.end(), {1, 4});
  EXPECT_EQ(AddedRows(first, second), 1);
  EXPECT_EQ(AddedRows(second, first), 2);
  EXPECT_EQ(AddedRows(first, first), 1);
  EXPECT_EQ(AddedRows(prompt, first), 3);
  const Datum other{.tokens = {7, 7, 5}};
  EXPECT_EQ(AddedRows(first, other), 3);  // The common prefix is too short.
}

TEST(AddedRowsTest, TokensWithOtherExpertsAreNotCommon) {
  const Datum chosen{.tokens = std::vector<int32_t>(40, 7)};
  Datum given = chosen;
  given.routing.assign(80, 1);
  Datum other = given;
  other.routing[2 * 30 + 1] = 2;
  EXPECT_EQ(AddedRows(chosen, given), 40);
  EXPECT_EQ(AddedRows(given, given), 1);
  EXPECT_EQ(AddedRows(given, other), 10);
}

TEST(PrefixTreeTest, HoldsRandomSequences) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<int32_t>> sequences(1 + random() % 12);
    for (std::vector<int32_t>& sequence : sequences) {
      sequence.resize(1 + random() % 10);
      for (int32_t& token : sequence) {
        token = static_cast<int32_t>(random() % 2);
      }
    }
    for (const int64_t min_saved : {int64_t{1}, int64_t{4}, kNeverShare}) {
      const PrefixTree tree = Build(sequences, min_saved);
      ExpectHolds(tree, sequences);
      ExpectWellFormed(tree);
    }
  }
}

}  // namespace
}  // namespace weft::engine
