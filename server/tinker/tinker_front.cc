#include "server/tinker/tinker_front.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/listener.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/reaper.h"
#include "server/tinker/restore.h"
#include "server/tinker/routes.h"
#include "server/tinker/sampling.h"
#include "server/tinker/sessions.h"
#include "server/tinker/usage.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
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

class TinkerFront::Impl {
 public:
  Impl(ServiceCore* core, std::shared_ptr<HttpServer> server)
      : server_(std::move(server)),
        front_(core, server_,
               [raw = server_.get()](absl::Duration delay,
                                     std::function<void()> work) {
                 raw->After(delay, std::move(work));
               }) {}
  ~Impl() { server_->Stop(); }

  void Start(AdmitPage admit_page) {
    server_->Start([this, admit_page](const HttpRequest& header) {
      std::optional<Admission> page = admit_page(front_.port, header);
      return page ? *std::move(page) : Admit(front_, header);
    });
    Sweep();
    SweepAgain();
  }

  void EngineIsReady() {
    server_->Post([this] {
      RestoreTables(front_);
      RestoreSteps(front_);
      SweepOrphans(front_);
    });
  }

 private:
  void Sweep() {
    server_->After(kSweepInterval, [this] {
      SweepSessions(front_, SteadyNow());
      SweepSamples(front_, SteadyNow());
      SweepCheckpoints(front_, absl::Now());
      if (front_.restored) SweepUsage(front_, absl::Now());
      Sweep();
    });
  }

  void SweepAgain() {
    server_->After(kOrphanInterval, [this] {
      SweepOrphans(front_);
      SweepAgain();
    });
  }

  const std::shared_ptr<HttpServer> server_;
  Front front_;
};

absl::StatusOr<std::unique_ptr<TinkerFront>> TinkerFront::Start(
    ServiceCore* core, AdmitPage admit_page) {
  const ServerOptions& options = core->options;
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<HttpServer> server,
                        HttpServer::Bind("tinker-listen", options.tinker_listen,
                                         OptionsOf(options)));
  std::string address = server->address();
  auto impl = std::make_unique<Impl>(core, std::move(server));
  impl->Start(admit_page);
  if (!options.model_aliases.empty()) {
    Log(LogLevel::kInfo, "the base model has further names",
        {{"model", options.model_name},
         {"names", absl::StrJoin(options.model_aliases, ",")}});
  }
  return std::unique_ptr<TinkerFront>(
      new TinkerFront(std::move(impl), std::move(address)));
}

TinkerFront::TinkerFront(std::unique_ptr<Impl> impl, std::string address)
    : impl_(std::move(impl)), address_(std::move(address)) {}
TinkerFront::~TinkerFront() = default;
void TinkerFront::EngineIsReady() { impl_->EngineIsReady(); }

}  // namespace weft::tinker
