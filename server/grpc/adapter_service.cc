// weft.v1.AdapterService: adapters, checkpoints, snapshots, PEFT folders.
#include <string>
#include <utility>

#include "server/grpc/services.h"
#include "server/grpc/unary_call.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server {
namespace {

void AddAdapters(RawService* service) {
  AddUnary<v1::CreateAdapterRequest, v1::CreateAdapterResponse>(
      service, Rpc::kCreateAdapter, &engine::Engine::CreateAdapter);
  AddUnary<v1::GetAdapterRequest, v1::GetAdapterResponse>(
      service, Rpc::kGetAdapter, &engine::Engine::GetAdapter);
  AddUnary<v1::ListAdaptersRequest, v1::ListAdaptersResponse>(
      service, Rpc::kListAdapters, &engine::Engine::ListAdapters);
  AddUnary<v1::DeleteAdapterRequest, v1::DeleteAdapterResponse>(
      service, Rpc::kDeleteAdapter, &engine::Engine::DeleteAdapter);
  AddUnary<v1::MoveAdapterRequest, v1::MoveAdapterResponse>(
      service, Rpc::kMoveAdapter, &engine::Engine::MoveAdapter);
}

void AddCheckpoints(RawService* service) {
  AddUnary<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(
      service, Rpc::kSaveCheckpoint, &engine::Engine::SaveCheckpoint);
  AddUnary<v1::LoadCheckpointRequest, v1::LoadCheckpointResponse>(
      service, Rpc::kLoadCheckpoint, &engine::Engine::LoadCheckpoint);
  AddUnary<v1::ListCheckpointsRequest, v1::ListCheckpointsResponse>(
      service, Rpc::kListCheckpoints, &engine::Engine::ListCheckpoints);
  AddUnary<v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse>(
      service, Rpc::kDeleteCheckpoint,
      [](engine::Engine& engine, std::pair<std::string, std::string> names,
         auto done) {
        engine.DeleteCheckpoint(std::move(names.first), std::move(names.second),
                                std::move(done));
      });
  AddUnary<v1::SetCheckpointTtlRequest, v1::SetCheckpointTtlResponse>(
      service, Rpc::kSetCheckpointTtl, &engine::Engine::SetCheckpointTtl);
}

void AddSnapshots(RawService* service) {
  AddUnary<v1::PublishSnapshotRequest, v1::PublishSnapshotResponse>(
      service, Rpc::kPublishSnapshot, &engine::Engine::PublishSnapshot);
  AddUnary<v1::ReleaseSnapshotRequest, v1::ReleaseSnapshotResponse>(
      service, Rpc::kReleaseSnapshot, &engine::Engine::ReleaseSnapshot);
}

}  // namespace

std::unique_ptr<RawService> MakeAdapterService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddAdapters(service.get());
  AddCheckpoints(service.get());
  AddSnapshots(service.get());
  AddFileStreams(service.get());
  return service;
}

}  // namespace weft::server
