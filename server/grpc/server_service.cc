// weft.v1.ServerService: GetInfo, GetTokenizer, Drain, Undrain, DrainLog,
// WriteSnapshot and Profile. Unlike other RPCs, GetInfo and GetTokenizer work
// while the daemon starts or drains, and the next four while it drains.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "server/call/metric_values.h"
#include "server/flags/version.h"
#include "server/grpc/send_call.h"
#include "server/grpc/services.h"
#include "server/wire/field_checks.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"
#include "weft/v1/server.pb.h"
#include "weft/v1/training.pb.h"

namespace weft::server {
namespace {

void FillModel(const EngineInfo& info, v1::ModelInfo* out) {
  out->set_architecture(info.architecture);
  out->set_num_layers(static_cast<uint32_t>(info.num_layers));
  out->set_hidden_size(static_cast<uint32_t>(info.hidden_size));
  out->set_vocab_size(static_cast<uint32_t>(info.vocab_size));
  out->set_context_length(static_cast<uint32_t>(info.context_length));
  out->mutable_eos_token_ids()->Add(info.eos_token_ids.begin(),
                                    info.eos_token_ids.end());
  out->set_num_parameters(info.num_parameters);
  out->set_dtype(info.dtype);
  out->set_num_experts(static_cast<uint32_t>(info.num_experts));
  out->set_experts_per_token(static_cast<uint32_t>(info.experts_per_token));
  out->set_expert_layers(static_cast<uint32_t>(info.expert_layers));
}

void FillLosses(v1::ServerInfo* out) {
  const auto& losses = *v1::LossFunction_descriptor();
  for (int i = 0; i < losses.value_count(); ++i) {
    const auto& loss = *losses.value(i);
    if (loss.number() == v1::LOSS_FUNCTION_UNSPECIFIED) continue;
    out->add_losses(absl::AsciiStrToLower(
        absl::StripPrefix(loss.name(), "LOSS_FUNCTION_")));
  }
}

void FillLimits(const EngineInfo& info, v1::ServerInfo* out) {
  out->set_max_adapters(static_cast<uint32_t>(info.max_adapters));
  out->set_max_adapters_per_tenant(
      static_cast<uint32_t>(info.max_adapters_per_tenant));
  out->set_max_adapter_bytes_per_tenant(info.max_adapter_bytes_per_tenant);
  out->set_max_rank(static_cast<uint32_t>(info.max_rank));
  out->set_replay_window(static_cast<uint32_t>(info.replay_window));
  out->set_string_stops(info.has_byte_decoder);
}

// Sets the fields that are known without an engine.
void FillOptions(const ServiceCore& core, v1::ServerInfo* info) {
  const ServerOptions& options = core.options;
  info->set_version(kVersion);
  info->mutable_model()->set_name(options.model_name);
  info->mutable_model()->set_tokenizer_fingerprint(core.tokenizer.fingerprint);
  info->set_max_data_per_request(
      static_cast<uint32_t>(options.max_data_per_request));
  info->set_max_tokens_per_request(
      static_cast<uint32_t>(options.max_tokens_per_request));
  info->set_max_samples(static_cast<uint32_t>(options.max_samples));
  info->set_max_message_bytes(static_cast<uint64_t>(options.max_message_bytes));
  info->set_request_memory_bytes(static_cast<uint64_t>(core.memory->most()));
  info->set_max_targets_per_token(kMaxTargetsPerToken);
  info->set_max_stop_entries(static_cast<uint32_t>(kMaxStopEntries));
  info->set_max_top_logprobs(kMaxTopLogprobs);
  FillLosses(info);
  info->set_draining(core.engine.draining());
}

// A metric that does not exist counts as 0.
void FillLoad(const MetricValues& values, v1::ServerLoad* load) {
  const auto count = [&values](const char* name) {
    return static_cast<uint64_t>(values.Sum(name));
  };
  load->set_uptime_seconds(values.UptimeSeconds());
  load->set_calls_in_flight(count("weft_requests_inflight"));
  load->set_queued_requests(count("weft_queue_depth"));
  load->set_train_tokens(count("weft_train_tokens_total"));
  load->set_prompt_tokens(count("weft_prompt_tokens_total"));
  load->set_sampled_tokens(count("weft_sampled_tokens_total"));
  load->set_optim_steps(count("weft_optim_steps_total"));
  load->set_process_bytes(count("process_resident_memory_bytes"));
  load->set_device_total_bytes(count("weft_device_memory_bytes"));
  load->set_device_used_bytes(count("weft_device_allocated_bytes"));
  load->set_kv_total_bytes(count("weft_kv_cache_capacity_bytes"));
  load->set_kv_used_bytes(count("weft_kv_cache_used_bytes"));
}

class GetInfoCall final : public RequestReactor<v1::GetInfoRequest> {
 public:
  using RequestReactor::RequestReactor;

 private:
  void Run(const v1::GetInfoRequest& /*request*/) override {
    const ServiceCore& core = *record().core();
    v1::GetInfoResponse reply;
    v1::ServerInfo* const info = reply.mutable_info();
    FillOptions(core, info);
    engine::Engine* const engine = core.engine.Peek();
    if (engine == nullptr) return Send(reply);
    info->set_device(engine->info().device);
    FillLimits(engine->info(), info);
    FillModel(engine->info(), info->mutable_model());
    if (!record().caller()->sees_all()) return CountOwn(engine, reply);
    const MetricValues values(*core.registry);
    info->set_num_adapters(static_cast<uint32_t>(engine->num_adapters()));
    info->set_num_restoring(
        static_cast<uint32_t>(values.Sum(kRestoringMetric)));
    info->set_restore_seconds(values.Sum(kRestoreSecondsMetric));
    FillLoad(values, info->mutable_load());
    Send(reply);
  }

  // Counts only the tenant's own adapters, because a tenant must not learn how
  // many adapters others have.
  void CountOwn(engine::Engine* engine, v1::GetInfoResponse reply) {
    ListAdaptersRequest own{
        .size = static_cast<size_t>(engine->info().max_adapters)};
    (void)record().caller()->Qualify(FieldsOf(&own));
    engine->ListAdapters(
        std::move(own), [this, call = self(), reply = std::move(reply)](
                            absl::StatusOr<AdapterPage> page) mutable {
          if (!page.ok()) return End(page.status());
          v1::ServerInfo* const info = reply.mutable_info();
          const auto restoring =
              std::ranges::count(page->adapters, true, &AdapterInfo::restoring);
          info->set_num_adapters(static_cast<uint32_t>(page->adapters.size()));
          info->set_num_restoring(static_cast<uint32_t>(restoring));
          if (restoring > 0) {
            const MetricValues values(*record().core()->registry);
            info->set_restore_seconds(values.Sum(kRestoreSecondsMetric));
          }
          Send(reply);
        });
  }
};

class GetTokenizerCall final
    : public SendCall<v1::GetTokenizerRequest, v1::GetTokenizerResponse> {
 public:
  using SendCall::SendCall;

 private:
  void Run(const v1::GetTokenizerRequest& /*request*/) override {
    const TokenizerFiles& tokenizer = record().core()->tokenizer;
    if (tokenizer.files.empty()) {
      return End(absl::NotFoundError(
          "the server's model folder has no tokenizer.json: use that of a "
          "folder on your machine"));
    }
    const absl::Status held = HoldPieces();
    held.ok() ? SendFiles(tokenizer.files) : End(held);
  }
};

// A call whose request and reply say nothing. `Act` begins what it does.
template <typename Request, typename Response>
class ActionCall final : public RequestReactor<Request> {
 public:
  using Act = void (*)(const ServiceCore& core, const Callback<bool>& done);
  ActionCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc,
             Act act)
      : RequestReactor<Request>(core, context, rpc), act_(act) {}

 private:
  void Run(const Request& /*request*/) override {
    act_(*this->record().core(),
         [this, call = this->self()](const absl::StatusOr<bool>& done) {
           done.ok() ? this->Send(Response()) : this->End(done.status());
         });
  }

  const Act act_;
};

void BeginDrain(const ServiceCore& core, const Callback<bool>& done) {
  core.begin_drain(done);
}

void EndDrain(const ServiceCore& core, const Callback<bool>& done) {
  const absl::Status ended = core.end_drain();
  ended.ok() ? done(true) : done(ended);
}

void DrainLog(const ServiceCore& core, const Callback<bool>& done) {
  engine::Engine* const engine = core.engine.Peek();
  if (engine == nullptr) return done(core.engine.NotYet());
  engine->DrainLog([done](const absl::StatusOr<bool>& drained) {
    done(drained);
    // Calls that run end well, and the log goes with the process.
    if (drained.ok()) kill(getpid(), SIGTERM);
  });
}

void WriteSnapshot(const ServiceCore& core, const Callback<bool>& done) {
  engine::Engine* const engine = core.engine.Peek();
  if (engine != nullptr) return engine->WriteSnapshot(done);
  done(core.engine.NotYet());
}

// Sends the trace when the profile has ended. If the client goes away, the
// profile ends early.
class ProfileCall final
    : public SendCall<v1::ProfileRequest, v1::ProfileResponse> {
 public:
  using SendCall::SendCall;

 private:
  void Run(const v1::ProfileRequest& request) override {
    const absl::Status room = HoldPieces();
    if (!room.ok()) return End(room);
    const absl::Status refused = record().Begin(
        request, [this](engine::Engine& engine, const ProfileRequest& plain) {
          SetCancel(engine.Profile(
              plain, [this, call = self()](absl::StatusOr<std::string> trace) {
                if (!trace.ok()) return End(trace.status());
                const absl::Status held =
                    record().Hold(static_cast<int64_t>(trace->size()));
                held.ok() ? SendFiles({FileSource("trace", *std::move(trace))})
                          : End(held);
              }));
        });
    if (!refused.ok()) End(refused);
  }
};

}  // namespace

absl::StatusOr<ProfileRequest> Validate(const v1::ProfileRequest& request,
                                        const RequestLimits& /*limits*/) {
  WEFT_RETURN_IF_ERROR(
      CheckCount("steps", request.steps(), 0, kMaxProfileSteps));
  WEFT_RETURN_IF_ERROR(CheckReal("seconds", request.seconds(),
                                 {.low = 0, .high = kMaxProfileSeconds}));
  ProfileRequest plain{.steps = request.steps()};
  if (request.seconds() > 0) {
    // A tiny positive time must not round to 0.
    plain.duration = std::max(absl::Seconds(request.seconds()),
                              absl::Duration(absl::Nanoseconds(1)));
  }
  return plain;
}

std::unique_ptr<RawService> MakeServerService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  service->Add<GetInfoCall>(Rpc::kGetInfo);
  service->Add<GetTokenizerCall>(Rpc::kGetTokenizer);
  service->Add<ActionCall<v1::DrainRequest, v1::DrainResponse>>(Rpc::kDrain,
                                                                BeginDrain);
  service->Add<ActionCall<v1::UndrainRequest, v1::UndrainResponse>>(
      Rpc::kUndrain, EndDrain);
  service->Add<ActionCall<v1::DrainLogRequest, v1::DrainLogResponse>>(
      Rpc::kDrainLog, DrainLog);
  service->Add<ActionCall<v1::WriteSnapshotRequest, v1::WriteSnapshotResponse>>(
      Rpc::kWriteSnapshot, WriteSnapshot);
  service->Add<ProfileCall>(Rpc::kProfile);
  return service;
}

}  // namespace weft::server
