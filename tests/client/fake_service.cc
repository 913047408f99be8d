#include "tests/client/fake_service.h"

#include <chrono>

#include "grpcpp/health_check_service_interface.h"

namespace weft::client {
namespace {

grpc::Status NotFound(const std::string& what) {
  return {grpc::StatusCode::NOT_FOUND, "no " + what};
}

void SetHint(grpc::ServerContext* context, const FakeRefusal& refusal) {
  if (refusal.pushback_ms < 0) return;
  context->AddTrailingMetadata("grpc-retry-pushback-ms",
                               std::to_string(refusal.pushback_ms));
}

class Training final : public v1::TrainingService::Service {
 public:
  explicit Training(FakeState& state) : state_(state) {}

  grpc::Status ForwardBackward(grpc::ServerContext* context,
                               const v1::ForwardBackwardRequest* request,
                               v1::ForwardBackwardResponse* response) override {
    (*response->mutable_metrics())["loss:sum"] = request->data_size();
    return Run(context, *request, response);
  }

  grpc::Status Forward(grpc::ServerContext* context,
                       const v1::ForwardRequest* request,
                       v1::ForwardResponse* response) override {
    (*response->mutable_metrics())["loss:sum"] = request->data_size();
    return Run(context, *request, response);
  }

  grpc::Status OptimStep(grpc::ServerContext* context,
                         const v1::OptimStepRequest* request,
                         v1::OptimStepResponse* response) override {
    response->set_grad_norm(1.5);
    return Run(context, *request, response);
  }

 private:
  // Runs a step at its turn, or replays it.
  template <typename Request, typename Response>
  grpc::Status Run(grpc::ServerContext* context, const Request& request,
                   Response* response) {
    std::unique_lock lock(state_.mu);
    state_.arrived.push_back(request.step());
    FakeRefusal refusal{grpc::StatusCode::OK, ""};
    if (!state_.refusals.empty()) {
      refusal = state_.refusals.front();
      state_.refusals.pop_front();
    }
    const auto patience = std::chrono::seconds(20);
    state_.turn.wait_for(lock, patience, [this] { return !state_.held; });
    if (refusal.code != grpc::StatusCode::OK && !refusal.run_first) {
      SetHint(context, refusal);
      return {refusal.code, refusal.message};
    }
    const auto found = state_.adapters.find(request.adapter_id());
    if (found == state_.adapters.end()) return NotFound("adapter");
    FakeState::Adapter& adapter = found->second;
    const uint64_t last = adapter.message.last_step();
    const uint64_t step = request.step() == 0 ? last + 1 : request.step();
    while (step > adapter.message.last_step() + 1) {
      if (context->IsCancelled()) return grpc::Status::CANCELLED;
      state_.turn.wait_for(lock, std::chrono::milliseconds(5));
    }
    if (step <= adapter.message.last_step()) {
      return Replay(context, adapter, request, response);
    }
    adapter.message.set_last_step(step);
    state_.applied.push_back(step);
    response->set_step(step);
    adapter.replies[step] = {request.SerializeAsString(),
                             response->SerializeAsString()};
    state_.turn.notify_all();
    return {refusal.code, refusal.message};
  }

  template <typename Request, typename Response>
  grpc::Status Replay(grpc::ServerContext* context,
                      const FakeState::Adapter& adapter, const Request& request,
                      Response* response) {
    const auto stored = adapter.replies.find(request.step());
    if (stored == adapter.replies.end() ||
        stored->second.first != request.SerializeAsString()) {
      return {grpc::StatusCode::ALREADY_EXISTS, "step used before"};
    }
    context->AddTrailingMetadata("weft-replayed", "1");
    response->ParseFromString(stored->second.second);
    return grpc::Status::OK;
  }

  FakeState& state_;
};

class Adapters final : public v1::AdapterService::Service {
 public:
  explicit Adapters(FakeState& state) : state_(state) {}

  grpc::Status CreateAdapter(grpc::ServerContext*,
                             const v1::CreateAdapterRequest* request,
                             v1::CreateAdapterResponse* response) override {
    std::lock_guard lock(state_.mu);
    if (state_.adapters.count(request->adapter_id()) > 0) {
      return {grpc::StatusCode::ALREADY_EXISTS, "id taken"};
    }
    v1::Adapter& adapter = state_.adapters[request->adapter_id()].message;
    adapter.set_adapter_id(request->adapter_id());
    *adapter.mutable_config() = request->config();
    adapter.set_tenant(request->tenant());
    *response->mutable_adapter() = adapter;
    return grpc::Status::OK;
  }

  grpc::Status GetAdapter(grpc::ServerContext*,
                          const v1::GetAdapterRequest* request,
                          v1::GetAdapterResponse* response) override {
    std::lock_guard lock(state_.mu);
    const auto found = state_.adapters.find(request->adapter_id());
    if (found == state_.adapters.end()) return NotFound("adapter");
    *response->mutable_adapter() = found->second.message;
    return grpc::Status::OK;
  }

  // One adapter to a page.
  grpc::Status ListAdapters(grpc::ServerContext*,
                            const v1::ListAdaptersRequest* request,
                            v1::ListAdaptersResponse* response) override {
    std::lock_guard lock(state_.mu);
    const auto next = state_.adapters.upper_bound(request->page_token());
    if (next == state_.adapters.end()) return grpc::Status::OK;
    *response->add_adapters() = next->second.message;
    response->set_next_page_token(next->first);
    return grpc::Status::OK;
  }

  grpc::Status DeleteAdapter(grpc::ServerContext*,
                             const v1::DeleteAdapterRequest* request,
                             v1::DeleteAdapterResponse*) override {
    std::lock_guard lock(state_.mu);
    const bool found = state_.adapters.erase(request->adapter_id()) > 0;
    return found ? grpc::Status::OK : NotFound("adapter");
  }

  grpc::Status SaveCheckpoint(grpc::ServerContext*,
                              const v1::SaveCheckpointRequest* request,
                              v1::SaveCheckpointResponse* response) override {
    std::lock_guard lock(state_.mu);
    if (state_.checkpoints.count(request->name()) > 0 &&
        !request->overwrite()) {
      return {grpc::StatusCode::ALREADY_EXISTS, "name taken"};
    }
    v1::Checkpoint& checkpoint = state_.checkpoints[request->name()];
    checkpoint.set_adapter_id(request->adapter_id());
    checkpoint.set_name(request->name());
    checkpoint.set_size_bytes(12'345);
    *response->mutable_checkpoint() = checkpoint;
    return grpc::Status::OK;
  }

  grpc::Status LoadCheckpoint(grpc::ServerContext*,
                              const v1::LoadCheckpointRequest* request,
                              v1::LoadCheckpointResponse* response) override {
    std::lock_guard lock(state_.mu);
    if (state_.checkpoints.count(request->name()) == 0) {
      return NotFound("checkpoint");
    }
    response->mutable_adapter()->set_adapter_id(request->adapter_id());
    response->mutable_adapter()->set_last_step(7);
    response->mutable_adapter()->set_tenant(request->tenant());
    return grpc::Status::OK;
  }

  grpc::Status ListCheckpoints(grpc::ServerContext*,
                               const v1::ListCheckpointsRequest*,
                               v1::ListCheckpointsResponse* response) override {
    std::lock_guard lock(state_.mu);
    for (const auto& [name, checkpoint] : state_.checkpoints) {
      *response->add_checkpoints() = checkpoint;
    }
    return grpc::Status::OK;
  }

  grpc::Status DeleteCheckpoint(grpc::ServerContext*,
                                const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse*) override {
    std::lock_guard lock(state_.mu);
    const bool found = state_.checkpoints.erase(request->name()) > 0;
    return found ? grpc::Status::OK : NotFound("checkpoint");
  }

  grpc::Status PublishSnapshot(grpc::ServerContext*,
                               const v1::PublishSnapshotRequest*,
                               v1::PublishSnapshotResponse* response) override {
    response->set_version(3);
    return grpc::Status::OK;
  }

  grpc::Status ReleaseSnapshot(grpc::ServerContext*,
                               const v1::ReleaseSnapshotRequest*,
                               v1::ReleaseSnapshotResponse*) override {
    return grpc::Status::OK;
  }

  // In pieces of 1000 bytes.
  grpc::Status ExportAdapter(
      grpc::ServerContext*, const v1::ExportAdapterRequest*,
      grpc::ServerWriter<v1::ExportAdapterResponse>* writer) override {
    std::lock_guard lock(state_.mu);
    for (const auto& [name, data] : state_.files) {
      for (size_t start = 0; start < data.size(); start += 1000) {
        v1::ExportAdapterResponse response;
        response.mutable_chunk()->set_name(name);
        response.mutable_chunk()->set_data(data.substr(start, 1000));
        writer->Write(response);
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status ImportAdapter(
      grpc::ServerContext*,
      grpc::ServerReader<v1::ImportAdapterRequest>* reader,
      v1::ImportAdapterResponse* response) override {
    v1::ImportAdapterRequest request;
    if (!reader->Read(&request)) return grpc::Status::CANCELLED;
    std::lock_guard lock(state_.mu);
    const v1::ImportOptions options = request.options();
    state_.files.clear();
    while (reader->Read(&request)) {
      state_.files[request.chunk().name()] += request.chunk().data();
    }
    v1::Adapter& adapter = state_.adapters[options.adapter_id()].message;
    adapter.set_adapter_id(options.adapter_id());
    adapter.set_tenant(options.tenant());
    *response->mutable_adapter() = adapter;
    return grpc::Status::OK;
  }

 private:
  FakeState& state_;
};

// Counts up from the last prompt token.
class Sampling final : public v1::SamplingService::Service {
 public:
  explicit Sampling(FakeState& state) : state_(state) {}

  grpc::Status Sample(grpc::ServerContext*, const v1::SampleRequest* request,
                      v1::SampleResponse* response) override {
    std::lock_guard lock(state_.mu);
    state_.last_sample = *request;
    v1::Sample& sample = *response->add_samples();
    for (uint32_t i = 1; i <= request->config().max_tokens(); ++i) {
      sample.add_tokens(*request->prompt().rbegin() + i);
    }
    return grpc::Status::OK;
  }

  grpc::Status SampleStream(
      grpc::ServerContext*, const v1::SampleStreamRequest* request,
      grpc::ServerWriter<v1::SampleStreamResponse>* writer) override {
    const v1::SampleRequest& inner = request->request();
    for (uint32_t i = 1; i <= inner.config().max_tokens(); ++i) {
      v1::SampleStreamResponse response;
      response.add_tokens(*inner.prompt().rbegin() + i);
      if (!writer->Write(response)) return grpc::Status::CANCELLED;
    }
    return grpc::Status::OK;
  }

 private:
  FakeState& state_;
};

class Info final : public v1::ServerService::Service {
 public:
  explicit Info(FakeState& state) : state_(state) {}

  grpc::Status GetInfo(grpc::ServerContext* context, const v1::GetInfoRequest*,
                       v1::GetInfoResponse* response) override {
    std::lock_guard lock(state_.mu);
    const auto& metadata = context->client_metadata();
    const auto token = metadata.find("authorization");
    if (token != metadata.end()) {
      state_.authorization.assign(token->second.begin(), token->second.end());
    }
    response->mutable_info()->mutable_model()->set_name("toy");
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*,
                     v1::DrainResponse*) override {
    return grpc::Status::OK;
  }

 private:
  FakeState& state_;
};

}  // namespace

FakeServer::FakeServer() {
  grpc::EnableDefaultHealthCheckService(true);
  services_.push_back(std::make_unique<Training>(state_));
  services_.push_back(std::make_unique<Adapters>(state_));
  services_.push_back(std::make_unique<Sampling>(state_));
  services_.push_back(std::make_unique<Info>(state_));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port);
  for (const auto& service : services_) builder.RegisterService(service.get());
  server_ = builder.BuildAndStart();
  target_ = "127.0.0.1:" + std::to_string(port);
}

FakeServer::~FakeServer() {
  Hold(false);
  server_->Shutdown(std::chrono::system_clock::now());
}

void FakeServer::Refuse(FakeRefusal refusal) {
  std::lock_guard lock(state_.mu);
  state_.refusals.push_back(std::move(refusal));
}

void FakeServer::Hold(bool held) {
  std::lock_guard lock(state_.mu);
  state_.held = held;
  state_.turn.notify_all();
}

void FakeServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
}

}  // namespace weft::client
