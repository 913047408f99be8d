#include "src/sampling/stop_matcher.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/sampling/tokenizer_folder.h"

namespace weft::sampling {
namespace {

// Returns the index of the token that ends the sample, or -1.
int StopsAt(StopMatcher matcher, const std::vector<int32_t>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (matcher.Push(tokens[i])) return static_cast<int>(i);
  }
  return -1;
}

TEST(StopMatcher, NeverStopsWithoutRules) {
  EXPECT_EQ(StopsAt(StopMatcher({}, nullptr), {0, 1, 2}), -1);
  const StopRule empty = {
      .token_ids = {}, .token_sequences = {{}}, .byte_strings = {""}};
  EXPECT_EQ(StopsAt(StopMatcher(empty, nullptr), {0, 1, 2}), -1);
}

TEST(StopMatcher, StopsAtATokenId) {
  const StopRule rule = {
      .token_ids = {7, 9}, .token_sequences = {}, .byte_strings = {}};
  EXPECT_EQ(StopsAt(StopMatcher(rule, nullptr), {1, 9, 7}), 1);
}

TEST(StopMatcher, StopsAtTheEndOfASequence) {
  const StopRule rule = {.token_ids = {},
                         .token_sequences = {{1, 1, 2}, {5, 6, 7, 8}},
                         .byte_strings = {}};
  EXPECT_EQ(StopsAt(StopMatcher(rule, nullptr), {1, 1, 1, 2}), 3);
  EXPECT_EQ(StopsAt(StopMatcher(rule, nullptr), {5, 6, 7, 1, 2}), -1);
  EXPECT_EQ(StopsAt(StopMatcher(rule, nullptr), {5, 5, 6, 7, 8}), 4);
}

class ByteStops : public ::testing::Test {
 protected:
  // The tokens are 0 "a", 1 "b", 2 "ab", 3 " " and 6 "abababab". Tokens 4 and 5
  // are the two bytes of "é".
  ByteStops()
      : bytes_(*TokenBytes::Load(
            TokenizerFolder(
                R"({"a":0,"b":1,"ab":2,"Ġ":3,"Ã":4,"©":5,"abababab":6})")
                .path())) {}

  static StopRule Strings(const std::vector<std::string>& stops) {
    return {.token_ids = {}, .token_sequences = {}, .byte_strings = stops};
  }

  int StopsAtAny(const std::vector<std::string>& stops,
                 const std::vector<int32_t>& tokens) const {
    return StopsAt(StopMatcher(Strings(stops), &bytes_), tokens);
  }

  TokenBytes bytes_;
};

TEST_F(ByteStops, MatchAcrossTokenBorders) {
  EXPECT_EQ(StopsAtAny({"ab a"}, {0, 1, 3, 2}), 3);
  EXPECT_EQ(StopsAtAny({"bb"}, {2, 1, 0}), 1);
  EXPECT_EQ(StopsAtAny({"\xc3\xa9"}, {4, 4, 5}), 2);
}

TEST_F(ByteStops, MatchInsideALongToken) {
  EXPECT_EQ(StopsAtAny({"ba"}, {0, 6}), 1);
  EXPECT_EQ(StopsAtAny({"abababababab"}, {6, 1, 6, 2, 2}), 4);
}

TEST_F(ByteStops, DoNotMatchAnOldPieceAgain) {
  StopMatcher matcher(Strings({"ab", "aaaaaa"}), &bytes_);
  EXPECT_TRUE(matcher.Push(2));
  EXPECT_TRUE(matcher.Push(2));
  EXPECT_FALSE(matcher.Push(0));  // The matcher still has the last "ab".
  EXPECT_EQ(StopsAtAny({"aab"}, {0, 3, 0, 1}), -1);
}

TEST_F(ByteStops, SkipTokensWithoutBytes) {
  EXPECT_EQ(StopsAtAny({"ab"}, {0, 1000, -1, 1}), 3);
}

TEST_F(ByteStops, AgreeWithASearchOfTheWholeText) {
  uint32_t state = 1;
  const std::vector<std::string> stops = {"abba", "b ab", "aaaaa"};
  for (int trial = 0; trial < 200; ++trial) {
    std::string text;
    int expected = -1;
    std::vector<int32_t> tokens;
    for (int i = 0; i < 40; ++i) {
      state = state * 1664525u + 1013904223u;
      tokens.push_back(static_cast<int32_t>((state >> 24) % 4));
      text += bytes_.Bytes(tokens.back());
      for (const std::string& stop : stops) {
        if (expected < 0 && text.find(stop) != std::string::npos) expected = i;
      }
    }
    EXPECT_EQ(StopsAtAny(stops, tokens), expected) << text;
  }
}

}  // namespace
}  // namespace weft::sampling
