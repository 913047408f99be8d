#include "server/tinker/routes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "server/http/replies.h"
#include "server/http/url.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/logs.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/body.h"
#include "server/wire/parse_cost.h"
#include "server/wire/status_conversion.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"

namespace weft::server::tinker {
namespace {

// The largest body of a route that is not `large`. The limit is low, because
// the front keeps names and metadata from such bodies in memory.
constexpr uint64_t kMaxSmallBody = 256 << 10;

// Handlers that answer while the server starts.
constexpr Action kAlways[] = {GetHealth, GetClientConfig, GetDynamicConfig,
                              TakeTelemetry, RetrieveFuture};

bool Matches(const Route& route, const Call& call,
             const std::vector<std::string>& parts,
             std::vector<std::string>* args) {
  if (call.http.method != route.method) return false;
  const std::vector<absl::string_view> pattern =
      absl::StrSplit(route.path, '/');
  if (pattern.size() != parts.size()) return false;
  args->clear();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (pattern[i] == "*") {
      args->push_back(parts[i]);
    } else if (pattern[i] != parts[i]) {
      return false;
    }
  }
  return true;
}

// Parses the call's target into `args` and `query`, and returns its route.
absl::StatusOr<const Route*> FindRoute(Call* call) {
  if (absl::StartsWith(call->http.target, "/oai/")) {
    return absl::NotFoundError(
        "OpenAI's API is served by `python -m weft openai --tinker HOST:PORT`, "
        "and behind the edge by this address, too");
  }
  WEFT_ASSIGN_OR_RETURN(Url url, ParseUrl(call->http.target, "/api/v1/"));
  call->query = std::move(url.query);
  for (const Route& route : Routes()) {
    if (Matches(route, *call, url.parts, &call->args)) return &route;
  }
  return absl::NotFoundError("there is no such path");
}

bool IsJwt(const std::string& key) { return absl::StartsWith(key, kJwtPrefix); }

// Returns the hash of the access token that an API key or a JWT stands for;
// empty if there is none. Errors: UNAUTHENTICATED if the JWT is not valid, or
// the key does not begin with kKeyPrefix.
absl::StatusOr<std::string> TokenHashOf(absl::string_view key) {
  if (absl::StartsWith(key, kJwtPrefix)) return ReadJwt(key, absl::Now());
  if (absl::ConsumePrefix(&key, kKeyPrefix)) return HashToken(key);
  return absl::UnauthenticatedError("an API key begins with tml-");
}

// Sets call->caller and `token_hash` from the access token. The authenticator
// counts and logs a refusal. Errors: those of TokenHashOf and of
// Authenticator::CheckHash.
absl::Status FindCaller(Authenticator& authenticator, const Route& route,
                        Call* call) {
  const HttpRequest& http = call->http;
  const absl::StatusOr<std::string> hash = TokenHashOf(http.api_key);
  const absl::string_view target = http.target;
  absl::StatusOr<Caller> caller = authenticator.CheckHash(
      RpcPath(route.scope), hash.value_or(""),
      absl::StrCat(http.method, " ", target.substr(0, target.find('?'))),
      http.peer);
  WEFT_RETURN_IF_ERROR(hash.status());
  WEFT_ASSIGN_OR_RETURN(call->caller, std::move(caller));
  call->token_hash = *hash;
  return absl::OkStatus();
}

// Returns the most bytes of a route's body, before and after inflation.
uint64_t MaxBody(const Front& front, const Route& route) {
  const auto most =
      static_cast<uint64_t>(front.port.core()->options.max_message_bytes);
  return route.large ? most : std::min(most, kMaxSmallBody);
}

// Inflates the body. Charges the caller for it and its parsed form, and then
// parses it if it is JSON or the route has a `read`.
// Threads: any.
absl::Status ReadBody(const Front& front, const Route& route, Call* call) {
  HttpRequest& http = call->http;
  call->body = Json::object();
  FairBudget* const memory = front.port.core()->memory.get();
  const uint64_t most = MaxBody(front, route);
  if (!http.content_encoding.empty()) {
    WEFT_ASSIGN_OR_RETURN(
        call->charge,
        memory->Reserve(call->owner(), static_cast<int64_t>(most)));
  }
  WEFT_RETURN_IF_ERROR(Decode(http.content_encoding, most, &http.body));
  const auto size = static_cast<int64_t>(http.body.size());
  if (absl::StrContains(http.content_type, kProtobufType)) {
    google::protobuf::io::ArrayInputStream wire(http.body.data(),
                                                static_cast<int>(size));
    WEFT_ASSIGN_OR_RETURN(
        call->charge,
        ChargeMessage(memory, call->owner(),
                      *ForwardBackwardRequest::descriptor(), &wire, size));
  } else {
    WEFT_ASSIGN_OR_RETURN(
        call->charge,
        memory->Reserve(call->owner(), size + ParsedJsonBytes(http.body)));
    WEFT_ASSIGN_OR_RETURN(call->body, ParseObject(http.body));
  }
  return route.read == nullptr ? absl::OkStatus() : route.read(front, call);
}

// Returns the route of a request. Unless the route is open, sets call->caller,
// `token_hash` and `jwt` from the API key or the JWT in its place. A server
// without tokens takes any key, and none. Then clears the key and the
// Authorization header. If Judge returns an error, `call` must not be used.
absl::StatusOr<const Route*> Judge(const Front& front, Call* call) {
  WEFT_ASSIGN_OR_RETURN(const Route* const route, FindRoute(call));
  if (!route->open) {
    const auto& authenticator = front.port.core()->authenticator;
    if (authenticator != nullptr) {
      WEFT_RETURN_IF_ERROR(FindCaller(*authenticator, *route, call));
    }
    if (IsJwt(call->http.api_key)) call->jwt = call->http.api_key;
  }
  call->http.api_key.clear();
  call->http.authorization.clear();
  return route;
}

// Does what the route's action says. Errors: those of the handler.
absl::Status ActHere(Front& front, const Route& route, const CallPtr& call,
                     const Respond& respond) {
  if (const auto* const handler = std::get_if<Handler*>(&route.action)) {
    return (**handler)(front, call, respond);
  }
  Reply(respond, std::get<Answer*>(route.action)(front, *call));
  return absl::OkStatus();
}

// Does what the route says, perhaps later. Errors: those of the handler.
absl::Status Act(Front& front, const Route& route, const CallPtr& call,
                 const Respond& respond) {
  if (const auto* const refusal = std::get_if<const char*>(&route.action)) {
    return absl::UnimplementedError(*refusal);
  }
  const auto serve = [&front, &route, call, respond] {
    const absl::Status refused = ActHere(front, route, call, respond);
    if (!refused.ok()) Fail(respond, refused);
  };
  if (IsElsewhere(front, route, call, respond, serve)) return absl::OkStatus();
  return ActHere(front, route, call, respond);
}

// Serves a call whose body was read with the outcome `read`.
void ServeRead(Front& front, const Route& route, const absl::Status& read,
               const std::shared_ptr<Call>& call, const Respond& respond) {
  if (absl::IsResourceExhausted(read) && !RetryMillis(read)) {
    return respond(JsonReply({{"detail", std::string(read.message())}}, 413));
  }
  const absl::Status refused =
      read.ok() ? Act(front, route, call, respond) : read;
  // The handler has copied what it needs of http.body, so this releases the
  // memory of http.body and its reservation in the budget.
  call->http.body.clear();
  call->http.body.shrink_to_fit();
  call->http.reserved.reset();
  if (!refused.ok()) respond(ErrorReply(refused));
}

void Serve(Front& front, const Route& route, const std::shared_ptr<Call>& call,
           const Respond& respond) {
  if (!front.restored && !std::ranges::count(kAlways, route.action)) {
    return respond(
        ErrorReply(absl::UnavailableError("the server is starting")));
  }
  // Telemetry is dropped, so it is not even inflated.
  if (route.action == Action(TakeTelemetry)) {
    return ServeRead(front, route, absl::OkStatus(), call, respond);
  }
  const bool quick = !route.large || (route.read == nullptr &&
                                      call->http.content_encoding.empty() &&
                                      call->http.body.size() <= kMaxSmallBody);
  if (quick) {
    return ServeRead(front, route, ReadBody(front, route, call.get()), call,
                     respond);
  }
  front.bodies.Post(
      [&front, &route, call = call, respond = respond]() mutable {
        absl::Status read = ReadBody(front, route, call.get());
        front.port.Post([&front, &route, read = std::move(read),
                         call = std::move(call), respond = std::move(respond)] {
          ServeRead(front, route, read, call, respond);
        });
      },
      call->owner());
}

}  // namespace

Admission Admit(Front& front, const HttpRequest& header) {
  const auto call = std::make_shared<Call>();
  call->http = header;
  const absl::StatusOr<const Route*> route = Judge(front, call.get());
  if (!route.ok()) {
    HttpReply refusal = ErrorReply(route.status());
    // After this header the SDK exchanges its key for another JWT.
    if (absl::IsUnauthenticated(route.status()) && IsJwt(header.api_key)) {
      refusal.headers.emplace_back("WWW-Authenticate",
                                   R"(Bearer error="invalid_token")");
    }
    return {.refusal = std::move(refusal)};
  }
  return {.max_body_bytes = MaxBody(front, **route),
          // A health check must not wait for other requests of its tenant.
          .holder = (*route)->action == Action(GetHealth) ? "" : call->owner(),
          .serve = [&front, route = *route, call](HttpRequest request,
                                                  const Respond& respond) {
            call->http.body = std::move(request.body);
            call->http.reserved = std::move(request.reserved);
            Serve(front, *route, call, respond);
          }};
}

}  // namespace weft::server::tinker
