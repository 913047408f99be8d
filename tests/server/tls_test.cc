#include "server/tls.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/server/server_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_certificates.h"

namespace weft {
namespace {

class TlsTest : public ServerTest {
 protected:
  TlsTest()
      : folder_(absl::StrCat(::testing::TempDir(), "/weft_tls_", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~TlsTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& contents) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path + ".new") << contents;
    std::filesystem::rename(path + ".new", path);
    return path;
  }

  ServerOptions TlsOptions(const Identity& identity) {
    ServerOptions options = TestOptions();
    options.tls_cert = Write("cert.pem", identity.certificate);
    options.tls_key = Write("key.pem", identity.key);
    return options;
  }

  // Returns the health over a new connection. `own` is the client's
  // certificate.
  int Health(const Identity& authority, const Identity& own = {}) {
    grpc::ChannelArguments arguments;
    // Without this, channels with equal arguments would share a connection.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return HealthOf(grpc::CreateCustomChannel(
                        frontend_->address(),
                        grpc::SslCredentials(
                            {authority.certificate, own.key, own.certificate}),
                        arguments),
                    "liveness");
  }

  // Returns the days until the certificate expires, from the metrics page.
  double DaysLeft() const {
    return (MetricValue("weft_tls_certificate_expiry_timestamp_seconds") -
            absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch())) /
           86400;
  }

  static constexpr int kNoConnection =
      -static_cast<int>(grpc::StatusCode::UNAVAILABLE);

  const std::string folder_;
  const Identity authority_ = MakeAuthority("first");
};

TEST_F(TlsTest, ServesThoseWhoTrustItsAuthority) {
  StartServer(TlsOptions(MakeIdentity(authority_, "server")));
  EXPECT_EQ(Health(authority_), kServing);
  EXPECT_EQ(Health(MakeAuthority("other")), kNoConnection);
  EXPECT_EQ(HealthOf(grpc::CreateChannel(frontend_->address(),
                                         grpc::InsecureChannelCredentials()),
                     "liveness"),
            kNoConnection);
}

TEST_F(TlsTest, MutualTlsWantsACertificateOfItsAuthority) {
  ServerOptions options = TlsOptions(MakeIdentity(authority_, "server"));
  const Identity clients = MakeAuthority("clients");
  options.tls_client_ca = Write("ca.pem", clients.certificate);
  StartServer(options);
  EXPECT_EQ(Health(authority_, MakeIdentity(clients, "alice")), kServing);
  EXPECT_EQ(Health(authority_), kNoConnection);
  EXPECT_EQ(Health(authority_, MakeIdentity(authority_, "mallory")),
            kNoConnection);
}

TEST_F(TlsTest, NewFilesServeNewConnectionsWithoutARestart) {
  StartServer(TlsOptions(MakeIdentity(authority_, "server")));
  EXPECT_NEAR(DaysLeft(), 1, 0.01);
  const Identity next = MakeAuthority("second");
  const Identity renewed = MakeIdentity(next, "server", /*days=*/30);
  // A new key changes nothing until its certificate arrives.
  Write("key.pem", renewed.key);
  absl::SleepFor(absl::Milliseconds(1800));
  EXPECT_EQ(Health(authority_), kServing);
  EXPECT_NEAR(DaysLeft(), 1, 0.01);
  Write("cert.pem", renewed.certificate);
  EXPECT_TRUE(Eventually([&] { return Health(next) == kServing; }));
  EXPECT_NEAR(DaysLeft(), 30, 0.01);
  EXPECT_EQ(Health(authority_), kNoConnection);
}

TEST(TlsFilesTest, GoodFilesPass) {
  const Identity authority = MakeAuthority("a");
  const Identity identity = MakeIdentity(authority, "server");
  EXPECT_THAT(CheckTlsFiles({identity.certificate, identity.key, ""}), IsOk());
  EXPECT_THAT(CheckTlsFiles(
                  {identity.certificate, identity.key, authority.certificate}),
              IsOk());
}

struct BadFiles {
  const char* name;
  TlsFiles files;
  const char* message;
};

TEST(TlsFilesTest, BadFilesAreRefusedByFlag) {
  const Identity authority = MakeAuthority("a");
  const Identity identity = MakeIdentity(authority, "server");
  const Identity other = MakeIdentity(authority, "server");
  const Identity old = MakeIdentity(authority, "server", /*days=*/-1);
  const BadFiles cases[] = {
      {"no certificate", {"", identity.key, ""}, "--tls-cert: the file holds"},
      {"a key as certificate",
       {identity.key, identity.key, ""},
       "--tls-cert: the file holds no certificate"},
      {"no key", {identity.certificate, "x", ""}, "--tls-key: the file holds"},
      {"another key",
       {identity.certificate, other.key, ""},
       "--tls-key: the key is not that of --tls-cert"},
      {"expired", {old.certificate, old.key, ""}, "has expired"},
      {"no authority",
       {identity.certificate, identity.key, "x"},
       "--tls-client-ca: the file holds no certificate"},
  };
  for (const BadFiles& bad : cases) {
    EXPECT_THAT(CheckTlsFiles(bad.files),
                IsStatus(absl::StatusCode::kFailedPrecondition, bad.message))
        << bad.name;
  }
}

TEST_F(TlsTest, AServerWithoutItsFilesDoesNotStart) {
  ServerOptions options = TlsOptions(MakeIdentity(authority_, "server"));
  options.tls_key = folder_ + "/none.pem";
  const auto frontend =
      Frontend::Start(options, std::make_shared<prometheus::Registry>());
  EXPECT_THAT(frontend, IsStatus(absl::StatusCode::kNotFound,
                                 "--tls-key: opening the file"));
}

}  // namespace
}  // namespace weft
