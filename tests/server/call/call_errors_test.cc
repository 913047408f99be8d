// Tests which failed calls are kept, and who sees them.
#include "server/call/call_errors.h"

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"

namespace weft::server {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Caller CallerOf(const std::string& tenant, Scope scope) {
  return Caller(TokenEntry{.id = "t", .tenant = tenant, .scopes = {scope}});
}

CallError Error(const std::string& adapter, int second) {
  return {.rpc = "GetAdapter",
          .code = absl::StatusCode::kNotFound,
          .adapter_id = adapter,
          .at = absl::FromUnixSeconds(second)};
}

auto Adapter(const std::string& name) {
  return Field(&CallError::adapter_id, name);
}

TEST(CallErrorsTest, EqualErrorsAreOneAndTheLatestComesFirst) {
  CallErrors errors;
  errors.Add(Caller(), Error("a", 1));
  errors.Add(Caller(), Error("b", 2));
  errors.Add(Caller(), Error("a", 3));
  const auto found = errors.Latest(Caller(), 9);
  ASSERT_THAT(found, ElementsAre(Adapter("a"), Adapter("b")));
  EXPECT_EQ(found[0].count, 2);
  EXPECT_EQ(found[0].at, absl::FromUnixSeconds(3));
  EXPECT_THAT(errors.Latest(Caller(), 1), ElementsAre(Adapter("a")));
}

TEST(CallErrorsTest, ATenantSeesNeitherOthersNorItsAdmins) {
  CallErrors errors;
  const Caller acme = CallerOf("acme", Scope::kTrain);
  const Caller admin = CallerOf("acme", Scope::kAdmin);
  errors.Add(acme, Error("acme~mine", 1));
  errors.Add(admin, Error("birch~theirs", 2));
  EXPECT_THAT(errors.Latest(acme, 9), ElementsAre(Adapter("mine")));
  EXPECT_THAT(errors.Latest(CallerOf("birch", Scope::kRead), 9), IsEmpty());
  EXPECT_THAT(errors.Latest(admin, 9),
              ElementsAre(Adapter("birch~theirs"), Adapter("acme~mine")));
}

TEST(CallErrorsTest, ATenantWithManyErrorsForgetsItsOwnOldest) {
  CallErrors errors;
  const Caller noisy = CallerOf("noisy", Scope::kTrain);
  const Caller quiet = CallerOf("quiet", Scope::kTrain);
  errors.Add(quiet, Error("quiet~a", 0));
  const int many = static_cast<int>(CallErrors::kMaxKept) + 5;
  for (int i = 1; i <= many; ++i) {
    errors.Add(noisy, Error(absl::StrCat("noisy~", i), i));
  }
  const auto found = errors.Latest(noisy, 1000);
  EXPECT_THAT(found, SizeIs(CallErrors::kMaxKept));
  EXPECT_EQ(found.back().adapter_id, "6");
  EXPECT_THAT(errors.Latest(quiet, 9), ElementsAre(Adapter("a")));
}

TEST(CallErrorsTest, TheNumberOfTenantsIsBoundedAndTheOldestIsForgotten) {
  CallErrors errors;
  const auto add = [&errors](int tenant, int second) {
    errors.Add(CallerOf(absl::StrCat("t", tenant), Scope::kTrain),
               Error("", second));
  };
  const int most = static_cast<int>(CallErrors::kMaxOwners);
  for (int i = 0; i < most; ++i) add(i, i);
  add(0, most);
  for (int i = most; i < most + 10; ++i) add(i, i + 1);
  std::set<std::string> tenants;
  for (const CallError& error : errors.Latest(Caller(), SIZE_MAX)) {
    tenants.insert(error.tenant);
  }
  EXPECT_THAT(tenants, SizeIs(CallErrors::kMaxOwners));
  EXPECT_TRUE(tenants.contains("t0"));
  for (int i = 1; i <= 10; ++i) {
    EXPECT_FALSE(tenants.contains(absl::StrCat("t", i))) << i;
  }
}

}  // namespace
}  // namespace weft::server
