#include "server/tinker/accounts.h"

#include <cstdint>

#include "server/tinker/jwt.h"
#include "src/base/sha256.h"

namespace weft::tinker {
namespace {

// Returns a number for a token's id. The SDK's type has numbers, and Weft's ids
// are names.
int64_t KeyNumber(const std::string& token_id) {
  int64_t number = 0;
  for (const char byte : Sha256(token_id).substr(0, 6)) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return number;
}

}  // namespace

absl::Status GetAuthToken(Front& /*front*/, const CallPtr& call,
                          const Respond& respond) {
  respond(JsonReply({{"jwt", call->jwt}}));
  return absl::OkStatus();
}

absl::Status GetApiKey(Front& /*front*/, const CallPtr& call,
                       const Respond& respond) {
  const std::string user = UserOf(call->caller);
  respond(
      JsonReply({{"key_id", KeyNumber(user)},
                 {"name", user},
                 {"note", ""},
                 {"details",
                  {{"org_details", {{"name", OrganizationOf(call->caller)}}},
                   {"user_details", {{"email", ""}}}}}}));
  return absl::OkStatus();
}

absl::Status RefuseKeyDeletion(Front& /*front*/, const CallPtr& /*call*/,
                               const Respond& /*respond*/) {
  return absl::UnimplementedError(
      "an API key is an entry of the server's --auth-tokens-file: ask its "
      "operator to remove the entry");
}

}  // namespace weft::tinker
