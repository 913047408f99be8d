#include "server/console/console.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/console/assets.h"
#include "server/console/state.h"
#include "server/http/replies.h"
#include "server/http/url.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::console {
namespace {

using Json = nlohmann::json;

constexpr char kFolder[] = "/console/v1/";
constexpr char kPage[] = "index.html";

// The page gets scripts, styles and data only from this server. No other page
// may show this page in a frame. With the two rules about trusted types, the
// browser refuses to turn a string into markup or script.
constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'";

HttpReply Guarded(HttpReply reply) {
  reply.headers = {{"Content-Security-Policy", kPolicy},
                   {"X-Content-Type-Options", "nosniff"},
                   {"Referrer-Policy", "no-referrer"},
                   {"Cross-Origin-Resource-Policy", "same-origin"},
                   {"Cache-Control", "no-store"}};
  return reply;
}

const char* TypeOf(absl::string_view name) {
  if (absl::EndsWith(name, ".html")) return "text/html; charset=utf-8";
  if (absl::EndsWith(name, ".css")) return "text/css; charset=utf-8";
  return "text/javascript; charset=utf-8";
}

Admission ServeAsset(const Asset& asset) {
  return {.serve = [&asset](const HttpRequest&, const Respond& respond) {
    respond(Guarded(
        {.content_type = TypeOf(asset.name), .body = std::string(asset.body)}));
  }};
}

// Returns the caller of a request; Caller() on a server without tokens. Errors:
// those of Authenticator::Check.
absl::StatusOr<Caller> FindCaller(const ServiceCore& core,
                                  const HttpRequest& header) {
  if (core.authenticator == nullptr) return Caller();
  return core.authenticator->CheckHttp(RpcPath(Rpc::kGetInfo),
                                       header.authorization,
                                       "GET /console/v1/state", header.peer);
}

// Adds the checkpoints of the selected adapter to `state`, and responds.
void WithCheckpoints(const EnginePort& port, const CallOrigin& origin,
                     Json state, const Respond& respond) {
  v1::ListCheckpointsRequest request;
  request.set_adapter_id(state["selected"].value("id", ""));
  const auto shared = std::make_shared<Json>(std::move(state));
  const absl::Status refused = port.Call(
      origin, Rpc::kListCheckpoints, request, &engine::Engine::ListCheckpoints,
      [shared,
       respond](const absl::StatusOr<std::vector<CheckpointInfo>>& found) {
        if (found.ok()) {
          (*shared)["selected"]["checkpoints"] = CheckpointsJson(*found);
        }
        respond(Guarded(JsonReply(*shared)));
      });
  // If the call is refused, for example because the tenant has too many calls
  // in flight, the page gets the state without checkpoints.
  if (!refused.ok()) respond(Guarded(JsonReply(*shared)));
}

Admission ServeState(const EnginePort& port, const HttpRequest& header,
                     std::map<std::string, std::string> query) {
  const ServiceCore& core = *port.core();
  const absl::StatusOr<Caller> caller = FindCaller(core, header);
  if (!caller.ok()) {
    return {.refusal = Guarded(ErrorReply(caller.status()))};
  }
  return {.holder = OwnerKey(*caller),
          .serve = [&port, caller = *caller, peer = header.peer,
                    query = std::move(query)](const HttpRequest&,
                                              const Respond& respond) mutable {
            Json state = MakeState(*port.core(), caller,
                                   {.search = query["q"],
                                    .selected = query["adapter"],
                                    .history = query["history"] == "1",
                                    .compare = query["compare"]});
            if (query["checkpoints"] == "1" && state.contains("selected")) {
              return WithCheckpoints(port, {.caller = caller, .peer = peer},
                                     std::move(state), respond);
            }
            respond(Guarded(JsonReply(state)));
          }};
}

}  // namespace

std::optional<Admission> Admit(const EnginePort& port,
                               const HttpRequest& header) {
  if (header.method != "GET") return std::nullopt;
  const bool is_page =
      header.target == "/" || absl::StartsWith(header.target, "/?");
  absl::StatusOr<Url> url =
      ParseUrl(is_page ? absl::StrCat(kFolder, kPage) : header.target, kFolder);
  if (!url.ok() || url->parts.size() != 1) return std::nullopt;
  const std::string& name = url->parts.front();
  if (name == "state") return ServeState(port, header, std::move(url->query));
  const auto assets = Assets();
  const auto asset = std::ranges::find(assets, name, &Asset::name);
  if (asset == assets.end() || (name == kPage) != is_page) return std::nullopt;
  return ServeAsset(*asset);
}

absl::StatusOr<std::shared_ptr<HttpServer>> StartConsole(ServiceCore* core) {
  const ServerOptions& options = core->options;
  WEFT_ASSIGN_OR_RETURN(
      std::shared_ptr<HttpServer> server,
      HttpServer::Bind("console-listen", options.console_listen,
                       {.allowed_hosts = options.allowed_hosts}));
  const auto port = std::make_shared<const EnginePort>(core, server);
  server->Start([port](const HttpRequest& header) {
    std::optional<Admission> page = Admit(*port, header);
    return page ? *std::move(page)
                : Admission{.refusal = ErrorReply(
                                absl::NotFoundError("the console is at /"))};
  });
  return server;
}

}  // namespace weft::server::console
