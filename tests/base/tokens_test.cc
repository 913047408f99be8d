#include "src/base/tokens.h"

#include <set>

#include "gmock/gmock.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

using ::testing::StartsWith;

TEST(TokensTest, NewTokensAreLongAndNeverEqual) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) tokens.insert(NewToken());
  EXPECT_EQ(tokens.size(), 100u);
  for (const std::string& token : tokens) {
    EXPECT_THAT(token, StartsWith("weft_"));
    EXPECT_GE(token.size(), 5u + 43u);  // 43 characters of base 64 hold 256
                                        // bits.
  }
}

TEST(TokensTest, HashIsSha256) {
  EXPECT_EQ(HashToken("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(TokensTest, FindsARecordByItsTokenAlone) {
  const std::vector<TokenEntry> records = {
      {.id = "one", .sha256 = HashToken("first")},
      {.id = "two", .sha256 = HashToken("second")}};
  const auto find = [&records](const std::string& token) {
    return FindTokenOfHash(records, HashToken(token));
  };
  ASSERT_NE(find("second"), nullptr);
  EXPECT_EQ(find("second")->id, "two");
  EXPECT_EQ(find("secon"), nullptr);
  EXPECT_EQ(find(""), nullptr);
  EXPECT_EQ(find(records[0].sha256), nullptr);
  EXPECT_EQ(FindTokenOfHash(records, ""), nullptr);
  EXPECT_EQ(FindTokenOfHash({}, HashToken("first")), nullptr);
}

TEST(TokensTest, EveryScopeIncludesReadAndAdminIncludesAll) {
  const TokenEntry reader{.scopes = {Scope::kRead}};
  const TokenEntry trainer{.scopes = {Scope::kTrain}};
  const TokenEntry admin{.scopes = {Scope::kAdmin}};
  EXPECT_TRUE(reader.Allows(Scope::kRead));
  EXPECT_FALSE(reader.Allows(Scope::kSample));
  EXPECT_TRUE(trainer.Allows(Scope::kRead));
  EXPECT_TRUE(trainer.Allows(Scope::kTrain));
  EXPECT_FALSE(trainer.Allows(Scope::kSample));
  EXPECT_FALSE(trainer.Allows(Scope::kAdmin));
  for (const Scope scope :
       {Scope::kRead, Scope::kSample, Scope::kTrain, Scope::kAdmin}) {
    EXPECT_TRUE(admin.Allows(scope)) << ScopeName(scope);
    EXPECT_FALSE(TokenEntry().Allows(scope)) << ScopeName(scope);
    EXPECT_THAT(ParseScope(ScopeName(scope)), IsOkAndHolds(scope));
  }
  EXPECT_THAT(ParseScope("root"),
              IsStatus(absl::StatusCode::kInvalidArgument, "'root'"));
}

}  // namespace
}  // namespace weft
