#include "server/tinker/owner.h"

namespace weft::tinker {

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
