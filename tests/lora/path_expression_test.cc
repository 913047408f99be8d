#include "src/lora/path_expression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/status_matchers.h"

namespace weft::lora::path_expression_test {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr char kPath[] = "model.layers.1.self_attn.q_proj";

absl::StatusOr<PathExpression> Parse(absl::string_view text, PathMatch match) {
  int instructions_left = kMaxInstructions;
  return PathExpression::Parse("a_field", text, match, instructions_left);
}

bool Matches(absl::string_view text, PathMatch match) {
  const auto expression = Parse(text, match);
  EXPECT_THAT(expression, IsOk());
  return expression.ok() && expression->Matches(kPath);
}

TEST(PathExpression, MatchesTheWholePath) {
  for (const char* text :
       {kPath, "^model.layers.1.self_attn.q_proj$", ".*q_proj", ".*",
        R"(model\.layers\.\d+\.self_attn\.[qk]_proj)", "(?i)MODEL.*Proj",
        R"((?:x|.*\b)q_proj)", "(?P<all>.*)", R"(\Amodel\W.*)"}) {
    EXPECT_TRUE(Matches(text, PathMatch::kWhole)) << text;
  }
  for (const char* text : {"q_proj", "model", "", ".*k_proj", "model.*self",
                           "MODEL.*", R"(.*\.11\..*)"}) {
    EXPECT_FALSE(Matches(text, PathMatch::kWhole)) << text;
  }
}

TEST(PathExpression, MatchesTheEndOfThePathAfterADot) {
  for (const char* text :
       {"q_proj", "self_attn.q_proj", "1.self_attn.q_proj", kPath,
        "^model.layers.1.self_attn.q_proj", "(q|k)_proj", "q_proj$", ".*",
        // A dot matches any character.
        "q.proj", "self.attn.q_proj", "......",
        // PEFT puts each key into a group of an expression. This key closes the
        // group.
        "model)|(nothing"}) {
    EXPECT_TRUE(Matches(text, PathMatch::kEnd)) << text;
  }
  for (const char* text :
       {"proj", "_proj", "attn.q_proj", "k_proj", "^q_proj", "q_proj.",
        "self_attn", "layers.1.q_proj", "x.model.layers.1.self_attn.q_proj",
        "^model.layers.1.self_attn", ".", "", "Q_proj"}) {
    EXPECT_FALSE(Matches(text, PathMatch::kEnd)) << text;
  }
}

TEST(PathExpression, RefusalsNameFieldTextAndReason) {
  const std::string large(100000, '.');
  for (const auto& [text, reason] :
       {std::pair("(?!mlp).*", "invalid perl operator: (?!"),
        std::pair(R"((a)\1)", R"(invalid escape sequence: \1)"),
        std::pair("(a", "missing )"), std::pair("a**", "bad repetition"),
        std::pair("(.{99}){99}", "invalid repetition size: {99}"),
        std::pair(large.c_str(), "pattern too large"),
        std::pair("(.?){900}.{1000}.{1000}.{1000}.{1000}.{1000}.{1000}.{1000}",
                  "at most 8192 instructions")}) {
    for (const PathMatch match : {PathMatch::kWhole, PathMatch::kEnd}) {
      const auto refused = Parse(text, match);
      EXPECT_THAT(refused, IsStatus(kInvalid, "a_field is \""));
      EXPECT_THAT(refused, IsStatus(kInvalid, reason)) << text;
    }
  }
  EXPECT_THAT(Parse("(a", PathMatch::kWhole), IsStatus(kInvalid, "\"(a\""));
}

TEST(PathExpression, PathsCostNothingAndExpressionsDo) {
  int left = 100;
  const auto parse = [&](const char* text) {
    return PathExpression::Parse("f", text, PathMatch::kEnd, left);
  };
  EXPECT_THAT(parse(R"(^model\.layers\.[12].self_attn.q_proj$)"), IsOk());
  EXPECT_EQ(left, 100);
  EXPECT_THAT(parse("(q|k)_proj"), IsOk());
  EXPECT_LT(left, 95);
  EXPECT_THAT(parse("x{100}"), IsStatus(kInvalid, "instructions"));
}

TEST(DiffersInPython, SharedExpressionsAreFree) {
  for (const char* text :
       {"", "a|b", R"(\.\-\_\/)", R"(\d\D\s\S\w\W\b\B\A)", "(?:a)(?P<n>b)",
        "(?ims)a(?i:b)", "a{2}b{1,}c{0,12}?", "[]a][^]a][a-c-][.*?{(]",
        R"([\d\]\-])", "a]b}", "x*?y+?z??", "(^|a)*$"}) {
    EXPECT_EQ(DiffersInPython(text), "") << text;
  }
}

TEST(DiffersInPython, FindsWhatTheOtherReadsOtherwise) {
  for (const char* text :
       {"\xc3\xa9",    "a\n",  // A non-ASCII letter; a line break.
        "a{,3}",       "a{01}",  "a{1,02}",   "a{",      "{a}",
        "a{12345}",             // In RE2, this is literal text.
        "[[:alpha:]]", "[a[]",  // RE2 knows [:alpha:].
        R"(\60)",      R"(\z)",  R"(\pL)",    R"(\C)",   R"(\Qa\E)",
        R"([\b])",     "a\\",    R"([\w-a])", "a(?i)",   "(?i",
        "(?U)a",       "(?-i)a", "(?-i:a)",   "(?)",     "(?P<1>a)",
        "^*",          "$+",     R"(\b?)",    R"(\A{2})"}) {
    EXPECT_NE(DiffersInPython(text), "") << text;
  }
}

}  // namespace
}  // namespace weft::lora::path_expression_test
