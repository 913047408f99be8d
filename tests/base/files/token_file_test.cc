#include "src/base/files/token_file.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::string& Hash() {
  static const std::string& hash = *new std::string(HashToken("token"));
  return hash;
}

std::string Line(const std::string& rest) {
  return absl::StrCat(R"({"id": "ci", "tenant": "acme", "sha256": ")", Hash(),
                      "\"", rest, "}");
}

TEST(TokenFileTest, WhatIsFormattedIsParsedAgain) {
  const std::vector<TokenEntry> records = {
      {.id = "ci",
       .sha256 = Hash(),
       .tenant = "acme",
       .scopes = {Scope::kTrain, Scope::kSample},
       .expires = absl::FromUnixSeconds(1800000000)},
      {.id = "ops",
       .sha256 = HashToken("other"),
       .tenant = "ops",
       .scopes = {Scope::kAdmin}}};
  const auto parsed = ParseTokens(FormatTokens(records)).value();
  ASSERT_EQ(parsed.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(parsed[i].id, records[i].id);
    EXPECT_EQ(parsed[i].sha256, records[i].sha256);
    EXPECT_EQ(parsed[i].tenant, records[i].tenant);
    EXPECT_EQ(parsed[i].scopes, records[i].scopes);
    EXPECT_EQ(parsed[i].expires, records[i].expires);
  }
}

TEST(TokenFileTest, EmptyFilesHoldNoTokens) {
  EXPECT_THAT(ParseTokens(""), IsOk());
  EXPECT_EQ(ParseTokens("\n  \n")->size(), 0u);
}

TEST(TokenFileTest, BadLinesAreNamedAndNotShown) {
  const std::string good = Line(R"(, "scopes": ["read"])");
  const std::pair<std::string, const char*> cases[] = {
      {"weft_a-token-by-mistake", "line 1: is not a JSON object"},
      {"[1]", "line 1: is not a JSON object"},
      {R"({"tenant": "secret"})", "line 1: id must be a name"},
      {good + "\n" + good, "line 2: id is that of an earlier line"},
      {Line(""), "line 1: scopes must be a list"},
      {Line(R"(, "scopes": [])"), "line 1: scopes must be a list"},
      {Line(R"(, "scopes": ["secret"])"), "line 1: scopes must be of read"},
      {Line(R"(, "scopes": [7])"), "line 1: scopes must be of read"},
      {Line(R"(, "scopes": ["read"], "expires": "secret")"),
       "line 1: expires must be a time"},
      {Line(R"(, "scopes": ["read"], "expires": 7)"),
       "line 1: expires must be a time"},
      {Line(R"(, "scopes": ["read"], "secret": 1)"),
       "line 1: has a field other than"},
      {R"({"id": "a", "tenant": "t/u", "sha256": "secret"})",
       "line 1: tenant must be a name"},
      {absl::StrCat(R"({"id": "a", "tenant": ")", std::string(65, 't'), "\"}"),
       "line 1: tenant must be a name of at most 64"},
      {R"({"id": "a", "tenant": "t", "sha256": "secret"})",
       "line 1: sha256 must be 64 digits"}};
  for (const auto& [text, message] : cases) {
    const auto parsed = ParseTokens(text);
    EXPECT_THAT(parsed, IsStatus(absl::StatusCode::kInvalidArgument, message));
    EXPECT_THAT(std::string(parsed.status().message()),
                Not(HasSubstr("secret")));
    EXPECT_THAT(std::string(parsed.status().message()),
                Not(HasSubstr("mistake")));
  }
}

TEST(TokenFileTest, WritesForItsOwnerAloneAndKeepsModeAndLink) {
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  const std::string path = folder + "/tokens";
  const std::vector<TokenEntry> records = {{.id = "ci",
                                            .sha256 = Hash(),
                                            .tenant = "acme",
                                            .scopes = {Scope::kRead}}};
  ASSERT_THAT(WriteTokenFile(path, records), IsOk());
  struct stat found = {};
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  chmod(path.c_str(), 0640);
  const std::string link = folder + "/link";
  std::filesystem::create_symlink("tokens", link);
  ASSERT_THAT(WriteTokenFile(link, {}), IsOk());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(ReadAll(path), "");
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0640u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder),
                          std::filesystem::directory_iterator()),
            2);
}

}  // namespace
}  // namespace weft
