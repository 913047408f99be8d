// Each place of credentials, in its order, and what is said if it is wrong.
#include "src/store/credentials.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/clock.h"
#include "tests/store/canned_http.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kVariables[] = {"AWS_ACCESS_KEY_ID",
                                      "AWS_SECRET_ACCESS_KEY",
                                      "AWS_SESSION_TOKEN",
                                      "AWS_WEB_IDENTITY_TOKEN_FILE",
                                      "AWS_ROLE_ARN",
                                      "AWS_ENDPOINT_URL_STS",
                                      "AWS_SHARED_CREDENTIALS_FILE",
                                      "AWS_PROFILE",
                                      "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                                      "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
                                      "AWS_EC2_METADATA_DISABLED",
                                      "AWS_EC2_METADATA_SERVICE_ENDPOINT",
                                      "HOME",
                                      "NO_PROXY"};

std::string After(absl::Duration duration) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + duration,
                          absl::UTCTimeZone());
}

std::string Json(const std::string& id, absl::Duration life) {
  return Answer("200 OK",
                absl::StrCat("{\"AccessKeyId\": \"", id,
                             "\", \"SecretAccessKey\": \"secret\", \"Token\": "
                             "\"token\", \"Expiration\": \"",
                             After(life), "\"}"));
}

class CredentialsTest : public ::testing::Test {
 protected:
  CredentialsTest() {
    for (const char* name : kVariables) {
      const char* value = std::getenv(name);
      before_.emplace_back(name, value != nullptr ? value : "");
      unsetenv(name);
    }
    Set("HOME", folder_.path());
    Set("AWS_EC2_METADATA_DISABLED", "true");
    Set("NO_PROXY", "127.0.0.1");
  }
  ~CredentialsTest() override {
    for (const auto& [name, value] : before_) {
      value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
    }
  }

  static void Set(const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
  }
  std::string KeyId() {
    const auto found = source_.Get();
    return found.ok() ? found->key_id : found.status().ToString();
  }

  std::vector<std::pair<const char*, std::string>> before_;
  TempFolder folder_;
  HttpClient http_;
  CredentialSource source_{&http_, "eu-west-1"};
};

TEST_F(CredentialsTest, TheEnvironmentComesFirst) {
  Set("AWS_ACCESS_KEY_ID", "id");
  EXPECT_THAT(source_.Get(), IsStatus(absl::StatusCode::kInvalidArgument,
                                      "but not AWS_SECRET_ACCESS_KEY"));
  Set("AWS_SECRET_ACCESS_KEY", "secret");
  Set("AWS_SESSION_TOKEN", "token");
  Set("AWS_SHARED_CREDENTIALS_FILE", "missing");
  const auto found = source_.Get();
  ASSERT_THAT(found, IsOk());
  EXPECT_EQ(found->key_id, "id");
  EXPECT_EQ(found->secret_key, "secret");
  EXPECT_EQ(found->session_token, "token");
  EXPECT_EQ(found->expires, absl::InfiniteFuture());
}

constexpr char kFile[] =
    "# comment\n[default]\naws_access_key_id = d\n"
    "aws_secret_access_key=s=1\n\n[ other ]\r\nAWS_ACCESS_KEY_ID=o\r\n"
    "aws_secret_access_key = t\r\naws_session_token = u\r\nregion = x\r\n"
    "[broken]\naws_access_key_id = b\n";

TEST_F(CredentialsTest, AProfileIsReadFromItsFile) {
  const auto profile = ParseProfile(kFile, "default");
  ASSERT_THAT(profile, IsOk());
  EXPECT_EQ(profile->key_id, "d");
  EXPECT_EQ(profile->secret_key, "s=1");
  EXPECT_EQ(profile->session_token, "");
  EXPECT_EQ(ParseProfile(kFile, "other")->session_token, "u");
  EXPECT_THAT(ParseProfile(kFile, "none"),
              IsStatus(absl::StatusCode::kNotFound, "no profile [none]"));
  EXPECT_THAT(ParseProfile(kFile, "broken"),
              IsStatus(absl::StatusCode::kInvalidArgument, "profile [broken]"));
}

TEST_F(CredentialsTest, AFileThatIsAskedForMustBeThere) {
  Set("AWS_SHARED_CREDENTIALS_FILE", folder_.path() + "/none");
  EXPECT_THAT(source_.Get(),
              IsStatus(absl::StatusCode::kInvalidArgument, "/none: "));
  Set("AWS_SHARED_CREDENTIALS_FILE", folder_.Write("file", kFile));
  EXPECT_EQ(KeyId(), "d");
}

TEST_F(CredentialsTest, AProfileMayBeNamed) {
  Set("AWS_SHARED_CREDENTIALS_FILE", folder_.Write("file", kFile));
  Set("AWS_PROFILE", "none");
  EXPECT_THAT(source_.Get(), IsStatus(absl::StatusCode::kInvalidArgument,
                                      "no profile [none]"));
  Set("AWS_PROFILE", "other");
  EXPECT_EQ(KeyId(), "o");
}

TEST_F(CredentialsTest, APodsTokenIsExchanged) {
  CannedHttp server([](const std::string& request) {
    if (!absl::StrContains(request, "WebIdentityToken=pod%2Btoken") ||
        !absl::StrContains(request, "RoleArn=arn%3Aaws%3Arole") ||
        absl::StrContains(request, "uthorization:")) {
      return Answer("400 X",
                    "<ErrorResponse><Error><Code>InvalidIdentityToken</Code>"
                    "</Error></ErrorResponse>");
    }
    return Answer(
        "200 OK",
        absl::StrCat("<AssumeRoleWithWebIdentityResponse "
                     "xmlns=\"x\"><AssumeRoleWithWebIdentityResult>"
                     "<Credentials><AccessKeyId>pod</AccessKeyId>"
                     "<SecretAccessKey>s</SecretAccessKey><SessionToken>t"
                     "</SessionToken><Expiration>",
                     After(absl::Hours(1)),
                     "</Expiration></Credentials>"
                     "</AssumeRoleWithWebIdentityResult>"
                     "</AssumeRoleWithWebIdentityResponse>"));
  });
  Set("AWS_ENDPOINT_URL_STS", server.url());
  Set("AWS_WEB_IDENTITY_TOKEN_FILE", folder_.Write("token", "wrong"));
  EXPECT_THAT(source_.Get(), IsStatus(absl::StatusCode::kInvalidArgument,
                                      "but not AWS_ROLE_ARN"));
  Set("AWS_ROLE_ARN", "arn:aws:role");
  EXPECT_THAT(source_.Get(),
              IsStatus(absl::StatusCode::kPermissionDenied,
                       "arn:aws:role: HTTP 400 InvalidIdentityToken"));
  folder_.Write("token", "pod+token\n");
  const auto found = source_.Get();
  ASSERT_THAT(found, IsOk());
  EXPECT_EQ(found->key_id, "pod");
  EXPECT_EQ(found->session_token, "t");
  EXPECT_NEAR(absl::ToDoubleSeconds(found->expires - SteadyNow()), 3600, 60);
  // They are kept.
  EXPECT_EQ(KeyId(), "pod");
  EXPECT_EQ(server.requests().size(), 2u);
}

TEST_F(CredentialsTest, AContainersRoleIsAskedForWithItsToken) {
  CannedHttp server([](const std::string& request) {
    return absl::StrContains(request, "authorization: pod\r\n")
               ? Json("container", absl::Hours(1))
               : Answer("401 X");
  });
  Set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url() + "/v1");
  EXPECT_THAT(source_.Get(),
              IsStatus(absl::StatusCode::kPermissionDenied, "HTTP 401"));
  Set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", folder_.Write("t", "pod\n"));
  EXPECT_EQ(KeyId(), "container");
}

TEST_F(CredentialsTest, AMachinesRoleIsAskedForWithAToken) {
  CannedHttp server([](const std::string& request) {
    if (absl::StartsWith(request, "PUT /latest/api/token ")) {
      return Answer("200 OK", "imds");
    }
    if (!absl::StrContains(request, "x-aws-ec2-metadata-token: imds\r\n")) {
      return Answer("401 X");
    }
    return absl::StrContains(request, "security-credentials/role ")
               ? Json("machine", absl::Hours(1))
               : Answer("200 OK", "role\n");
  });
  Set("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url());
  EXPECT_THAT(source_.Get(),
              IsStatus(absl::StatusCode::kPermissionDenied,
                       "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"));
  Set("AWS_EC2_METADATA_DISABLED", "false");
  EXPECT_EQ(KeyId(), "machine");
}

TEST_F(CredentialsTest, TheyAreRenewedAndKeptWhileThatFails) {
  int calls = 0;
  // The first live for a second, and so are renewed after half of it.
  CannedHttp server([&](auto&) {
    ++calls;
    return calls == 1   ? Json("first", absl::Seconds(2))
           : calls == 2 ? Answer("500 X")
                        : Json("next", absl::Hours(1));
  });
  Set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url());
  EXPECT_EQ(KeyId(), "first");
  EXPECT_EQ(KeyId(), "first");
  EXPECT_EQ(server.requests().size(), 1u);
  const absl::Time start = SteadyNow();
  while (server.requests().size() < 2 &&
         SteadyNow() - start < absl::Seconds(5)) {
    EXPECT_EQ(KeyId(), "first");
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(server.requests().size(), 2u);
  source_.Expire("other");
  source_.Expire("first");
  EXPECT_EQ(KeyId(), "next");
}

TEST_F(CredentialsTest, OthersGoOnWithThoseThatHoldWhileOneAsks) {
  int calls = 0;
  CannedHttp server([&](auto&) {
    // The first live for two seconds, and so are renewed after one.
    return ++calls == 1 ? Json("first", absl::Seconds(2)) : kHang;
  });
  Set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url());
  EXPECT_EQ(KeyId(), "first");
  absl::SleepFor(absl::Milliseconds(1100));
  std::thread asks([this] { (void)source_.Get(); });
  while (server.requests().size() < 2) absl::SleepFor(absl::Milliseconds(1));
  const absl::Time start = SteadyNow();
  EXPECT_EQ(KeyId(), "first");
  EXPECT_LT(SteadyNow() - start, absl::Milliseconds(500));
  http_.Stop();
  asks.join();
}

TEST_F(CredentialsTest, ExpiredOnesThatCannotBeRenewedAreUnavailable) {
  int calls = 0;
  CannedHttp server([&](auto&) {
    return ++calls == 1 ? Json("first", absl::Hours(1)) : Answer("500 X");
  });
  Set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url());
  EXPECT_EQ(KeyId(), "first");
  source_.Expire("first");
  const auto found = source_.Get();
  EXPECT_THAT(found, IsStatus(absl::StatusCode::kUnavailable, "have expired"));
  EXPECT_THAT(found.status().ToString(), Not(HasSubstr("secret\"")));
}

}  // namespace
}  // namespace weft::store
