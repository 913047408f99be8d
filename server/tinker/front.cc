#include "server/tinker/front.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/grpc/listener.h"
#include "server/http/replies.h"
#include "server/tinker/adapters.h"
#include "server/tinker/handlers.h"
#include "server/tinker/ledger.h"
#include "server/tinker/routes.h"
#include "server/tinker/sessions.h"
#include "server/tinker/tinker_front.h"
#include "server/tinker/wire/fields.h"
#include "server/wire/field_checks.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// If all results together have more bytes than this, Futures forgets old ones.
// Futures keeps results that a client has fetched, because the client may fetch
// them again.
constexpr int64_t kMaxResultBytes = int64_t{512} << 20;

}  // namespace

Front::Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
             Futures::After later)
    : port(core, server, ClientsNames()),
      ledger(&port),
      futures(kMaxResultBytes, core->memory, later),
      after(std::move(later)) {}

Front::~Front() {
  bodies.Discard();
  files.Discard();
}

std::vector<std::string> Front::model_names() const {
  std::vector<std::string> names = port.core()->options.model_aliases;
  names.insert(names.begin(), model_name());
  return names;
}

absl::Status Front::CheckOffered(const Json& body) const {
  WEFT_RETURN_IF_ERROR(RefuseFields(body));
  return AsksFor(body, kStabilityInfo) ? CheckStableReinforce()
                                       : absl::OkStatus();
}

absl::Status Front::CheckStableReinforce() const {
  if (port.core()->options.tinker_stable_reinforce) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      kStabilityInfo, " (loss ", kStableReinforce,
      ") is not offered by this server (--no-tinker-stable-reinforce): set "
      "loss_fn to importance_sampling, ppo, cispo or gspo"));
}

bool Front::Permits(const Call& call, Rpc rpc) const {
  const auto& authenticator = port.core()->authenticator;
  return authenticator == nullptr ||
         authenticator->Permits(RpcPath(rpc), call.token_hash);
}

void Reply(const Respond& respond, const absl::StatusOr<Json>& json) {
  respond(json.ok() ? JsonReply(*json) : ErrorReply(json.status()));
}

void Fail(const Respond& respond, const absl::Status& error) {
  respond(ErrorReply(error));
}

Caller Front::CallerOf(const std::string& session) const {
  const Session* const found = sessions.Find(session);
  return found == nullptr ? Caller() : found->caller;
}

namespace {

constexpr absl::Duration kSweepInterval = absl::Minutes(1);
constexpr absl::Duration kOrphanInterval = absl::Seconds(2);

HttpOptions OptionsOf(const ServerOptions& options) {
  HttpOptions http{.max_connections = MaxConnections(options),
                   .allowed_hosts = options.allowed_hosts};
  // An owner may use half of this budget (fair_budget.h). So two owners can
  // each have a request of the largest size in memory.
  http.max_pending_bytes =
      std::max(http.max_pending_bytes, 2 * options.max_message_bytes);
  return http;
}

}  // namespace

TinkerFront::TinkerFront(ServiceCore* core, std::shared_ptr<HttpServer> server)
    : server_(std::move(server)),
      front_(std::make_unique<Front>(
          core, server_,
          [raw = server_.get()](absl::Duration delay,
                                std::function<void()> work) {
            raw->After(delay, std::move(work));
          })) {}

TinkerFront::~TinkerFront() { server_->Stop(); }

absl::StatusOr<std::unique_ptr<TinkerFront>> TinkerFront::Start(
    ServiceCore* core, AdmitPage admit_page) {
  const ServerOptions& options = core->options;
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<HttpServer> server,
                        HttpServer::Bind("tinker-listen", options.tinker_listen,
                                         OptionsOf(options)));
  auto made =
      std::unique_ptr<TinkerFront>(new TinkerFront(core, std::move(server)));
  Front& front = *made->front_;
  made->server_->Start([&front, admit_page](const HttpRequest& header) {
    std::optional<Admission> page = admit_page(front.port, header);
    return page ? *std::move(page) : Admit(front, header);
  });
  made->Every(kSweepInterval, [&front] {
    SweepSessions(front, SteadyNow());
    SweepSamples(front, SteadyNow());
    if (front.restored) front.accounts.Sweep(absl::Now());
  });
  made->Every(kOrphanInterval, [&front] { front.adapters.SweepDeletions(); });
  if (!options.model_aliases.empty()) {
    Log(LogLevel::kInfo, "the base model has further names",
        {{"model", options.model_name},
         {"names", absl::StrJoin(options.model_aliases, ",")}});
  }
  return made;
}

void TinkerFront::Every(absl::Duration interval, std::function<void()> work) {
  server_->After(interval, [this, interval, work = std::move(work)] {
    work();
    Every(interval, work);
  });
}

void TinkerFront::EngineIsReady() {
  server_->Post([&front = *front_] {
    RestoreSecret(front, [&front] {
      RestoreTables(front);
      RestoreSteps(front);
      front.adapters.SweepDeletions();
    });
  });
}

}  // namespace weft::server::tinker
