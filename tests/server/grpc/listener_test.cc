// Tests on which addresses a Listener listens.
#include "server/grpc/listener.h"

#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

// Replaces the C library's function in this program. "nowhere.test" has no
// address. "two.test" has two: 192.0.2.1, which this machine does not have, and
// loopback.
extern "C" int getaddrinfo(const char* host, const char* service,
                           const addrinfo* hints, addrinfo** found) {
  static const auto resolve =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string_view name = host == nullptr ? "" : host;
  if (name == "nowhere.test") return EAI_NONAME;
  if (name != "two.test") return resolve(host, service, hints, found);
  const int error = resolve("192.0.2.1", service, hints, found);
  if (error != 0) return error;
  return resolve("127.0.0.1", service, hints, &(*found)->ai_next);
}

namespace weft::server {
namespace {

absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& listen) {
  static prometheus::Registry registry;
  return Listener::Bind(listen, 10, &registry);
}

TEST(ListenerTest, OneAddressOfAHostIsEnough) {
  const auto listener = Bind("two.test:0").value();
  EXPECT_FALSE(listener->address().ends_with(":0"));
}

TEST(ListenerTest, AHostWithoutAnAddressIsRefused) {
  EXPECT_EQ(Bind("nowhere.test:0").status(),
            absl::UnavailableError("cannot listen on --listen=nowhere.test:0: "
                                   "the host has no address"));
  EXPECT_EQ(
      Bind("192.0.2.1:0").status(),
      absl::UnavailableError("cannot listen on --listen=192.0.2.1:0: Cannot "
                             "assign requested address"));
}

TEST(ListenerTest, TakesThePlaceOfASocketThatAnEndedServerLeft) {
  const TempFolder folder;
  const std::string path = folder.Write("socket", "a file of the operator");
  EXPECT_FALSE(Bind("unix:" + path).ok());
  EXPECT_TRUE(std::filesystem::remove(path));
  sockaddr_un place = {.sun_family = AF_UNIX, .sun_path = {}};
  path.copy(place.sun_path, sizeof(place.sun_path) - 1);
  {
    const UniqueFd ended(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(
        bind(ended.get(), reinterpret_cast<sockaddr*>(&place), sizeof(place)),
        0);
  }
  EXPECT_TRUE(Bind("unix:" + path).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(ListenerTest, LeavesTheSocketOfAnotherServer) {
  const TempFolder folder;
  const std::string path = folder.path() + "/socket";
  {
    const auto listener = Bind("unix:" + path);
    ASSERT_TRUE(listener.ok());
    std::filesystem::remove(path);
    EXPECT_TRUE(Bind("unix:" + path).ok());  // It removes its own.
    EXPECT_FALSE(std::filesystem::exists(path));
    folder.Write("socket", "of another");
  }
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST(ListenerTest, APortThatIsTakenInOneFamilyIsRefusedForBoth) {
  const UniqueFd taken(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (taken.get() < 0) GTEST_SKIP() << "this machine has no IPv6";
  const int on = 1;
  setsockopt(taken.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  sockaddr_in6 place = {};
  place.sin6_family = AF_INET6;
  auto* const raw = reinterpret_cast<sockaddr*>(&place);
  socklen_t size = sizeof(place);
  ASSERT_EQ(bind(taken.get(), raw, size), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  ASSERT_EQ(getsockname(taken.get(), raw, &size), 0);
  const std::string address = absl::StrCat("0.0.0.0:", ntohs(place.sin6_port));
  EXPECT_EQ(Bind(address).status(), absl::UnavailableError(absl::StrCat(
                                        "cannot listen on --listen=", address,
                                        ": Address already in use: choose "
                                        "another port, or port 0 for any free "
                                        "one")));
}

}  // namespace
}  // namespace weft::server
