#include "server/tinker/owner.h"

#include "absl/strings/str_cat.h"

namespace weft::tinker {

std::string OwnerKey(const Caller& caller) {
  if (caller.tenant().empty() || !caller.sees_all()) return caller.tenant();
  return absl::StrCat(caller.tenant(), "/admin");
}

Json CallerToJson(const Caller& caller) {
  return {{"token", caller.token_id()},
          {"tenant", caller.tenant()},
          {"admin", caller.sees_all()}};
}

Caller CallerFromJson(const Json& json) {
  if (!json.is_object() || json.value("tenant", "").empty()) return Caller();
  TokenRecord record{.id = json.value("token", ""),
                     .tenant = json.value("tenant", "")};
  record.scopes.insert(json.value("admin", false) ? Scope::kAdmin
                                                  : Scope::kTrain);
  return Caller(record);
}

}  // namespace weft::tinker
