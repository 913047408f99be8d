// weft.v1.ServerService: GetInfo, Drain. Unlike other RPCs these work while the
// daemon starts or drains.
#include <memory>

#include "server/services.h"
#include "server/unary_call.h"
#include "server/version.h"
#include "weft/v1/server.grpc.pb.h"

namespace weft {
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
}

class ServerService final : public v1::ServerService::CallbackService {
 public:
  explicit ServerService(ServiceCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetInfoRequest* /*request*/,
                                    v1::GetInfoResponse* response) override {
    const auto call = UnaryCall::Start(core_, context, Rpc::kGetInfo);
    if (!call->record().caller().ok()) {
      call->Reply(call->record().caller().status());
      return call.get();
    }
    v1::ServerInfo* const info = response->mutable_info();
    FillOptions(info);
    Engine* const engine = core_->engine.Peek();
    if (engine == nullptr) {
      call->Reply(absl::OkStatus());
      return call.get();
    }
    info->set_device(engine->info().device);
    info->set_max_adapters(static_cast<uint32_t>(engine->info().max_adapters));
    info->set_max_rank(static_cast<uint32_t>(engine->info().max_rank));
    FillModel(engine->info(), info->mutable_model());
    if (call->record().caller()->sees_all()) {
      info->set_num_adapters(static_cast<uint32_t>(engine->num_adapters()));
      call->Reply(absl::OkStatus());
      return call.get();
    }
    // A tenant must not learn how many adapters others have.
    ListAdaptersRequest own{
        .size = static_cast<size_t>(engine->info().max_adapters)};
    (void)call->record().caller()->Qualify(&own);
    engine->ListAdapters(std::move(own), [call, info](
                                             absl::StatusOr<AdapterPage> page) {
      if (page.ok()) {
        call->record().caller()->Reveal(&*page);
        info->set_num_adapters(static_cast<uint32_t>(page->adapters.size()));
      }
      call->Reply(page.status());
    });
    return call.get();
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* /*request*/,
                                  v1::DrainResponse* /*response*/) override {
    const auto call = UnaryCall::Start(core_, context, Rpc::kDrain);
    if (!call->record().caller().ok()) {
      call->Reply(call->record().caller().status());
      return call.get();
    }
    Engine* const engine = core_->engine.Peek();
    if (engine == nullptr) {
      call->Reply(absl::UnavailableError("the server is starting"));
      return call.get();
    }
    core_->begin_drain();
    engine->Drain([call](const absl::StatusOr<bool>& drained) {
      call->Reply(drained.status());
    });
    return call.get();
  }

 private:
  // Sets the fields that are known without the engine.
  void FillOptions(v1::ServerInfo* info) const {
    const ServerOptions& options = core_->options;
    info->set_version(kVersion);
    info->mutable_model()->set_name(options.model_name);
    info->set_max_data_per_request(
        static_cast<uint32_t>(options.max_data_per_request));
    info->set_max_tokens_per_request(
        static_cast<uint32_t>(options.max_tokens_per_request));
    info->set_max_samples(static_cast<uint32_t>(options.max_samples));
    info->set_max_message_bytes(
        static_cast<uint64_t>(options.max_message_bytes));
    info->set_draining(core_->engine.draining());
  }

  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeServerService(ServiceCore* core) {
  return std::make_unique<ServerService>(core);
}

}  // namespace weft
