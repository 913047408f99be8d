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
#include "server/tinker/accounts.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/fields.h"
#include "server/tinker/handlers.h"
#include "server/tinker/ledger.h"
#include "server/tinker/routes.h"
#include "server/tinker/sessions.h"
#include "server/tinker/tinker_front.h"
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

// The memory of an entry of a table besides its text: the entry's fields, its
// place in the table, and what the ledger remembers of it.
constexpr int64_t kEntryBytes = 1024;

// Returns the entry with this id if `owner` owns it, else NOT_FOUND.
template <typename Table>
auto FindOwned(Table& table, const char* what, const std::string& owner,
               const Front::Id& id)
    -> absl::StatusOr<decltype(&table.begin()->second)> {
  WEFT_RETURN_IF_ERROR(id.status());
  const auto found = table.find(*id);
  if (found != table.end() && found->second.owner == owner) {
    return &found->second;
  }
  return absl::NotFoundError(absl::StrCat("no ", what, " ", Quoted(*id)));
}

}  // namespace

Front::Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
             Futures::After later)
    : port(core, server, InClientsNames),
      ledger(&port),
      futures(kMaxResultBytes, core->memory, later),
      after(std::move(later)) {}

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

absl::StatusOr<Session*> Front::FindSession(const Call& call, const Id& id) {
  return FindOwned(sessions, "session", call.owner(), id);
}

absl::StatusOr<Model*> Front::FindModel(const Call& call, const Id& id) {
  return FindOwned(models, "model", call.owner(), id);
}

absl::StatusOr<Sampler*> Front::FindSampler(const Call& call, const Id& id) {
  return FindOwned(samplers, "sampling session", call.owner(), id);
}

absl::StatusOr<UploadedLoss*> Front::FindLoss(const Call& call, const Id& id) {
  return FindOwned(losses, "custom loss", call.owner(), id);
}

bool Front::Permits(const Call& call, Rpc rpc) const {
  const auto& authenticator = port.core()->authenticator;
  return authenticator == nullptr ||
         authenticator->Permits(RpcPath(rpc), call.token_hash);
}

absl::StatusOr<std::shared_ptr<void>> Front::ChargeEntry(
    const std::string& owner, size_t text_bytes) const {
  return port.core()->memory->Reserve(
      owner, kEntryBytes + static_cast<int64_t>(text_bytes));
}

void Reply(const Respond& respond, const absl::StatusOr<Json>& json) {
  respond(json.ok() ? JsonReply(*json) : ErrorReply(json.status()));
}

void Fail(const Respond& respond, const absl::Status& error) {
  respond(ErrorReply(error));
}

const Model* Front::FindModel(const std::string& id) const {
  const auto found = models.find(id);
  return found == models.end() ? nullptr : &found->second;
}

Model* Front::FindModel(const std::string& id) {
  return const_cast<Model*>(std::as_const(*this).FindModel(id));
}

Caller Front::CallerOf(const std::string& session) const {
  const auto found = sessions.find(session);
  return found == sessions.end() ? Caller() : found->second.caller;
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
    SweepCheckpoints(front, absl::Now());
    if (front.restored) SweepUsage(front, absl::Now());
  });
  made->Every(kOrphanInterval, [&front] { SweepOrphans(front); });
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
    RestoreTables(front);
    RestoreSteps(front);
    SweepOrphans(front);
  });
}

}  // namespace weft::server::tinker
