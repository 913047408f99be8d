// Tests weftctl's tokens: the commands that edit weftd's token file, and the
// flags that send a token.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/channel.h"
#include "client/weftctl/weftctl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "src/base/files/token_file.h"
#include "tests/support/canned_server.h"
#include "tests/support/temp_folder.h"

namespace weft::client::weftctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class WeftctlTokenTest : public ::testing::Test {
 protected:
  ~WeftctlTokenTest() override {
    for (const char* name : {"WEFT_TOKEN", "WEFT_TOKEN_FILE"}) unsetenv(name);
  }

  int Run(std::vector<std::string> given) {
    out_.str("");
    err_.str("");
    return RunWeftctl(given, {.out = out_, .err = err_});
  }
  int RunOnFile(std::vector<std::string> given) {
    given.push_back("--file=" + file_);
    return Run(std::move(given));
  }

  std::vector<TokenEntry> Records() {
    std::ifstream file(file_);
    return ParseTokens(std::string(std::istreambuf_iterator<char>(file), {}))
        .value();
  }

  const TempFolder folder_;
  const std::string file_ = folder_.path() + "/tokens";
  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(WeftctlTokenTest, CreatesListsAndRevokes) {
  EXPECT_EQ(RunOnFile({"token", "create", "ci", "--tenant=acme",
                       "--scopes=train,sample", "--valid-for=48h"}),
            0);
  const std::string token = out_.str().substr(0, out_.str().find('\n'));
  EXPECT_THAT(token, StartsWith("weft_"));
  EXPECT_EQ(RunOnFile({"token", "create", "ops", "--tenant=ops",
                       "--scopes=admin", "-o", "json"}),
            0);
  EXPECT_THAT(nlohmann::json::parse(out_.str())["token"], StartsWith("weft_"));
  const std::vector<TokenEntry> records = Records();
  ASSERT_EQ(records.size(), 2u);
  ASSERT_NE(FindTokenOfHash(records, HashToken(token)), nullptr);
  EXPECT_EQ(FindTokenOfHash(records, HashToken(token))->id, "ci");
  EXPECT_EQ(records[0].tenant, "acme");
  EXPECT_TRUE(records[0].Allows(Scope::kSample));
  EXPECT_FALSE(records[0].Allows(Scope::kAdmin));
  EXPECT_LT(records[0].expires, absl::Now() + absl::Hours(49));
  EXPECT_EQ(RunOnFile({"token", "list"}), 0);
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("ci"), HasSubstr("sample,train"),
                    HasSubstr("never"), Not(HasSubstr(records[0].sha256))));
  EXPECT_EQ(RunOnFile({"token", "revoke", "ci"}), 0);
  EXPECT_EQ(FindTokenOfHash(Records(), HashToken(token)), nullptr);
  EXPECT_EQ(Records().size(), 1u);
  EXPECT_EQ(RunOnFile({"token", "revoke", "ci"}), 1);
}

TEST_F(WeftctlTokenTest, RefusesWhatWouldBeNoToken) {
  const std::vector<std::string> wrong[] = {
      {"token", "create", "a/b", "--tenant=acme"},
      {"token", "create", "ci"},
      {"token", "create", "ci", "--tenant=acme", "--scopes=root"},
      {"token", "create", "ci", "--tenant=acme", "--valid-for=soon"}};
  for (const auto& line : wrong) EXPECT_EQ(RunOnFile(line), 2) << err_.str();
  EXPECT_EQ(Run({"token", "list"}), 2);
  EXPECT_FALSE(std::filesystem::exists(file_));
  EXPECT_EQ(RunOnFile({"token", "create", "ci", "--tenant=acme"}), 0);
  EXPECT_EQ(RunOnFile({"token", "create", "ci", "--tenant=acme"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("revoke it first"));
  // A file that cannot be parsed is not overwritten.
  std::ofstream(file_) << "something else\n";
  EXPECT_EQ(RunOnFile({"token", "create", "new", "--tenant=acme"}), 1);
  EXPECT_EQ(RunOnFile({"token", "list"}), 1);
}

// The file is a symbolic link to itself. File permissions would not do, because
// root may read every file.
TEST_F(WeftctlTokenTest, DoesNotReplaceAFileThatItCannotOpen) {
  std::filesystem::create_symlink(file_, file_);
  EXPECT_EQ(RunOnFile({"token", "create", "ci", "--tenant=acme"}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("cannot read " + file_),
                                HasSubstr("symbolic links")));
  EXPECT_TRUE(std::filesystem::is_symlink(file_));
}

TEST_F(WeftctlTokenTest, RefusesAFolderInPlaceOfAFile) {
  std::filesystem::create_directory(file_);
  EXPECT_EQ(RunOnFile({"token", "list"}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("cannot read " + file_),
                                HasSubstr("Is a directory")));
  EXPECT_EQ(RunOnFile({"token", "create", "ci", "--tenant=acme"}), 1);
  for (const char* const flag : {"--token-file", "--ca"}) {
    EXPECT_EQ(Run({"info", absl::StrCat(flag, "=", file_)}), 2);
    EXPECT_THAT(err_.str(), HasSubstr(absl::StrCat(flag, ": cannot read ")));
  }
}

TEST_F(WeftctlTokenTest, RefusesAnEmptyFile) {
  std::ofstream(file_).flush();
  EXPECT_EQ(Run({"info", "--token-file=" + file_}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--token-file: " + file_ + " is empty"));
}

TEST_F(WeftctlTokenTest, SendsItsTokenButNeverInPlaintextOverANetwork) {
  CannedServer server;
  std::ofstream(file_) << "from-file\n";
  const std::string target = "--server=" + server.target();
  EXPECT_EQ(Run({"info", target, "--token-file=" + file_}), 0);
  EXPECT_EQ(server.wire().authorization(), "Bearer from-file");
  setenv("WEFT_TOKEN", "itself", 1);
  EXPECT_EQ(Run({"info", target}), 0);
  EXPECT_EQ(server.wire().authorization(), "Bearer itself");
  EXPECT_EQ(Run({"info", "--server=10.0.0.1:1"}), 1);
  EXPECT_THAT(err_.str(),
              AllOf(HasSubstr("plaintext"), Not(HasSubstr("itself"))));
  EXPECT_EQ(Run({"info", target, "--ca=/no/such/file"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--ca: cannot read"));
}

TEST(ChannelTest, KnowsWhatIsLocal) {
  for (const char* const target :
       {"127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a",
        "dns:///localhost:1", "ipv4:127.0.0.1:1"}) {
    EXPECT_TRUE(client::IsLocalTarget(target)) << target;
  }
  for (const char* const target : {"127.0.0.1.nip.io:1", "localhost.com:1",
                                   "[::2]:1", "0.0.0.0:1", "", "10.0.0.1:1"}) {
    EXPECT_FALSE(client::IsLocalTarget(target)) << target;
  }
}

TEST(ChannelTest, ACertificateNeedsItsKey) {
  EXPECT_TRUE(absl::IsInvalidArgument(
      client::OpenChannel("localhost:1", {.certificate = "PEM"}).status()));
}

}  // namespace
}  // namespace weft::client::weftctl
