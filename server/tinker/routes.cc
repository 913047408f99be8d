#include "server/tinker/routes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/tinker/archives.h"
#include "server/tinker/body.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sampling.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/training.h"
#include "server/tinker/url.h"
#include "server/tinker/weights.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// A route. An asterisk in `path` stands for any one part. The token must have
// the scope of the RPC `scope`. This is the only check of scopes: the calls
// that the handler makes to the engine check none.
struct Route {
  const char* method;
  const char* path;
  Rpc scope;
  Handler handler;
  bool open = false;   // Callers need no key.
  bool large = false;  // The body may have --max-message-bytes.
};

// The largest body of a route that is not `large`. Such bodies have names and
// metadata, which the front keeps.
constexpr uint64_t kMaxSmallBody = 256 << 10;

constexpr Rpc kRead = Rpc::kGetInfo;
constexpr bool kClosed = false;
constexpr bool kLarge = true;
constexpr Route kRoutes[] = {
    {"GET", "healthz", kRead, GetHealth},
    {"GET", "get_server_capabilities", kRead, GetCapabilities},
    {"POST", "client/config", kRead, GetClientConfig},
    {"POST", "client/dynamic_config", kRead, GetDynamicConfig},
    {"POST", "telemetry", kRead, TakeTelemetry, kClosed, kLarge},
    {"POST", "create_session", kRead, CreateSession},
    {"POST", "session_heartbeat", kRead, BeatSession},
    {"POST", "sessions/*/finish", kRead, FinishSession},
    {"GET", "sessions", kRead, ListSessions},
    {"GET", "sessions/*", kRead, GetSession},
    {"POST", "sessions/search", kRead, RefuseAccounts},
    {"PUT", "sessions/*/project", kRead, RefuseAccounts},
    {"GET", "sessions/*/trace_export", kRead, RefuseAccounts},
    {"GET", "audit", kRead, RefuseAccounts},
    {"GET", "billing/usage/events", kRead, RefuseAccounts},
    {"POST", "billing/usage/events", kRead, RefuseAccounts},
    {"GET", "billing/usage/checkpoints/current", kRead, RefuseAccounts},
    {"POST", "billing/usage/checkpoints/current", kRead, RefuseAccounts},
    {"POST", "create_custom_loss", kRead, RefuseCustomLoss},
    {"POST", "create_model", Rpc::kCreateAdapter, CreateModel},
    {"POST", "get_info", Rpc::kGetAdapter, GetModelInfo},
    {"POST", "unload_model", Rpc::kDeleteAdapter, UnloadModel},
    {"POST", "forward_backward", Rpc::kForwardBackward, RunForwardBackward,
     kClosed, kLarge},
    {"POST", "forward", Rpc::kForward, RunForwardBackward, kClosed, kLarge},
    {"POST", "optim_step", Rpc::kOptimStep, RunOptimStep},
    {"POST", "save_weights", Rpc::kSaveCheckpoint, SaveWeights},
    {"POST", "save_weights_for_sampler", Rpc::kPublishSnapshot,
     SaveWeightsForSampler},
    {"POST", "save_weights_external", Rpc::kSaveCheckpoint,
     SaveWeightsExternal},
    {"POST", "load_weights", Rpc::kLoadCheckpoint, LoadWeights},
    {"POST", "create_sampling_session", Rpc::kSample, CreateSampler},
    {"GET", "samplers/*", kRead, GetSampler},
    {"POST", "asample", Rpc::kSample, RunSample, kClosed, kLarge},
    {"POST", "retrieve_future", kRead, RetrieveFuture},
    {"POST", "cancel_future", Rpc::kSample, CancelFuture},
    {"GET", "training_runs", Rpc::kListCheckpoints, ListRuns},
    {"GET", "training_runs/*", Rpc::kListCheckpoints, GetRun},
    {"GET", "training_runs/*/checkpoints", Rpc::kListCheckpoints,
     ListRunCheckpoints},
    {"DELETE", "training_runs/*/checkpoints/*/*", Rpc::kDeleteCheckpoint,
     DeleteCheckpoint},
    {"PUT", "training_runs/*/checkpoints/*/*/ttl", Rpc::kDeleteCheckpoint,
     SetCheckpointTtl},
    {"POST", "training_runs/*/checkpoints/*/*/publish", kRead, RefuseSharing},
    {"DELETE", "training_runs/*/checkpoints/*/*/publish", kRead, RefuseSharing},
    {"GET", "training_runs/*/checkpoints/*/*/external_weights_urls",
     Rpc::kExportAdapter, GetArchive},
    {"GET", "files/*/*/*/*/*", kRead, DownloadFile, true},
    {"GET", "checkpoints", Rpc::kListCheckpoints, ListAllCheckpoints},
    {"POST", "weights_info", Rpc::kListCheckpoints, GetWeightsInfo},
    {"POST", "copy_weights", kRead, RefuseSharing},
};

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

// Parses the call's target and returns its route.
absl::StatusOr<const Route*> FindRoute(Call* call) {
  WEFT_ASSIGN_OR_RETURN(Url url, ParseUrl(call->http.target));
  call->query = std::move(url.query);
  for (const Route& route : kRoutes) {
    if (Matches(route, *call, url.parts, &call->args)) return &route;
  }
  return absl::NotFoundError("there is no such path");
}

// Returns the caller that the API key names. Errors: UNAUTHENTICATED and
// PERMISSION_DENIED; those of Authenticator::Check.
absl::StatusOr<Caller> FindCaller(const ServiceCore& core, Rpc scope,
                                  const std::string& key) {
  absl::string_view token = key;
  if (!absl::ConsumePrefix(&token, kKeyPrefix)) {
    return absl::UnauthenticatedError("an API key begins with tml-");
  }
  if (core.authenticator == nullptr) return Caller();
  return core.authenticator->Check(absl::StrCat("/", RpcName(scope)),
                                   absl::StrCat("Bearer ", token));
}

absl::Status ReadBody(const Front& front, Call* call) {
  HttpRequest& http = call->http;
  const auto most =
      static_cast<size_t>(front.port.core()->options.max_message_bytes);
  WEFT_RETURN_IF_ERROR(Decode(http.content_encoding, most, &http.body));
  call->body = Json::object();
  if (absl::StrContains(http.content_type, kProtobufType)) {
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(call->body, ParseObject(http.body));
  return absl::OkStatus();
}

// Returns the route of a request, and sets `call->caller` from its API key.
absl::StatusOr<const Route*> Judge(const Front& front, Call* call) {
  WEFT_ASSIGN_OR_RETURN(const Route* const route, FindRoute(call));
  const std::string key = std::exchange(call->http.api_key, "");
  call->http.authorization.clear();
  if (!route->open) {
    const ServiceCore& core = *front.port.core();
    WEFT_ASSIGN_OR_RETURN(call->caller, FindCaller(core, route->scope, key));
    call->may_delete = route->handler == FinishSession &&
                       FindCaller(core, Rpc::kDeleteAdapter, key).ok();
  }
  return route;
}

void Serve(Front& front, const Route& route, const std::shared_ptr<Call>& call,
           const Respond& respond) {
  const absl::Status read = ReadBody(front, call.get());
  if (absl::IsResourceExhausted(read)) {
    return respond(JsonReply({{"detail", std::string(read.message())}}, 413));
  }
  const absl::Status refused =
      read.ok() ? route.handler(front, call, respond) : read;
  // The handler has copied what it needs of the body.
  call->http.body.clear();
  call->http.body.shrink_to_fit();
  call->http.reserved.reset();
  if (!refused.ok()) respond(ErrorReply(refused));
}

}  // namespace

Admission Admit(Front& front, const HttpRequest& header) {
  const auto call = std::make_shared<Call>();
  call->http = header;
  const absl::StatusOr<const Route*> route = Judge(front, call.get());
  if (!route.ok()) return {.refusal = ErrorReply(route.status())};
  const auto most =
      static_cast<uint64_t>(front.port.core()->options.max_message_bytes);
  return {
      .max_body_bytes = (*route)->large ? most : std::min(most, kMaxSmallBody),
      .holder = call->owner(),
      .serve = [&front, route = *route, call](HttpRequest request,
                                              const Respond& respond) {
        call->http.body = std::move(request.body);
        call->http.reserved = std::move(request.reserved);
        Serve(front, *route, call, respond);
      }};
}

absl::Status ServeAgain(Front& front, const CallPtr& call) {
  const auto again = std::make_shared<Call>(*call);
  WEFT_ASSIGN_OR_RETURN(const Route* const route, FindRoute(again.get()));
  WEFT_RETURN_IF_ERROR(ReadBody(front, again.get()));
  return route->handler(front, again, [](const HttpReply& /*reply*/) {});
}

}  // namespace weft::tinker
