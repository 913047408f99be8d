#include "src/base/options/options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/address.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

EngineOptions GoodEngine() {
  EngineOptions options;
  options.model_dir = "model";
  return options;
}

TEST(EngineOptionsTest, DefaultsAreValidButForTheModel) {
  EXPECT_TRUE(GoodEngine().Validate().ok());
  const absl::Status status = EngineOptions().Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--model is required"));
}

TEST(EngineOptionsTest, RefusesMoreForATenantThanForAll) {
  EngineOptions options = GoodEngine();
  options.max_adapters = 8;
  options.max_adapters_per_tenant = 9;
  EXPECT_THAT(
      std::string(options.Validate().message()),
      HasSubstr("--max-adapters-per-tenant=9 is above --max-adapters=8"));
  options.max_adapters_per_tenant = 8;
  EXPECT_TRUE(options.Validate().ok());
}

TEST(EngineOptionsTest, OnlyAStoreHasSeveralLogs) {
  EngineOptions options = GoodEngine();
  options.logs = 2;
  const std::string refused = "--logs=2 needs --state:";
  EXPECT_THAT(std::string(options.Validate().message()), HasSubstr(refused));
  options.state_dir = "state";
  EXPECT_THAT(std::string(options.Validate().message()), HasSubstr(refused));
  options.logs = 1;
  EXPECT_TRUE(options.Validate().ok());
  options.state_dir = "";
  options.state = "s3://bucket/prefix";
  options.logs = 1000;
  EXPECT_TRUE(options.Validate().ok());
}

TEST(TenantWeightsTest, ReadsEntries) {
  EXPECT_TRUE(ParseTenantWeights("")->empty());
  const auto weights = ParseTenantWeights("alice=4,bob.b=1000").value();
  EXPECT_THAT(weights, ElementsAre(Pair("alice", 4), Pair("bob.b", 1000)));
}

TEST(TenantWeightsTest, RefusesByEntry) {
  for (const char* bad :
       {"alice", "alice=", "alice=0", "alice=1001", "alice=-1", "alice=1.5",
        "alice=2=3", "=4", "a/b=4", " alice=4", "other=4"}) {
    const absl::Status status =
        ParseTenantWeights(absl::StrCat("bob=1,", bad)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(absl::StrCat("--tenant-weights: entry \"", bad, "\"")));
  }
  EXPECT_THAT(std::string(ParseTenantWeights("a=1,b=2,a=3").status().message()),
              HasSubstr("entry \"a=3\" names a tenant again"));
  EngineOptions options = GoodEngine();
  options.tenant_weights = "alice=0";
  EXPECT_THAT(std::string(options.Validate().message()),
              HasSubstr("entry \"alice=0\""));
}

TEST(ServerOptionsTest, DefaultsAreValid) {
  EXPECT_TRUE(ServerOptions().Validate().ok());
}

TEST(ServerOptionsTest, ListensBeyondLoopbackOnlyOnATrustedNetwork) {
  for (std::string ServerOptions::*listen :
       {&ServerOptions::listen, &ServerOptions::tinker_listen}) {
    ServerOptions options;
    options.*listen = "0.0.0.0:50051";
    EXPECT_THAT(std::string(options.Validate().message()),
                HasSubstr("behind the edge (deploy/edge), or give "
                          "--trusted-network"));
    options.trusted_network = true;
    EXPECT_TRUE(options.Validate().ok());
    options.auth_tokens_file = "tokens";
    EXPECT_THAT(std::string(options.Validate().message()),
                HasSubstr("clients would send their tokens in plaintext"));
    options.*listen = "127.0.0.1:50051";
    EXPECT_TRUE(options.Validate().ok());
  }
}

TEST(ServerOptionsTest, ListensOnAUnixSocketOfAnyTrust) {
  ServerOptions options;
  options.listen = "unix:/run/weft/grpc.sock";
  options.auth_tokens_file = "tokens";
  EXPECT_TRUE(options.Validate().ok());
  EXPECT_EQ(UnixSocketPath(options.listen), "/run/weft/grpc.sock");
  EXPECT_EQ(UnixSocketPath("127.0.0.1:50051"), "");
  for (const std::string& path : {std::string(), std::string(108, 'x')}) {
    options.listen = "unix:" + path;
    EXPECT_THAT(std::string(options.Validate().message()),
                HasSubstr("has no path of 1 to 107 bytes"));
  }
}

TEST(ServerOptionsTest, KnowsLoopbackAddresses) {
  EXPECT_TRUE(IsLoopback("127.0.0.1"));
  EXPECT_TRUE(IsLoopback("127.1.2.3"));
  EXPECT_TRUE(IsLoopback("::1"));
  EXPECT_TRUE(IsLoopback("localhost"));
  EXPECT_FALSE(IsLoopback("0.0.0.0"));
  EXPECT_FALSE(IsLoopback("127.evil.example"));
  EXPECT_FALSE(IsLoopback("127.0.0.1.example.com"));
  EXPECT_FALSE(IsLoopback("::"));
  EXPECT_FALSE(IsLoopback("10.0.0.1"));
}

struct AddressRow {
  std::string name;
  const char* address;
  const char* host;  // nullptr if the text is refused.
  int port;
};

class ParseHostPortTest : public ::testing::TestWithParam<AddressRow> {};

TEST_P(ParseHostPortTest, SplitsOrRefuses) {
  const AddressRow& row = GetParam();
  const auto parsed = ParseHostPort("listen", row.address);
  if (row.host == nullptr) {
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("--listen="));
    return;
  }
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->host, row.host);
  EXPECT_EQ(parsed->port, row.port);
}

INSTANTIATE_TEST_SUITE_P(
    Addresses, ParseHostPortTest,
    ::testing::Values(AddressRow{"V4WithPort0", "127.0.0.1:0", "127.0.0.1", 0},
                      AddressRow{"V6InBrackets", "[::1]:50051", "::1", 50051},
                      AddressRow{"NameWithLastPort", "host.example:65535",
                                 "host.example", 65535},
                      AddressRow{"NoPort", "127.0.0.1", nullptr, 0},
                      AddressRow{"NoHost", ":80", nullptr, 0},
                      AddressRow{"Empty", "", nullptr, 0},
                      AddressRow{"V6WithoutBrackets", "::1:80", nullptr, 0},
                      AddressRow{"PortTooLarge", "host:65536", nullptr, 0},
                      AddressRow{"NegativePort", "host:-1", nullptr, 0},
                      AddressRow{"PortByName", "host:http", nullptr, 0},
                      AddressRow{"EmptyPort", "host:", nullptr, 0}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace weft
