#include "server/daemon/listeners.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/resource_quota.h"
#include "server/call/call.h"
#include "server/console/console.h"
#include "server/grpc/services.h"
#include "src/base/address.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/observe/metrics.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr char kReadinessService[] = "weft.v1.TrainingService";
constexpr char kLivenessService[] = "liveness";

// gRPC's memory quota, as a number of messages of the largest size, and bytes
// for the windows of calls that wait (ReadTurns).
constexpr int64_t kQuotaMessages = 32;
constexpr int64_t kQuotaWindows = int64_t{512} << 20;

void SetKeepalive(grpc::ServerBuilder* builder) {
  constexpr int kSecond = 1000;
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60 * kSecond);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20 * kSecond);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Lets a client ping every 10 s. With gRPC's default of 5 min, the server
  // would close the connections of ordinary clients with "too many pings".
  builder->AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10 * kSecond);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 600 * kSecond);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              10 * kSecond);
}

void SetLimits(const ServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(
      static_cast<int>(options.max_message_bytes));
  // Replies have no limit, so that no reply is lost after its step ran. The
  // limits on requests bound the size of replies.
  builder->SetMaxSendMessageSize(-1);
  // Refuses compression, because gRPC inflates a message before checking its
  // size.
  for (const auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder->SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  // The limit is high, because steps that wait for a missing step hold streams.
  // If they held all streams, the missing step could never arrive.
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              kMaxCallsPerConnection);
  // The window of a stream that is not read stays 64 KiB. Otherwise gRPC would
  // let a client that answers pings late send much more.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  grpc::ResourceQuota quota("weftd");
  quota.Resize(static_cast<size_t>(options.max_message_bytes * kQuotaMessages +
                                   kQuotaWindows));
  builder->SetResourceQuota(quota);
}

bool IsSample(const std::string& path) {
  return path == RpcPath(Rpc::kSample) || path == RpcPath(Rpc::kSampleStream);
}

constexpr absl::Duration kCallInterval = absl::Milliseconds(5);
// How long gRPC waits for clients to close their connections. A client without
// an open call does not notice the shutdown, so gRPC nearly always waits the
// whole time.
constexpr absl::Duration kConnectionGrace = absl::Milliseconds(100);

}  // namespace

Listeners::Listeners(const ServerOptions& options,
                     std::shared_ptr<prometheus::Registry> registry)
    : core_(options, registry.get()),
      registry_(std::move(registry)),
      watchdog_trips_(
          AddCounter(registry_.get(), "weft_watchdog_trips_total",
                     "Times that liveness turned red because the engine thread "
                     "had not moved for 15 minutes.")),
      process_collector_(std::make_shared<ProcessCollector>()) {
  core_.begin_drain = [this](Callback<bool> done) {
    BeginDrain(std::move(done));
  };
  core_.end_drain = [this] { return EndDrain(); };
}

Listeners::~Listeners() { Shutdown(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<Listeners>> Listeners::Start(
    const ServerOptions& options,
    std::shared_ptr<prometheus::Registry> registry, TokenizerFiles tokenizer) {
  std::unique_ptr<Listeners> listeners(
      new Listeners(options, std::move(registry)));
  listeners->core_.tokenizer = std::move(tokenizer);
  WEFT_RETURN_IF_ERROR(listeners->StartGrpc());
  WEFT_RETURN_IF_ERROR(listeners->StartMetrics());
  WEFT_RETURN_IF_ERROR(listeners->StartTinker());
  WEFT_RETURN_IF_ERROR(listeners->StartConsole());
  WEFT_RETURN_IF_ERROR(listeners->WritePortFile());
  return listeners;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>>
Listeners::MakeCredentials() {
  const ServerOptions& options = core_.options;
  if (options.auth_tokens_file.empty()) {
    return grpc::InsecureServerCredentials();
  }
  // Local credentials are plaintext and accept connections only from this
  // machine. gRPC calls the authenticator's processor with local credentials,
  // but not with insecure credentials.
  auto credentials = grpc::experimental::LocalServerCredentials(
      UnixSocketPath(options.listen).empty() ? LOCAL_TCP : UDS);
  WEFT_ASSIGN_OR_RETURN(
      core_.authenticator,
      Authenticator::Start(options.auth_tokens_file, registry_.get()));
  credentials->SetAuthMetadataProcessor(
      core_.authenticator->MakeProcessor(&core_.quota));
  return credentials;
}

absl::Status Listeners::StartGrpc() {
  // Debian's Abseil watches the order in which gRPC takes its locks, and would
  // end the process at an order that might block, though it never has. To watch
  // also costs time at each lock.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  WEFT_ASSIGN_OR_RETURN(const auto credentials, MakeCredentials());
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  services_[0] = MakeTrainingService(&core_);
  services_[1] = MakeSamplingService(&core_);
  services_[2] = MakeAdapterService(&core_);
  services_[3] = MakeServerService(&core_);
  services_[4] = MakeHealthService(&core_);

  WEFT_ASSIGN_OR_RETURN(listener_, Listener::Bind(core_.options.listen,
                                                  MaxConnections(core_.options),
                                                  registry_.get()));
  grpc::ServerBuilder builder;
  SetLimits(core_.options, &builder);
  SetKeepalive(&builder);
  for (const auto& service : services_) builder.RegisterService(service.get());
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      credentials);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError("gRPC cannot start its server");
  }
  SetReady(false);
  SetLive(true);
  address_ = listener_->address();
  listener_->Start(std::move(acceptor));
  return absl::OkStatus();
}

absl::Status Listeners::StartMetrics() {
  const std::string& listen = core_.options.metrics_listen;
  if (listen.empty()) return absl::OkStatus();
  // The edge asks for each call that begins, so there are as many connections
  // as on the gRPC port.
  const HttpOptions http{.max_header_bytes = 8 << 10,
                         .max_connections = MaxConnections(core_.options),
                         .allowed_hosts = core_.options.allowed_hosts};
  WEFT_ASSIGN_OR_RETURN(
      metrics_, StartMetricsServer(
                    listen, http,
                    {.collectables = {registry_, process_collector_},
                     .live = [this] { return IsServing(kLivenessService); },
                     .ready = [this] { return IsServing(kReadinessService); },
                     .authorize =
                         [this](const HttpRequest& request) {
                           return Authorize(request);
                         }}));
  metrics_address_ = metrics_->address();
  return absl::OkStatus();
}

absl::StatusOr<std::string> Listeners::Authorize(const HttpRequest& request) {
  Caller caller;
  if (core_.authenticator != nullptr) {
    // A token of any scope may make this call, so its token alone is judged.
    WEFT_ASSIGN_OR_RETURN(caller,
                          core_.authenticator->CheckHttp(
                              RpcPath(Rpc::kGetInfo), request.authorization,
                              request.original_uri, request.peer));
  }
  return request.door.empty() ? "" : OwnerOf(caller, request);
}

std::string Listeners::OwnerOf(const Caller& caller,
                               const HttpRequest& request) const {
  engine::Engine* const engine = core_.engine.Peek();
  if (engine == nullptr) {
    const std::optional<Reason> reason = FindReason(core_.engine.NotYet());
    const bool moved = reason && reason->values.contains("address");
    return moved ? reason->values.at("address") : "";
  }
  if (!request.checkpoint.empty() && IsSample(request.original_uri)) {
    return engine->ChooseSampler();
  }
  std::string adapter_id = request.adapter_id;
  if (adapter_id.empty() || !caller.Qualify(FieldsOf(&adapter_id)).ok()) {
    return "";
  }
  return engine->OwnerOf(adapter_id);
}

absl::Status Listeners::StartTinker() {
  if (core_.options.tinker_listen.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(tinker_,
                        tinker::TinkerFront::Start(&core_, console::Admit));
  return absl::OkStatus();
}

absl::Status Listeners::StartConsole() {
  if (core_.options.console_listen.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(console_, console::StartConsole(&core_));
  return absl::OkStatus();
}

std::string Listeners::console_url() const {
  if (console_ != nullptr) return absl::StrCat("http://", console_->address());
  if (tinker_ != nullptr) return absl::StrCat("http://", tinker_->address());
  return "";
}

absl::Status Listeners::WritePortFile() const {
  const std::string& path = core_.options.port_file;
  if (path.empty()) return absl::OkStatus();
  // Renames a finished file into place, so that a reader never sees a part of
  // it.
  const std::string draft = absl::StrCat(path, ".tmp");
  std::FILE* const file = std::fopen(draft.c_str(), "w");
  bool written = file != nullptr;
  if (written) {
    written = std::fprintf(file, "%s\n%s\n", address_.c_str(),
                           metrics_address_.c_str()) > 0;
    if (written && tinker_ != nullptr) {
      written = std::fprintf(file, "%s\n", tinker_->address().c_str()) > 0;
    }
    if (written && console_ != nullptr) {
      written = std::fprintf(file, "%s\n", console_->address().c_str()) > 0;
    }
    written = std::fclose(file) == 0 && written;
  }
  if (written && std::rename(draft.c_str(), path.c_str()) == 0) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("cannot write --port-file=", path));
}

void Listeners::SetReady(bool ready) {
  const Health health = ready ? Health::kServing : Health::kNotServing;
  core_.health.Set("", health);
  core_.health.Set(kReadinessService, health);
}

void Listeners::SetLive(bool live) {
  core_.health.Set(kLivenessService,
                   live ? Health::kServing : Health::kNotServing);
}

bool Listeners::IsServing(const char* service) const {
  return core_.health.Of(service) == Health::kServing;
}

void Listeners::SetLoading() { core_.metrics.SetPhase(StartupPhase::kLoading); }

void Listeners::SetStandby(const std::string& owner) {
  core_.engine.SetStandby(owner);
  core_.metrics.SetPhase(StartupPhase::kStandby);
}

void Listeners::SetEngine(engine::Engine* engine) {
  core_.engine.Set(engine);
  const EngineInfo& info = engine->info();
  AddGauge(registry_.get(), "weft_model_info",
           "Always 1, once the model is loaded; labels name the base model.",
           {{"model", core_.options.model_name},
            {"architecture", info.architecture},
            {"dtype", info.dtype},
            {"device", info.device}})
      .Set(1);
  AddGauge(registry_.get(), "weft_startup_seconds",
           "Seconds from the start of the server to the loaded model.")
      .Set(absl::ToDoubleSeconds(SteadyNow() - started_));
  const MutexLock lock(&drain_mu_);
  if (tinker_ != nullptr) tinker_->EngineIsReady();
  if (core_.engine.draining()) return;
  core_.metrics.SetPhase(StartupPhase::kServing);
  SetReady(true);
}

void Listeners::UpdateLiveness(absl::Time now) {
  const engine::Engine* const engine = core_.engine.Peek();
  if (engine == nullptr) return;
  const absl::Duration age = now - engine->last_heartbeat();
  const bool live = age <= kHeartbeatLimit;
  if (live == IsServing(kLivenessService)) return;
  Log(live ? LogLevel::kInfo : LogLevel::kError,
      live ? "the engine moves again" : "the engine hangs",
      {{"heartbeat_age_seconds", absl::ToDoubleSeconds(age)}});
  if (!live) watchdog_trips_.Increment();
  SetLive(live);
}

void Listeners::CancelStalledCalls(absl::Time now) {
  core_.stalled.Cancel(now);
}

void Listeners::StartDraining() {
  const MutexLock lock(&drain_mu_);
  core_.engine.SetFinishing();
  RefuseWork();
}

void Listeners::BeginDrain(Callback<bool> done) {
  const MutexLock lock(&drain_mu_);
  engine::Engine* const engine = core_.engine.Peek();
  if (engine == nullptr) return done(core_.engine.NotYet());
  RefuseWork();
  engine->Drain(std::move(done));
}

void Listeners::RefuseWork() {
  core_.engine.SetDraining(true);
  SetReady(false);
  core_.metrics.SetPhase(StartupPhase::kDraining);
}

absl::Status Listeners::EndDrain() {
  const MutexLock lock(&drain_mu_);
  if (core_.engine.finishing()) {
    return absl::FailedPreconditionError(
        "the process has been told to end and cannot take new work");
  }
  engine::Engine* const engine = core_.engine.Peek();
  if (engine == nullptr) return core_.engine.NotYet();
  engine->Undrain();
  core_.engine.SetDraining(false);
  core_.metrics.SetPhase(StartupPhase::kServing);
  SetReady(true);
  return absl::OkStatus();
}

void Listeners::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  const absl::Time limit = SteadyNow() + grace;
  core_.health.End();
  while (core_.open_calls.load() > 0 && SteadyNow() < limit) {
    absl::SleepFor(kCallInterval);
  }
  tinker_.reset();
  // A call of the engine may hold the server for a moment longer.
  if (console_ != nullptr) console_->Stop();
  listener_.reset();
  const absl::Duration left = std::min(limit - SteadyNow(), kConnectionGrace);
  server_->Shutdown(gpr_time_add(
      gpr_now(GPR_CLOCK_MONOTONIC),
      gpr_time_from_nanos(absl::ToInt64Nanoseconds(left), GPR_TIMESPAN)));
  server_->Wait();
  server_.reset();
  metrics_.reset();
}

}  // namespace weft::server
